"""Attention of the C++ kernels alone: tokens whose queries, keys and values are told."""

import numpy as np
import pytest

from kernels.cpu.library import Library, supported
from kernels.cpu.program import Format, Geometry, KvFormat, Limits, Program
from kernels.cpu.recorder import Recorder
from kernels.heads import Scores
from kernels.sampling import SAMPLING
from tests.support.programs import compute, logits_of, packed

DIM = 16


def attended(
    instruction_set: str,
    number_format: Format,
    kv_format: KvFormat,
    keys: list[float],
    values: list[float],
) -> np.ndarray:
    """Of one head what comes of a query of 1 behind tokens with these keys, which are their scores,
    in the first dim, and these values in all: [DIM]."""
    count = len(keys)
    tokens = np.zeros((count, 3 * DIM), np.float32)
    tokens[:, 0], tokens[:, DIM], tokens[:, 2 * DIM :] = 1, keys, np.array(values)[:, None]
    identity = np.eye(DIM, dtype=np.float32)
    if number_format != "float32":
        tokens, identity = (
            (of.view(np.uint32) >> 16).astype(np.uint16) for of in (tokens, identity)
        )
    library, recorder = Library(instruction_set), Recorder()
    qkv = recorder.rotary(recorder.embed(packed(library, tokens)), 0)
    y = recorder.wanted(recorder.attention(qkv, 0, DIM, Scores(1.0, 0.0, 0)))
    logits = recorder.linear(y, packed(library, identity))
    turned = np.ones((count, DIM // 2), np.float32), np.zeros((count, DIM // 2), np.float32)
    geometry, limits = Geometry(1, 1, DIM, 1, 16, kv_format), Limits(count, 1, count)
    blocks = np.arange(-(-count // 16), dtype=np.int32)[None]
    program = Program(
        library, recorder, logits, geometry, limits, [turned], number_format, blocks.size, 1
    )
    span, ends = np.arange(count, dtype=np.int32), np.array([0, count], np.int32)
    compute(program, span, span, ends, ends[1:], blocks, span[-1:], np.zeros(1, SAMPLING))
    found = logits_of(program)[0].copy()
    program.close()
    return found


@pytest.mark.parametrize("kv_format", ["auto", "int8", "fp8", "int4"])
@pytest.mark.parametrize("number_format", ["float32", "bfloat16"])
@pytest.mark.parametrize("instruction_set", supported())
def test_weights_that_are_nothing_beside_the_best_are_none(
    instruction_set: str, number_format: Format, kv_format: KvFormat
) -> None:
    """What they come to with a value and its scale would be subnormal, and such products take ten
    to fifty times as long. One of 2^-29 counts, one of 2^-72 does not, whatever it is of."""
    for keys, values, want in (
        ([-20.0, *[0.0] * 17], [1e10, *[1.0] * 17], 1 + 1e10 * np.exp(-20.0) / 17),
        ([-50.0, *[0.0] * 17], [1e30, *[1.0] * 17], 1.0),
        ([*[-50.0] * 40, 0.0], [*[1e30] * 40, 1.0], 1.0),
    ):
        found = attended(instruction_set, number_format, kv_format, keys, values)
        np.testing.assert_allclose(found, want, rtol=0.03 if number_format == "bfloat16" else 0.01)
