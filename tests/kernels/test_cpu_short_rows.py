"""Rows that meet weights of few bits: what of them int16 keep, and that products are of just that,
to the bit, on every instruction set."""

from functools import partial

import numpy as np
import pytest

from kernels.cpu.library import Library, supported
from kernels.cpu.matrix import GROUP, Held
from kernels.cpu.program import Geometry, Limits, Program
from kernels.cpu.recorder import Recorder
from kernels.sampling import SAMPLING
from tests.support.programs import compute, laid, logits_of, packed, rounded_to, stood_for, whole

OF_ROWS: dict[Held, int] = {"int8": 256, "int4": GROUP, "int8_groups": GROUP, "int4_zeros": GROUP}
"""k's of a row with one scale."""

each_library = pytest.mark.parametrize("instruction_set", supported())
each_format = pytest.mark.parametrize("to", OF_ROWS)


def products(instruction_set: str, rows: np.ndarray, weights: np.ndarray, to: Held) -> np.ndarray:
    """[rows, n] of rows [rows, k] and weights [n, k], rounded."""
    return products_of(instruction_set, rows, to, *rounded_to(to, weights))


def products_of(instruction_set: str, rows: np.ndarray, to: Held, *parts: np.ndarray) -> np.ndarray:
    """All rows in a step."""
    return behind(instruction_set, rows, [(to, *parts)])


def behind(
    instruction_set: str, rows: np.ndarray, matrices: list[tuple[Held, *tuple[np.ndarray, ...]]]
) -> np.ndarray:
    """Rows through one matrix after the other."""
    library, recorder, count = Library(instruction_set), Recorder(), len(rows)
    logits = recorder.wanted(recorder.embed(packed(library, rows)))
    for to, *parts in matrices:
        logits = recorder.linear(logits, laid(library, to, *parts))
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
    the furthest of a group is below 2^15; but for one below 2^-64."""
    scales = np.empty_like(rows)
    for first in range(0, rows.shape[1], group):
        most = np.abs(rows[:, first : first + group]).max(axis=1, keepdims=True)
        scales[:, first : first + group] = np.exp2(np.maximum(np.frexp(most)[1] - 1.0, -64) - 14)
    return np.clip(np.rint(rows / scales), -32768, 32767), scales


def as_computed(rows: np.ndarray, to: Held, *parts: np.ndarray) -> np.ndarray:
    """Sums of groups are whole numbers, exact in int32; of them a float's sum, in their order."""
    group, (short, of_rows) = OF_ROWS[to], shortened(rows, OF_ROWS[to])
    numbers, scales = whole(to, *parts)
    of_groups = np.ones_like(scales) if to == "int8" else scales
    found = np.zeros((len(rows), len(numbers)), np.float32)
    for first in range(0, rows.shape[1], group):
        part = slice(first, first + group)
        sums = short[:, part].astype(np.int64) @ numbers[:, part].T
        by = (of_rows[:, first, None] * of_groups[None, :, first]).astype(np.float32)
        # A product of floats is exact in float64: one rounding, as that of an FMA.
        of_part = sums.astype(np.float32).astype(np.float64) * by
        found = (found + of_part).astype(np.float32)
    return found * scales[:, 0] if to == "int8" else found


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
        ("int8_groups", 64, 3),
        ("int8_groups", 192, 70),
        ("int8_groups", 1024, 33),
        ("int4_zeros", 128, 3),
        ("int4_zeros", 384, 70),
        ("int4_zeros", 1024, 33),
    ],
)
@each_library
def test_products_are_of_int16_to_the_bit(
    instruction_set: str, to: Held, k: int, n: int, rows: int
) -> None:
    x, parts = drawn(rows, k, seed=k + rows), rounded_to(to, drawn(n, k, seed=n))
    found = products_of(instruction_set, x, to, *parts)
    np.testing.assert_array_equal(found, as_computed(x, to, *parts))


@each_library
def test_what_was_there_before_is_no_part_of_a_row_that_is_no_whole_lanes(
    instruction_set: str,
) -> None:
    """Behind 252 numbers there is room for four, where a wider row, of larger numbers, was."""
    x = drawn(3, 256, seed=11)
    x[:, 252:] = 1e6
    wide, narrow = drawn(252, 256, seed=12), drawn(33, 252, seed=13)
    wide[:, 252:] = 0
    first, second = rounded_to("int8", wide), rounded_to("int8", narrow)
    found = behind(instruction_set, x, [("int8", *first), ("int8", *second)])
    between = as_computed(x, "int8", *first)
    np.testing.assert_array_equal(found, as_computed(between, "int8", *second))


@pytest.mark.parametrize("sign", [-1, 1])
@each_library
def test_zeros_of_every_size_are_taken_off_exactly(instruction_set: str, sign: int) -> None:
    """Up to 16, which GPTQ has, of totals of either sign up to the largest; one for each group and
    column."""
    random, n, k = np.random.default_rng(7), 48, 256
    x = sign * np.abs(drawn(13, k, seed=8))
    x[0], x[1] = sign * 1.99999, -sign * 2
    scales = random.uniform(0.5, 1.5, (n, k // GROUP)).astype(np.float16)
    zeros = random.integers(0, 17, (n, k // GROUP)).astype(np.uint8)
    zeros[:2] = 16
    numbers = random.integers(0, 16, (n, k)).astype(np.uint8)
    parts = numbers, scales, zeros
    found = products_of(instruction_set, x, "int4_zeros", *parts)
    np.testing.assert_array_equal(found, as_computed(x, "int4_zeros", *parts))


@each_library
def test_int8_by_groups_take_all_eight_bits(instruction_set: str) -> None:
    """-128, too, which GPTQ's have."""
    random, n, k = np.random.default_rng(9), 20, 128
    numbers = random.integers(-128, 128, (n, k)).astype(np.int8)
    numbers[3] = -128
    scales = -random.uniform(0.5, 1.5, (n, k // GROUP)).astype(np.float16)
    x = drawn(9, k, seed=10)
    x[0] = -2
    found = products_of(instruction_set, x, "int8_groups", numbers, scales)
    np.testing.assert_array_equal(found, as_computed(x, "int8_groups", numbers, scales))


@each_format
@each_library
def test_sums_do_not_overflow(instruction_set: str, to: Held) -> None:
    """Every product of the greatest there are, of either sign; 1.99999 is 32767 of its scale."""
    k = 512
    weights = np.concatenate([np.full((1, k), sign, np.float32) for sign in (-1, 1)])
    rows = np.concatenate([np.full((1, k), x, np.float32) for x in (1.99999, -1.99999, -2, 2)])
    found = products(instruction_set, rows, weights, to)
    np.testing.assert_allclose(found, rows @ stood_for(to, weights).T, rtol=1e-4)


@each_format
@each_library
def test_what_is_far_out_costs_only_its_group_what_is_near_zero(
    instruction_set: str, to: Held
) -> None:
    """Half a step of 2^-14 of its group's furthest, at most; what others have is no matter."""
    group, k = OF_ROWS[to], 2 * 256
    rows, weights = drawn(8, k, seed=1), np.zeros((k, k), np.float32)
    np.fill_diagonal(weights, 1)
    rows[:, 3] = 1e6
    found, want = products(instruction_set, rows, weights, to), rows * stood_for(to, weights).max()
    furthest = np.abs(want.reshape(8, -1, group)).max(axis=2).repeat(group, axis=1)
    assert (np.abs(found - want) <= furthest * 2**-15 * (1 + 1e-6)).all()
    assert np.abs(found - want)[:, group:].max() < 1


@each_format
@each_library
def test_few_bits_stay_as_they_are(instruction_set: str, to: Held) -> None:
    """bfloat16's eight, of what is no further than 2^7 from its group's furthest."""
    random, k = np.random.default_rng(4), 256
    rows = np.ldexp(random.integers(128, 256, (5, k)), random.integers(-14, -6, (5, k)))
    rows = (rows * random.choice([-1, 1], rows.shape)).astype(np.float32)
    identity = np.eye(k, dtype=np.float32)
    found = products(instruction_set, rows, -identity if to == "int4" else identity, to)
    want = rows @ stood_for(to, -identity if to == "int4" else identity).T
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
@each_format
@each_library
def test_a_row_that_is_no_number_gives_none_and_harms_no_other(
    instruction_set: str, to: Held, what: float
) -> None:
    rows, weights = drawn(9, 640, seed=2), drawn(20, 640, seed=3)
    give = partial(products, instruction_set, weights=weights, to=to)
    clean = give(rows)
    for place in (0, 300, 639):
        spoiled = rows.copy()
        spoiled[4, place] = what
        found = give(spoiled)
        assert np.isnan(found[4]).all()
        found[4] = clean[4]
        np.testing.assert_array_equal(found, clean)


@each_format
@each_library
def test_zeros_stay_zeros_and_what_is_next_to_nothing_becomes_so(
    instruction_set: str, to: Held
) -> None:
    """Below 2^-79: with such scales products would be subnormal, and take ten times as long."""
    weights = np.ones((20, 512), np.float32)
    rows = np.zeros((4, 512), np.float32)
    rows[1], rows[2], rows[3] = 2.0**-70, 2.0**-110, 2.0**-149
    found = products(instruction_set, rows, weights, to)
    want = rows @ stood_for(to, weights).T
    np.testing.assert_array_equal(found[[0, 2, 3]], 0)
    np.testing.assert_allclose(found[1], want[1], rtol=1e-6)


def test_all_instruction_sets_give_the_same_bits() -> None:
    rows, weights = drawn(7, 384, seed=5), drawn(50, 384, seed=6)
    for to in OF_ROWS:
        first, *others = (products(name, rows, weights, to) for name in supported())
        for other in others:
            np.testing.assert_array_equal(first, other)
