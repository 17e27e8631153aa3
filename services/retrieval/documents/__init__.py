"""How a file becomes chunks: read and cut in processes that may be killed.

chunkers.py        those processes, as the service has them; chunk_process.py: one of them
kinds.py           what a file is; loading.py: which of loaders/ reads it
draft.py           what a loader finds, as sections; sections.py: those that Markdown has
chunking.py        sections to chunks of at most so many tokens
chunks.py          what comes of it, and what bounds it
"""
