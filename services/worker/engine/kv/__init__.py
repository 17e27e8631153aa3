"""KV blocks: who holds them, where their bytes lie, and how they leave and come."""
