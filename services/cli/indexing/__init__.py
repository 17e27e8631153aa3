"""`penstock index`: a folder's files into a vector store, through the public API."""
