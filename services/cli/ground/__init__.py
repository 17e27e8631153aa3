"""What a stack stands on: Ray, stores and ports, of one host or of several."""
