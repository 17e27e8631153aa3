"""What the GPU's kernels and engine give on the GPU at hand: `python -m bench.gpu --json FILE`.

    __main__.py   the command
    device.py     the device's own ceilings: bytes and products a second
    inputs.py     fresh random inputs
    checks.py     every kernel against its reference, before anything is measured
    kernels.py    kernels against the floors that bytes and operations set
    engine.py     the engine likewise, on checkpoints of random weights
    report.py     the results as Markdown

Needs torch, triton, numpy and safetensors. `--dry` runs all of it on a CPU, in Triton's interpreter
and on tiny sizes: the figures then mean nothing, but that the command works.
"""
