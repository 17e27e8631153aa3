"""A generation's way through the gateway, and the record of it."""
