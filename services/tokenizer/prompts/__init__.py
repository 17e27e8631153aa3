"""A request's prompt: its parts within the window, its tokens, and what the policy says of it."""
