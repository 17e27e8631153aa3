"""Texts as several services read them."""
