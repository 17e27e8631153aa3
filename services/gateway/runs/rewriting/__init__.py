"""What a chat's vector stores are searched for: its last question, made whole by what was said
before (decision 0056)."""
