"""Model families: each says once which tensors it asks for, and what it computes."""
