"""Programs that each run one engine, in that engine's own Python; see line.py."""
