"""How tokens are chosen, one row of parameters for each. Imports no torch."""

from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SAMPLING = np.dtype(
    {
        "names": [
            "temperature",
            "top_k",
            "top_p",
            "seed",
            "position",
            "min_p",
            "given",
            "logprobs",
            "first_edit",
            "num_edits",
        ],
        "formats": [np.float32, np.int32, np.float64, np.uint64, np.int32, np.float32]
        + [np.int32] * 4,
    },
    align=True,
)
"""temperature 0: the best token; top_k 0, top_p 1 and min_p 0: off; `position` is that of the token
to be sampled, in its sequence. given: 0, or 1 + the token that is there already: nothing is
sampled, only its logprob is wanted. logprobs: 0: none; n: the token's, and those of the n - 1 best.
Edits [first_edit, first_edit + num_edits) are the row's. Laid out as kernels/cpu/native/sampler.h
has it."""

EDIT = np.dtype(
    {"names": ["token", "factor", "add"], "formats": [np.int32, np.float32, np.float32]}, align=True
)
"""What becomes of one token's logit, in the order of the edits: above 0 it is divided by the
factor, else multiplied; then `add` is added, which may be -inf."""
NO_EDITS = np.zeros(0, EDIT)

SAMPLING_WORDS = SAMPLING.itemsize // 4
"""Of four bytes, that a row of SAMPLING has: a step's rows travel as an array of these."""


def word_of(field: str) -> int:
    """Where a field of four bytes is in a row of SAMPLING."""
    assert SAMPLING.fields is not None
    return int(SAMPLING.fields[field][1]) // 4


def rows_of(words: "array[int]") -> NDArray[np.void]:
    """Rows of SAMPLING, in the same memory."""
    return np.asarray(words).view(SAMPLING)


NOT_FINITE, NONE_LEFT = -1, -2
"""In a sampled token's place: a logit of the row is NaN, or the best infinite; all are -inf."""


@dataclass(slots=True)
class Top:
    """Logprobs of R rows: in column 0 of the row's token, behind it of its best ones, best first;
    what a row has not asked for is undefined."""

    ids: NDArray[np.int32]
    """[R, width]; -1: the vocabulary has no more"""
    logprobs: NDArray[np.float32]
    """[R, width]"""
    width: int = field(init=False)

    def __post_init__(self) -> None:
        self.width = int(self.ids.shape[1])

    @classmethod
    def of(cls, samplings: NDArray[np.void]) -> "Top":
        """Room for what these rows ask for; of no width if none of them does."""
        return cls.for_rows(len(samplings), int(samplings["logprobs"].max(initial=0)))

    @classmethod
    def for_rows(cls, rows: int, width: int) -> "Top":
        if not width:
            return NO_TOP
        return cls(np.empty((rows, width), np.int32), np.empty((rows, width), np.float32))


NO_TOP = Top(np.empty((0, 0), np.int32), np.empty((0, 0), np.float32))
