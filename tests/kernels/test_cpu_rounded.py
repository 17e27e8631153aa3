"""Matrices of few bits: how rows are rounded, that panels hold what they were given, and that
products are of just these values. What a whole model gives is in test_cpu_program.py."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kernels.cpu.library import Library, supported
from kernels.cpu.matrix import (
    E4M3_GROUP,
    GROUP,
    PANEL,
    Held,
    elements_of,
    grouped,
    in_e4m3,
    quantized,
    rounded,
)
from kernels.cpu.program import Format, Geometry, Limits, Program
from kernels.cpu.recorder import Recorder
from kernels.sampling import SAMPLING
from tests.support.programs import compute, logits_of, packed, stood_for

numbers = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)
SMALLEST = np.float32(2**-149)


def rows_of(widths: st.SearchStrategy[int]) -> st.SearchStrategy[np.ndarray]:
    return st.tuples(st.integers(1, 5), widths).flatmap(
        lambda shape: arrays(np.float32, shape, elements=numbers)
    )


@settings(deadline=None)
@given(rows_of(st.integers(1, 9)))
def test_each_value_is_met_within_half_a_step(values: np.ndarray) -> None:
    found, scales = quantized(values)
    assert found.dtype == np.int8
    assert np.abs(found.astype(int)).max() <= 127
    step = scales[:, None] * (1 + 1e-5) + 1e-37
    assert (np.abs(rounded(values, "int8") - values) <= step / 2).all()
    for row, of_row in zip(values, found, strict=True):
        most = np.abs(row).argmax()
        assert abs(of_row[most]) == (127 if abs(row[most]) > 1e-35 else abs(of_row[most]))


@settings(deadline=None)
@given(rows_of(st.sampled_from([GROUP, 2 * GROUP])))
def test_of_a_group_each_value_is_met_within_half_a_step(values: np.ndarray) -> None:
    """But for what is as far from 0 as the furthest, on the other side: that is a step away."""
    found, scales = grouped(values)
    assert found.dtype == np.uint8
    assert found.max() <= 15
    assert scales.dtype == np.float16
    groups = values.reshape(len(values), -1, GROUP)
    step = np.abs(scales[:, :, None].astype(np.float32))
    apart = np.abs(rounded(values, "int4").reshape(groups.shape) - groups)
    room = 1e-3 * np.abs(groups).max(axis=2, keepdims=True) + 2**-20
    clipped = groups / np.where(scales != 0, scales, 1)[:, :, None].astype(np.float32) > 7.5
    assert (apart <= np.where(clipped, step, step / 2) + room).all()


@pytest.mark.parametrize("to", ["int8", "int4", "fp8"])
def test_rounding_what_was_rounded_changes_nothing(to: str) -> None:
    values = np.random.default_rng(1).normal(size=(40, 64)).astype(np.float32)
    by = {"int8": quantized, "int4": grouped, "fp8": in_e4m3}[to]
    np.testing.assert_array_equal(by(values)[0], by(rounded(values, to))[0])


def test_the_furthest_of_a_group_is_met_exactly() -> None:
    """Within what a half holds; on either side of 0."""
    values = np.ones((2, GROUP), np.float32)
    values[0, 5], values[1, 7] = -40, 40
    found, scales = grouped(values)
    assert (found[0, 5], found[1, 7]) == (0, 0)
    assert scales[:, 0].tolist() == [5, -5]


def test_what_halves_do_not_hold_stays_finite() -> None:
    assert np.isfinite(rounded(np.full((1, GROUP), 3e6, np.float32), "int4")).all()


@pytest.mark.parametrize("to", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_makes_none_of_its_row_or_group(to: str, what: float) -> None:
    """So a request that meets it fails, as with the weights as they are."""
    values = np.ones((2, 64), np.float32)
    values[0, 3] = what
    found, beside = rounded(values, to), GROUP if to == "int4" else 64
    assert np.isnan(found[0, :beside]).all()
    np.testing.assert_allclose(found[0, beside:], 1)
    np.testing.assert_allclose(found[1], 1)


@pytest.mark.parametrize("to", ["int8", "int4", "fp8"])
def test_the_smallest_there_are_keep_their_sign(to: str) -> None:
    """A scale of 1.49 of them is 1: the furthest of 190 would be -66 of it as an int8."""
    values = SMALLEST * np.linspace(-190, 190, 64, dtype=np.float32)[None]
    assert (rounded(values, to) * values >= 0).all()
    assert np.abs(rounded(values, to) - values).max() <= 64 * SMALLEST or to != "int8"


@pytest.mark.parametrize("to", ["int8", "int4", "fp8"])
def test_zeros_stay_zeros(to: str) -> None:
    assert not rounded(np.zeros((2, 64), np.float32), to).any()


@pytest.mark.parametrize("instruction_set", supported())
@pytest.mark.parametrize("n", [16, 17, 47])
@pytest.mark.parametrize(
    ("to", "bytes_"),
    [
        ("int8", 384 + 4),
        ("int4", 192 + 384 // GROUP * 2),
        ("int8_groups", 384 + 384 // GROUP * 2),
        ("int4_zeros", 192 + 384 // GROUP * 3),
        ("fp8", 384 + 4),
        ("fp8_blocks", 384 + 384 // E4M3_GROUP * 4),
    ],
)
def test_rows_come_out_of_panels_as_they_went_in(
    instruction_set: str, n: int, to: Held, bytes_: int
) -> None:
    values = np.random.default_rng(n).normal(size=(n, 384)).astype(np.float32)
    matrix = packed(Library(instruction_set), values, to=to)
    np.testing.assert_array_equal(matrix.rows(range(n)), stood_for(to, values))
    np.testing.assert_array_equal(matrix.rows([n - 1, 3]), stood_for(to, values)[[n - 1, 3]])
    whole = -(-n // PANEL) * PANEL
    assert matrix.panels.nbytes == whole * bytes_
    assert not matrix.rows(range(n, whole)).any()


@pytest.mark.parametrize(
    ("held", "elements"),
    [
        ("", 48 * 128),
        ("int8", 48 * (128 + 4)),
        ("int4", 48 * (64 + 8)),
        ("int8_groups", 48 * (128 + 8)),
        ("int4_zeros", 48 * (64 + 8 + 4)),
        ("fp8", 48 * (128 + 4)),
        ("fp8_blocks", 48 * (128 + 4)),
        ("w8a8", 48 * (128 + 4)),
    ],
)
def test_what_a_row_takes(held: Held, elements: int) -> None:
    """An int8 or e4m3 a byte and its row four more, or by blocks 128 of them, an int4 half a byte;
    by groups 32 of them two more, and of a zero one."""
    assert elements_of(33, 128, held) == elements


def exact(n: int, to: Held, k: int) -> np.ndarray:
    """Rows that are met exactly, of few bits: sums of their products are, too, in any order."""
    random = np.random.default_rng(n)
    of_group = 2.0 ** (np.arange(k) // GROUP % 3)
    if to == "int8":
        values = random.integers(-127, 128, (n, k))
        values[:, 0] = 127
        found = (values / 8).astype(np.float32)
    elif to in ("fp8", "fp8_blocks"):
        values = random.integers(-15, 16, (n, k))
        values[:, :: E4M3_GROUP if to == "fp8_blocks" else k] = 448
        by = np.repeat(of_group[:: E4M3_GROUP // GROUP], E4M3_GROUP)[:k]
        found = (values / (by if to == "fp8_blocks" else 4)).astype(np.float32)
    elif to == "int8_groups":
        values = random.integers(-127, 128, (n, k))
        values[:, ::GROUP] = 127
        found = (values / of_group).astype(np.float32)
    elif to == "int4_zeros":
        zeros = random.integers(0, 16, (n, k // GROUP))
        values = random.integers(0, 16, (n, k)) - zeros.repeat(GROUP, axis=1)
        values[:, ::GROUP], values[:, 1::GROUP] = -zeros, 15 - zeros
        found = (values / of_group).astype(np.float32)
    else:
        values = random.integers(-8, 8, (n, k))
        values[:, ::GROUP] = -8
        found = (values / of_group).astype(np.float32)
    np.testing.assert_array_equal(stood_for(to, found), found)
    return found


@pytest.mark.parametrize(
    ("to", "k"),
    [
        ("int8", 64), ("int8", 256), ("int8", 516), ("int4", 64), ("int4", 320),
        ("int8_groups", 64), ("int8_groups", 320), ("int4_zeros", 128), ("int4_zeros", 384),
        ("fp8", 4), ("fp8", 256), ("fp8", 516), ("fp8_blocks", 128), ("fp8_blocks", 384),
    ],
)  # fmt: skip
@pytest.mark.parametrize("number_format", ["float32", "bfloat16_weights", "bfloat16"])
@pytest.mark.parametrize("instruction_set", supported())
def test_products_are_of_these_values_to_the_bit(
    instruction_set: str, number_format: Format, to: Held, k: int
) -> None:
    """Of an embedding's rows, one and many, and a matrix whose last panel is not full."""
    table, weights, most = exact(70, to, k), exact(83, to, k), 70
    library, recorder = Library(instruction_set), Recorder()
    x = recorder.wanted(recorder.embed(packed(library, table, to=to)))
    logits = recorder.linear(x, packed(library, weights, to=to))
    limits = Limits(tokens=most, sampled=most, context=80)
    geometry = Geometry(1, 1, 16, 1, 16)
    program = Program(library, recorder, logits, geometry, limits, [], number_format, 1, 2)
    for rows in (1, 2, 5, 7, 13, 70):
        span, ends = np.arange(rows, dtype=np.int32), np.array([0, rows], np.int32)
        ids = span[::-1].copy()
        blocks, samplings = np.zeros((1, 5), np.int32), np.zeros(rows, SAMPLING)
        compute(program, ids, span, ends, ends[1:], blocks, span, samplings)
        want = table[ids].astype(np.float64) @ weights.T.astype(np.float64)
        np.testing.assert_array_equal(logits_of(program)[:rows], want)
    program.close()
