"""Requests for numbers in place of text."""
