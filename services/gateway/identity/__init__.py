"""Who asks: API keys, and their end."""
