"""Rows that meet int8 and int4: what of them int16 keep, and that products are of just that, to the
bit, on every instruction set."""

from functools import partial

import numpy as np
import pytest

from kernels.cpu.library import Library, supported
from kernels.cpu.matrix import GROUP, grouped, quantized, rounded
from kernels.cpu.program import Geometry, Limits, Program
from kernels.cpu.recorder import Recorder
from kernels.sampling import SAMPLING
from tests.support.programs import compute, logits_of, packed

OF_ROWS = {"int8": 256, "int4": GROUP}
"""k's of a row with one scale."""

each_library = pytest.mark.parametrize("instruction_set", supported())
each_format = pytest.mark.parametrize("to", ["int8", "int4"])


def products(instruction_set: str, rows: np.ndarray, weights: np.ndarray, to: str) -> np.ndarray:
    """[rows, n] of rows [rows, k] and weights [n, k]: all rows in a step, and the ids that are
    sampled of them behind the products, where -1 is of one that is not finite."""
    library, recorder, count = Library(instruction_set), Recorder(), len(rows)
    x = recorder.wanted(recorder.embed(packed(library, rows)))
    logits = recorder.linear(x, packed(library, weights, to=to))
    limits, geometry = Limits(count, count, count), Geometry(1, 1, 16, 1, 16)
    program = Program(library, recorder, logits, geometry, limits, [], "float32", 1, 2)
    span, ends = np.arange(count, dtype=np.int32), np.array([0, count], np.int32)
    blocks, samplings = np.zeros((1, count // 16 + 1), np.int32), np.zeros(count, SAMPLING)
    compute(program, span, span, ends, ends[1:], blocks, span, samplings)
    found = logits_of(program)[:count].copy()
    program.close()
    return found


def shortened(rows: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Of rows [rows, k] the int16, as they are, and a power of two for each: the greatest by which
    the furthest of a group is below 2^15."""
    scales = np.empty_like(rows)
    for first in range(0, rows.shape[1], group):
        most = np.abs(rows[:, first : first + group]).max(axis=1, keepdims=True)
        scales[:, first : first + group] = np.exp2(np.maximum(np.floor(np.log2(most)), -112) - 14)
    return np.clip(np.rint(rows / scales), -32768, 32767), scales


def as_computed(rows: np.ndarray, weights: np.ndarray, to: str) -> np.ndarray:
    """Sums of groups are whole numbers, exact in int32; of them a float's sum, in their order."""
    group, (whole, of_rows) = OF_ROWS[to], shortened(rows, OF_ROWS[to])
    if to == "int8":
        numbers, beside = quantized(weights)
        of_groups = np.ones((1, rows.shape[1]), np.float32)
    else:
        numbers, halves = grouped(weights)
        numbers = numbers.astype(np.int64) - 8
        of_groups = np.repeat(halves.astype(np.float32), GROUP, axis=1)
    found = np.zeros((len(rows), len(weights)), np.float32)
    for first in range(0, rows.shape[1], group):
        part = slice(first, first + group)
        sums = whole[:, part].astype(np.int64) @ numbers[:, part].astype(np.int64).T
        scales = (of_rows[:, first, None] * of_groups[None, :, first]).astype(np.float32)
        # A product of floats is exact in float64: one rounding, as that of an FMA.
        of_part = sums.astype(np.float32).astype(np.float64) * scales
        found = (found + of_part).astype(np.float32)
    return found * beside if to == "int8" else found


def drawn(count: int, k: int, seed: int) -> np.ndarray:
    """With a few that are far out, as a model's activations have them."""
    random = np.random.default_rng(seed)
    found = random.normal(size=(count, k)).astype(np.float32)
    found[random.random(found.shape) < 0.01] *= 1000
    return found


@pytest.mark.parametrize("rows", [1, 2, 6, 7, 40])
@pytest.mark.parametrize(
    ("to", "k", "n"),
    [
        ("int8", 4, 3),
        ("int8", 252, 33),
        ("int8", 768, 16),
        ("int8", 1028, 70),
        ("int4", 64, 3),
        ("int4", 192, 70),
        ("int4", 1024, 33),
    ],
)
@each_library
def test_products_are_of_int16_to_the_bit(
    instruction_set: str, to: str, k: int, n: int, rows: int
) -> None:
    x, weights = drawn(rows, k, seed=k + rows), drawn(n, k, seed=n)
    found = products(instruction_set, x, weights, to)
    np.testing.assert_array_equal(found, as_computed(x, weights, to))


@each_format
@each_library
def test_sums_do_not_overflow(instruction_set: str, to: str) -> None:
    """Every product of the greatest there are, of either sign; 1.99999 is 32767 of its scale."""
    k = 512
    weights = np.concatenate([np.full((1, k), sign, np.float32) for sign in (-1, 1)])
    rows = np.concatenate([np.full((1, k), x, np.float32) for x in (1.99999, -1.99999, -2, 2)])
    found = products(instruction_set, rows, weights, to)
    np.testing.assert_allclose(found, rows @ rounded(weights, to).T, rtol=1e-4)


@each_format
@each_library
def test_what_is_far_out_costs_only_its_group_what_is_near_zero(
    instruction_set: str, to: str
) -> None:
    """Half a step of 2^-14 of its group's furthest, at most; what others have is no matter."""
    group, k = OF_ROWS[to], 2 * 256
    rows, weights = drawn(8, k, seed=1), np.zeros((k, k), np.float32)
    np.fill_diagonal(weights, 1)
    rows[:, 3] = 1e6
    found = products(instruction_set, rows, weights, to)
    furthest = np.abs(rows.reshape(8, -1, group)).max(axis=2).repeat(group, axis=1)
    assert (np.abs(found - rows) <= furthest * 2**-15 * (1 + 1e-6)).all()
    assert np.abs(found - rows)[:, group:].max() < 1


@each_format
@each_library
def test_few_bits_stay_as_they_are(instruction_set: str, to: str) -> None:
    """bfloat16's eight, of what is no further than 2^7 from its group's furthest."""
    random, k = np.random.default_rng(4), 256
    rows = np.ldexp(random.integers(128, 256, (5, k)), random.integers(-14, -6, (5, k)))
    rows = (rows * random.choice([-1, 1], rows.shape)).astype(np.float32)
    identity = np.eye(k, dtype=np.float32)
    found = products(instruction_set, rows, -identity if to == "int4" else identity, to)
    want = rows @ rounded(-identity if to == "int4" else identity, to).T
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
@each_format
@each_library
def test_a_row_that_is_no_number_gives_none_and_harms_no_other(
    instruction_set: str, to: str, what: float
) -> None:
    rows, weights = drawn(9, 576, seed=2), drawn(20, 576, seed=3)
    give = partial(products, instruction_set, weights=weights, to=to)
    clean = give(rows)
    for place in (0, 300, 575):
        spoiled = rows.copy()
        spoiled[4, place] = what
        found = give(spoiled)
        assert np.isnan(found[4]).all()
        found[4] = clean[4]
        np.testing.assert_array_equal(found, clean)


@each_format
@each_library
def test_zeros_and_the_smallest_there_are_give_what_they_come_to(
    instruction_set: str, to: str
) -> None:
    """Below 2^-127 of a group's furthest that is 0."""
    weights = np.ones((20, 512), np.float32)
    rows = np.zeros((3, 512), np.float32)
    rows[1], rows[2] = 2.0**-110, 2.0**-149
    found = products(instruction_set, rows, weights, to)
    want = rows @ rounded(weights, to).T
    np.testing.assert_array_equal(found[[0, 2]], 0)
    np.testing.assert_allclose(found[1], want[1], rtol=1e-6)


def test_all_instruction_sets_give_the_same_bits() -> None:
    rows, weights = drawn(7, 320, seed=5), drawn(50, 320, seed=6)
    for to in ("int8", "int4"):
        first, *others = (products(name, rows, weights, to) for name in supported())
        for other in others:
            np.testing.assert_array_equal(first, other)
