"""The models that are tokenized for: what the registry lists, and what their files say."""
