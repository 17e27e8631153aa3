"""Hand-written documents, relations and small talk, and the program that makes examples of them."""
