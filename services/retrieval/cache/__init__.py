"""Searches that were made before (decision 0055)."""
