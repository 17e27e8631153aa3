"""Calls to the retrieval service, and searches of one store by itself."""
