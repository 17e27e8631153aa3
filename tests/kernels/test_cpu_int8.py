"""Matrices of int8: how rows are rounded, and that panels hold what they were given. That products
are of these values is in test_cpu_program.py."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kernels.cpu.library import Library, supported
from kernels.cpu.matrix import PANEL, elements_of, quantized
from tests.support.programs import packed

numbers = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)
rows = st.tuples(st.integers(1, 5), st.integers(1, 9)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=numbers)
)


@settings(deadline=None)
@given(rows)
def test_each_value_is_met_within_half_a_step(values: np.ndarray) -> None:
    found, scales = quantized(values)
    assert found.dtype == np.int8
    assert np.abs(found.astype(int)).max() <= 127
    stands_for = found * scales[:, None]
    step = scales[:, None] * (1 + 1e-5) + 1e-37
    assert (np.abs(stands_for - values) <= step / 2).all()
    for row, of_row in zip(values, found, strict=True):
        most = np.abs(row).argmax()
        assert abs(of_row[most]) == (127 if abs(row[most]) > 1e-35 else abs(of_row[most]))


def test_rounding_what_was_rounded_changes_nothing() -> None:
    values = np.random.default_rng(1).normal(size=(40, 64)).astype(np.float32)
    first, scales = quantized(values)
    again, _ = quantized(first * scales[:, None])
    np.testing.assert_array_equal(first, again)


def test_a_row_of_zeros_stays_one() -> None:
    found, scales = quantized(np.zeros((2, 8), np.float32))
    assert not found.any()
    assert not scales.any()


@pytest.mark.parametrize("instruction_set", supported())
@pytest.mark.parametrize("n", [16, 17, 47])
def test_rows_come_out_of_panels_as_they_went_in(instruction_set: str, n: int) -> None:
    values = np.random.default_rng(n).normal(size=(n, 20)).astype(np.float32)
    matrix = packed(Library(instruction_set), values, int8=True)
    found, scales = quantized(values)
    np.testing.assert_array_equal(matrix.rows(range(n)), found * scales[:, None])
    assert matrix.panels.nbytes == -(-n // PANEL) * PANEL * (20 + 4)
    beyond = matrix.rows(range(n, -(-n // PANEL) * PANEL))
    assert not beyond.any()


def test_an_int8_takes_a_byte_and_its_row_four_more() -> None:
    assert elements_of(33, 64, np.int8) == 48 * (64 + 4)
    assert elements_of(33, 64, np.uint16) == 48 * 64
