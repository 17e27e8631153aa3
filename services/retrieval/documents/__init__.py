"""How a file becomes chunks: read and cut in processes that may be killed.

chunkers.py        those processes, as the service has them; chunk_process.py: one of them
sections.py        what a text's headings open; chunking.py: chunks of at most so many tokens
chunks.py          what comes of it
"""
