"""Runs that outlive their connections (decision 0046)."""
