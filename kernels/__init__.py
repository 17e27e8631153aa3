"""What the engine computes with.

cpu/            C++: a whole forward pass in one call; imports no torch
triton/         for NVIDIA GPUs
reference.py    the same operations in plain torch: their contracts, and what runs elsewhere
heads.py        what a model does with its heads between the products
deltas.py       what an adapter adds to a linear, as torch tensors
mixture.py      a layer of experts, of which each row meets a few
kv_layer.py     a layer's keys and values, as the two take them
paged_batch.py  where the tokens of a step lie, for them
sampling.py     how a row's token is chosen, as arrays say it
"""
