"""GGUF files, llama.cpp's: a model's configuration, tokenizer and weights in one.

header.py      what a file says of itself, read within bounds
hub_config.py  that as config.json would say it
vocabulary.py  its tokenizer as tokenizer.json would have it
unfolded.py    a folder with these beside the file, which all services read as any checkpoint's
"""
