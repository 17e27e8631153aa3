"""The admin listener: who may what, over HTTP on a port of its own."""
