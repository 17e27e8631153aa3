"""How tokens are chosen, one row of parameters for each. Imports no torch."""

import numpy as np

SAMPLING = np.dtype(
    {
        "names": ["temperature", "top_k", "top_p", "seed", "position"],
        "formats": [np.float32, np.int32, np.float64, np.uint64, np.int32],
    },
    align=True,
)
"""temperature 0: the best token; top_k 0 and top_p 1: off; `position` is that of the token to be
sampled, in its sequence. Laid out as kernels/cpu/native/sampler.h has it."""
