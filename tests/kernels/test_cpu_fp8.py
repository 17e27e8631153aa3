"""Weights of e4m3: each of its numbers is what products are of, on every instruction set and in
every format of rows; rounding to them is PyTorch's. Panels and whole models: test_cpu_rounded.py,
test_cpu_program.py."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kernels.cpu.library import Library, supported
from kernels.cpu.matrix import E4M3, E4M3_GROUP, Held, in_e4m3
from kernels.cpu.program import Format, Geometry, Limits, Program
from kernels.cpu.recorder import Recorder
from kernels.sampling import SAMPLING
from tests.support.programs import compute, laid, logits_of, packed, rounded_to, stood_for

NUMBERS = np.array([bits for bits in range(256) if bits & 0x7F != 0x7F], np.uint8)
"""All of e4m3 but NaN."""

each_library = pytest.mark.parametrize("instruction_set", supported())
each_format = pytest.mark.parametrize("number_format", ["float32", "bfloat16_weights", "bfloat16"])


def products(
    instruction_set: str,
    rows: np.ndarray,
    to: Held,
    parts: tuple[np.ndarray, ...],
    number_format: Format = "float32",
) -> np.ndarray:
    """[rows, n] of rows [rows, k]; those of bfloat16 must be such."""
    library, recorder, count = Library(instruction_set), Recorder(), len(rows)
    table = rows.astype(np.float32)
    if number_format != "float32":
        table = (table.view(np.uint32) >> 16).astype(np.uint16)
    logits = recorder.linear(
        recorder.wanted(recorder.embed(packed(library, table))), laid(library, to, *parts)
    )
    limits, geometry = Limits(count, count, count), Geometry(1, 1, 16, 1, 16)
    program = Program(library, recorder, logits, geometry, limits, [], number_format, 1, 2)
    span, ends = np.arange(count, dtype=np.int32), np.array([0, count], np.int32)
    blocks, samplings = np.zeros((1, count // 16 + 1), np.int32), np.zeros(count, SAMPLING)
    compute(program, span, span, ends, ends[1:], blocks, span, samplings)
    found = logits_of(program)[:count].copy()
    program.close()
    return found


@settings(deadline=None)
@given(arrays(np.float32, (3, 40), elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False)))
def test_rounding_is_to_the_nearest_as_pytorch_has_it(values: np.ndarray) -> None:
    bits, scales = in_e4m3(values)
    steps = np.where(scales > 0, scales, 1)[:, None]
    expected = torch.from_numpy(np.clip(values / steps, -448, 448)).to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(E4M3[bits], expected.float().numpy())
    furthest = np.abs(values).max(axis=1) > 1e-30
    assert (np.abs(E4M3[bits]).max(axis=1) == np.where(furthest, 448, 0)).all() or not all(furthest)


@pytest.mark.parametrize("to", ["fp8", "fp8_blocks"])
@each_format
@each_library
def test_each_of_its_numbers_is_met_as_it_is(
    instruction_set: str, number_format: Format, to: Held
) -> None:
    """The smallest, too, which have no exponent; at each place of a panel and of a pair of k's."""
    n, k = len(NUMBERS), 2 * E4M3_GROUP
    numbers = np.stack([np.roll(NUMBERS, by)[np.arange(k) % n] for by in range(n)])
    count = 1 if to == "fp8" else k // E4M3_GROUP
    scales = np.ldexp(np.float32(1), np.arange(n * count) % 5).astype(np.float32)
    parts = numbers, scales if to == "fp8" else scales.reshape(n, count)
    rows = np.eye(k, dtype=np.float32)
    values = E4M3[numbers] * np.repeat(scales.reshape(n, count), k // count, axis=1)
    found = products(instruction_set, rows, to, parts, number_format)
    np.testing.assert_array_equal(found, values.T)
    few = products(instruction_set, rows[:3], to, parts, number_format)
    np.testing.assert_array_equal(few, values.T[:3])


@pytest.mark.parametrize(("to", "k", "n"), [("fp8", 300, 33), ("fp8_blocks", 640, 70)])
@each_format
@each_library
def test_products_are_those_of_floats(
    instruction_set: str, number_format: Format, to: Held, k: int, n: int
) -> None:
    random = np.random.default_rng(k)
    weights = random.normal(size=(n, k)).astype(np.float32) * random.choice([1e-3, 1, 50], (n, 1))
    rows = torch.from_numpy(random.normal(size=(40, k)).astype(np.float32)).bfloat16()
    parts = rounded_to(to, weights.astype(np.float32))
    found = products(instruction_set, rows.float().numpy(), to, parts, number_format)
    values = stood_for(to, weights.astype(np.float32))
    wanted = rows.double().numpy() @ values.T.astype(np.float64)
    room = np.abs(rows.double().numpy()) @ np.abs(values.T.astype(np.float64))
    assert (np.abs(found - wanted) <= 1e-6 * room).all()
    for number in (0, 5):
        alone = products(instruction_set, rows.float().numpy()[[number]], to, parts, number_format)
        np.testing.assert_array_equal(alone[0], found[number])


@pytest.mark.parametrize("to", ["fp8", "fp8_blocks"])
@each_library
def test_a_scale_that_is_no_number_makes_none_of_its_column(instruction_set: str, to: Held) -> None:
    """As one is whose weights are none (formats/fp8.py)."""
    numbers, scales = rounded_to(to, np.ones((20, 256), np.float32))
    scales = scales.copy()
    scales.reshape(20, -1)[7, -1] = np.nan
    found = products(instruction_set, np.ones((9, 256)), to, (numbers, scales))
    assert np.isnan(found[:, 7]).all()
    np.testing.assert_array_equal(np.delete(found, 7, axis=1), 256)
