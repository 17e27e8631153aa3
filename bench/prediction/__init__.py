"""What could be known of a chat's next turn before it comes (decision 0059)."""
