"""The engine as a process of its own: its loop, the replica's end, what the host lets it use."""
