"""What tenants keep: files, and vector stores made of them."""
