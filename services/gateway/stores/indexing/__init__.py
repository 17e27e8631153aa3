"""A file's way into a vector store."""
