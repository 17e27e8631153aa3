"""What a request costs the front door and what it adds: `python -m bench.front_door`."""
