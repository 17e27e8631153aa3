"""Batches: files of requests, answered while there is capacity (decision 0047)."""
