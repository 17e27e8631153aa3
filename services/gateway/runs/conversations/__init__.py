"""Conversations that responses go on with."""
