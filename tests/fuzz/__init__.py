"""Random requests with random features, cancels and injected faults, through a real engine.

    requests.py   what is asked for: one function for each feature, in FEATURES
    faults.py     what goes wrong on purpose: one function for each kind, in KINDS
    rounds.py     an engine, its requests, and what must hold behind them

`python -m tests.fuzz --requests 10000 --seed 7` (or `make fuzz`): rounds of 250, each with a seed
of its own that follows from the first; a round that fails tells the seed that repeats it.
"""
