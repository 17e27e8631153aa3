"""What a model would cost on machines that need not be here: `penstock plan`. The formulas, and how
far they are from what was measured, are in docs/planning.md.

    shapes.py   which model: a folder with a config.json, or a name
    devices.py  which GPU: memory, bandwidth, operations
    costs.py    bytes and operations of the model's weights, keys and values, steps
    fleet.py    how many replicas that makes, and how fast
"""
