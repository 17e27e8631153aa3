"""One file for each kind of document; kinds.py says which a file is."""
