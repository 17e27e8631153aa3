"""A request's way out: tokens to text, kinds and stops, and the policy on what is written."""
