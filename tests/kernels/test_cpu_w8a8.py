"""Rows that are int8 as the weights are that they meet: how they are rounded, and that products are
of just that, to the bit, on every instruction set."""

import numpy as np
import pytest

from kernels.cpu.library import supported
from kernels.cpu.matrix import quantized
from tests.kernels.test_cpu_fp8 import products

each_library = pytest.mark.parametrize("instruction_set", supported())


def rounded_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers of -127 to 127, and of each row the scale."""
    furthest = np.maximum(np.abs(rows).max(axis=1, keepdims=True), np.float32(2.0**-64))
    numbers = np.rint(rows * (np.float32(127) / furthest)).clip(-127, 127)
    return numbers.astype(np.int64), furthest / np.float32(127)


def as_computed(rows: np.ndarray, numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Sums are whole numbers, exact in int32 over 2^16 k's; of them a float's sum."""
    whole, of_rows = rounded_rows(rows)
    found = np.zeros((len(rows), len(numbers)), np.float32)
    for first in range(0, rows.shape[1], 2**16):
        part = slice(first, first + 2**16)
        sums = whole[:, part] @ numbers[:, part].astype(np.int64).T
        assert np.abs(sums).max(initial=0) < 2**31
        # A product of floats is exact in float64: one rounding, as that of an FMA.
        of_part = sums.astype(np.float32).astype(np.float64) * of_rows
        found = (found + of_part).astype(np.float32)
    return found * scales


def drawn(count: int, k: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.normal(size=(count, k)).astype(np.float32)


@pytest.mark.parametrize("rows", [1, 2, 6, 7, 40])
@pytest.mark.parametrize(("k", "n"), [(4, 3), (252, 33), (768, 16), (1028, 70)])
@each_library
def test_products_are_of_bytes_to_the_bit(instruction_set: str, k: int, n: int, rows: int) -> None:
    x, parts = drawn(rows, k, seed=k + rows), quantized(drawn(n, k, seed=n))
    found = products(instruction_set, x, "w8a8", parts)
    np.testing.assert_array_equal(found, as_computed(x, *parts))


@each_library
def test_sums_do_not_overflow(instruction_set: str) -> None:
    """Of every product the greatest there is, of either sign: -128, too, which others' have; and
    beyond as many k's as one sum may have."""
    k = 2**16 + 8
    numbers = np.stack([np.full(k, number, np.int8) for number in (-128, 127, -127)])
    scales = np.array([1, 0.5, 2], np.float32)
    x = np.stack([np.full(k, value, np.float32) for value in (-3.0, 3.0)])
    x[0, -4:] = 1  # of the second part
    found = products(instruction_set, x, "w8a8", (numbers, scales))
    np.testing.assert_array_equal(found, as_computed(x, numbers, scales))


@each_library
def test_a_row_has_one_scale_that_its_furthest_sets(instruction_set: str) -> None:
    """Half a step of a 127th of that, at most; what other rows have is no matter."""
    rows, k = drawn(8, 512, seed=1), 512
    rows[3, 7] = 1000
    identity = np.eye(k, dtype=np.float32)
    found = products(instruction_set, rows, "w8a8", quantized(identity))
    step = np.abs(rows).max(axis=1, keepdims=True) / 127
    assert (np.abs(found - rows) <= step / 2 * (1 + 1e-5)).all()
    assert np.abs(found - rows)[3].max() > 1
    assert np.delete(np.abs(found - rows), 3, axis=0).max() < 0.02


@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
@each_library
def test_a_row_that_is_no_number_gives_none_and_others_theirs(
    instruction_set: str, what: float
) -> None:
    x, parts = drawn(9, 256, seed=2), quantized(drawn(33, 256, seed=3))
    whole = products(instruction_set, x, "w8a8", parts)
    x[4, 200] = what
    found = products(instruction_set, x, "w8a8", parts)
    assert np.isnan(found[4]).all()
    np.testing.assert_array_equal(np.delete(found, 4, axis=0), np.delete(whole, 4, axis=0))


@each_library
def test_rows_of_zeros_give_zeros(instruction_set: str) -> None:
    """And such as are hardly more."""
    parts = quantized(drawn(33, 256, seed=4))
    x = np.zeros((3, 256), np.float32)
    x[1], x[2] = 1e-30, 2.0**-70
    found = products(instruction_set, x, "w8a8", parts)
    assert not found[0].any()
    assert np.abs(found[1:]).max() < 2.0**-60
