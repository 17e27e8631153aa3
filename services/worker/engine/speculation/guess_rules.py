"""Numbers that were chosen, of when guesses are made (speculation.py says how they go together).

Whatever a machine takes is measured: in the cost model, host_cost.py, proposer.py.
"""

# What is believed of a guess.
HOPE = 0.9
"""Before any was seen: how likely one is right. Too low it would stay so, unseen."""
KNOWN_OF_OTHERS = 2.0
"""As many guesses of its own what is known of all sequences counts for, to one."""
FADES, RESTS = 0.8, 0.97
"""Of a sequence's guesses: what was seen counts so much less after each look, and with each token
since: who was not worth a guess is tried again after some dozens."""
ALL_FADE, ALL_REST = 0.99, 0.999
"""Likewise, of all sequences' together."""

# What it must win.
MARGIN = 1.15
"""By so much a guess must be better than none, for what is not measured."""
FORGETS = 0.999
"""By so much less what guesses cost is believed with each step that has none."""
WAGER = 4.0
"""Times what it takes to begin must have been won by now, had it begun before."""

# Looking up what was before.
LOOKS = 8
"""At so many of the last places, for the one that agrees the furthest back."""
FINDS_MOVE = 0.1
"""By so much of the difference each look moves how many looks are believed to find something."""
LEAST_FINDS = 1 / 32
"""As few at least: then they are tried again."""
