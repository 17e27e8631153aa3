"""Vector stores and the files in them: what is kept of them, and how they go."""
