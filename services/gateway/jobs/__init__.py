"""Durable jobs: what outlives its gateway and waits for capacity (decision 0047)."""
