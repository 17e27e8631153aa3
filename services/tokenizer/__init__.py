"""The tokenizer: conversations to token ids within the window, token ids back to text, and the
policy on what may go in.
"""
