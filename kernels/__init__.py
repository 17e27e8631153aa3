"""What the engine computes with.

cpu/            C++: a whole forward pass in one call; imports no torch
sampling.py     how a row's token is chosen, as arrays say it
ops.py          operations on torch tensors, by device, and what each promises
reference.py    their plain meaning in torch, which runs where nothing faster does
paged_batch.py  where the tokens of a step lie, for those
"""
