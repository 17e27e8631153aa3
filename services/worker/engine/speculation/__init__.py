"""Guesses of tokens: who makes them, how many, and what became of them."""
