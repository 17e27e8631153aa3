"""Kernels for NVIDIA GPUs, in Triton; contracts in `kernels/reference.py`.

    attend.py        the inner loop of attention: pages, softmax as it goes
    prefill.py       attention of many new tokens of a sequence
    decode.py        attention of one, the sequence cut in splits; merge.py puts these together
    embed.py         rows of the embedding, by ids that the device may know alone
    norm.py          root mean square norm, alone or with the addition before it
    rotary.py        normed and turned queries; such keys, and values, into the cache
    activation.py    silu(gate) * up, gelu(gate) * up
    experts.py       products of rows with the experts that they chose
    deltas.py        what adapters of low rank add to linears
    linear.py        products of rows with a matrix of few bits; narrow.py their inner loop
    matrix.py        how such a matrix lies
    sampling.py      the next tokens, without a sort; philox.py its noise
    numbers.py       what Triton's interpreter needs otherwise
    launch.py        what launches have in common
    aot.py           compiles all of them for a GPU that need not be there

`TRITON_INTERPRET=1`, set before these modules are imported, runs them on CPU tensors, slowly.
"""
