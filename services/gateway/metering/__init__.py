"""What requests may use, what they used, and what that cost."""
