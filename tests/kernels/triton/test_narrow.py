"""Products with weights of few bits, run by Triton's interpreter, against the values that a
format's numbers stand for; and how a matrix of them lies."""

from typing import Any

import numpy as np
import pytest
import torch

from kernels import reference
from kernels.cpu.matrix import E4M3, NARROW, Held
from kernels.triton import embed, experts, linear
from kernels.triton.matrix import NarrowMatrix
from tests.kernels.triton.test_rows import close, each_dtype
from tests.support.compiled import compiled
from tests.support.programs import rounded_to, stood_for

torch.set_num_threads(1)
each_format = pytest.mark.parametrize("held", NARROW)
of_tables = pytest.mark.parametrize("held", [held for held in NARROW if held != "w8a8"])


def drawn(n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, k)).astype(np.float32) / k**0.5


def made(
    held: Held, weights: np.ndarray, dtype: torch.dtype = torch.float32, piece: int = 16
) -> NarrowMatrix:
    """`piece`: rows that are put at a time."""
    found = NarrowMatrix.empty(held, *weights.shape, dtype, "cpu")
    for first in range(0, len(weights), piece):
        found.put(first, *rounded_to(held, weights[first : first + piece]))
    return found


@each_format
@pytest.mark.parametrize("n", [16, 21, 70])
def test_a_matrix_holds_its_numbers_to_the_bit(held: Held, n: int) -> None:
    """In panels of which the last is not full, of pieces that came one after the other."""
    weights = drawn(n, 256)
    for piece in (16, 48, 80):
        found = made(held, weights, piece=piece)
        assert np.array_equal(found.rows().numpy(), stood_for(held, weights))
    ids = torch.tensor([n - 1, 3, 3])
    assert torch.equal(found.rows(ids), found.rows()[ids])
    whole = -(-n // 16) * 16 * 256 * NARROW[held].bits / 8
    parts = {"int4": 2 / 32, "int4_zeros": 3 / 32, "int8_groups": 2 / 32, "fp8_blocks": 4 / 128}
    assert found.nbytes == whole + n * 256 * parts.get(held, 4 / 256)


@pytest.mark.parametrize("held", ["int8", "fp8", "w8a8"])
def test_widths_that_fill_no_piece(held: Held) -> None:
    weights = drawn(5, 84)
    found = made(held, weights)
    assert np.array_equal(found.rows().numpy(), stood_for(held, weights))
    x = torch.randn(3, 84)
    close(linear.linear(x, found), reference.narrow_linear(x, found))


@pytest.mark.parametrize(("held", "k"), [("int4", 96), ("int8_groups", 48), ("fp8_blocks", 64)])
def test_widths_that_do_not_fit_are_refused(held: Held, k: int) -> None:
    with pytest.raises(ValueError, match=f"{k} columns do not fit {held}"):
        NarrowMatrix.empty(held, 16, k, torch.float32, "cpu")


@each_dtype
@each_format
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [
        (1, 40, 128),
        (3, 150, 256),  # two tiles of columns
        (2, 20, 1024),  # in splits
        (140, 8, 128),  # tiles of many rows
    ],
)
def test_products(held: Held, rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(k + n)
    weights = drawn(n, k)
    matrix = made(held, weights, dtype)
    x = torch.randn(rows, 2 * k).to(dtype)[:, :k]  # rows need not lie side by side
    bias = torch.randn(n).to(dtype)
    rounded = x.double()
    if held == "w8a8":
        numbers, scales = reference.in_int8(x)
        rounded = numbers.double() * scales[:, None]
    exact = rounded @ torch.from_numpy(stood_for(held, weights)).double().T
    close(linear.linear(x, matrix), exact.to(dtype))
    close(linear.linear(x, matrix, bias), (exact + bias.double()).to(dtype))
    close(reference.narrow_linear(x, matrix, bias), (exact + bias.double()).to(dtype))


def test_what_is_cut_in_splits() -> None:
    """One that has many columns is not, nor one of whose sums there would be too many."""
    device = torch.device("cpu")
    assert linear.splits_of(1, 1, 1024, 128, device) == 4
    assert linear.splits_of(32, 1, 4096, 128, device) == 8
    assert linear.splits_of(224, 16, 4096, 128, device) == 1
    assert linear.splits_of(1, 64, 2048, 128, device) == 1
    assert linear.splits_of(1, 1, 64, 32, device) == 1
    assert linear.splits_of(1, 1, 2**20, 128, device) == 16
    assert linear.splits_of(48, 16, 4096, 128, device) == 4  # of 5 that there are programs for


@pytest.mark.parametrize("most", [1, 2, 5, 64, 300])
def test_numbers_of_rows_are_compiled_as_some_of_them_are(most: int) -> None:
    found = linear.heights(most)
    assert found == sorted({*found})
    assert found[-1] == most
    assert {*map(linear.height, found)} == {*map(linear.height, range(1, most + 1))}


def test_a_matrix_has_few_kernels_whatever_meets_it() -> None:
    """And no two numbers of rows that are compiled alike are computed by different ones."""
    kernels = {}
    matrix = NarrowMatrix.empty("int8", 4096, 14336, torch.bfloat16, "meta")
    for rows in range(1, 600):
        with compiled() as found:
            linear.linear(torch.empty(rows, 14336, dtype=torch.bfloat16, device="meta"), matrix)
        assert kernels.setdefault(linear.height(rows), found) == found
    assert len(set().union(*kernels.values())) <= 8


def test_every_number_of_each_format_is_exact() -> None:
    """By products with one row for each column: bytes of all values, nibbles with all zeros."""
    eye = torch.eye(32).repeat(1, 4)[:, :128]
    eye[:, 32:] = 0
    every = np.arange(256).astype(np.uint8).reshape(8, 32)
    numbers = np.zeros((8, 128), np.uint8)
    numbers[:, :32] = every
    ones = np.ones(8, np.float32)
    signed = torch.from_numpy(every.view(np.int8).astype(np.float32))
    table = torch.from_numpy(np.where(np.isnan(E4M3), 0, E4M3).astype(np.float32))[
        every.astype(int)
    ]
    is_number = torch.from_numpy(~np.isnan(E4M3))[every.astype(int)]
    parts: list[tuple[Held, tuple[Any, ...], torch.Tensor]] = [
        ("int8", (numbers.view(np.int8), ones), signed),
        ("int8_groups", (numbers.view(np.int8), np.ones((8, 4), np.float16)), signed),
        ("fp8", (numbers, ones), table),
        ("fp8_blocks", (numbers, np.ones((8, 1), np.float32)), table),
    ]
    for held, given, expected in parts:
        matrix = NarrowMatrix.empty(held, 8, 128, torch.float32, "cpu")
        matrix.put(0, *given)
        for dtype in (torch.float32, torch.bfloat16):
            found = linear.linear(eye.to(dtype), matrix).float().T
            assert torch.equal(found[is_number], expected[is_number]), held
    nibbles, zeros = (
        np.tile(np.arange(16, dtype=np.uint8), (128, 8)),
        np.arange(128, dtype=np.uint8),
    )
    of_groups = np.repeat(zeros[:, None], 4, axis=1)
    matrix = NarrowMatrix.empty("int4_zeros", 128, 128, torch.float32, "cpu")
    matrix.put(0, nibbles, np.ones((128, 4), np.float16), of_groups)
    every_column = linear.linear(torch.eye(128).bfloat16(), matrix).float()
    assert torch.equal(
        every_column, torch.from_numpy(nibbles.astype(np.float32) - zeros[:, None]).T
    )


@each_dtype
@pytest.mark.parametrize("width", [33, 256])
def test_rows_in_int8(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = (torch.randn(7, width) * torch.logspace(-3, 3, 7)[:, None]).to(dtype)
    x[2] = 0
    x[3] = 1e-30
    x[4, 5], x[5, 0] = torch.inf, torch.nan
    numbers, scales = linear.in_int8(x)
    expected, of_rows = reference.in_int8(x)
    fine = [0, 1, 2, 3, 6]
    assert torch.equal(numbers[fine], expected[fine])
    torch.testing.assert_close(scales, of_rows, rtol=1e-6, atol=0, equal_nan=True)
    assert scales.isnan().tolist() == [row in (4, 5) for row in range(7)]
    assert not numbers[2].any()


@each_format
def test_a_row_that_is_no_number_gives_none_and_others_theirs(held: Held) -> None:
    """And so does a scale that is none."""
    weights, x = drawn(20, 128), torch.randn(3, 128)
    matrix = made(held, weights)
    whole = linear.linear(x, matrix)
    x[1, 7] = torch.nan
    found = linear.linear(x, matrix)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], whole[[0, 2]])
    matrix.scales[..., 4] = torch.nan
    broken = linear.linear(x, matrix)
    assert broken[:, 4].isnan().all()
    assert torch.equal(broken[[0, 2], 5:], whole[[0, 2], 5:])


@each_dtype
@of_tables
def test_embed_of_few_bits(held: Held, dtype: torch.dtype) -> None:
    table = made(held, drawn(37, 256), dtype)
    ids = torch.tensor([3, -1, 36, -3, -2, 0], dtype=torch.int32)
    last = torch.tensor([7, -1, 9], dtype=torch.int32)
    wide = table.rows(torch.tensor([3, 7, 36, 9, 0, 0]))
    close(embed.embed(ids, last, table), wide.to(dtype))
    close(embed.embed(ids, last, table, 8), (8 * wide).to(dtype))
    assert embed.embed(ids, last, table).dtype == dtype


@each_format
@pytest.mark.parametrize("rows", [2, 90])
def test_experts_of_few_bits(held: Held, rows: int) -> None:
    torch.manual_seed(4)
    count, chosen, width, inner = 3, 2, 128, 128
    wide = drawn(count * 2 * inner, width, 1), drawn(count * width, inner, 2)
    gate_up, down = (made(held, one) for one in wide)
    x = torch.randn(rows, width)
    logits = torch.randn(rows, count)
    shares, groups = experts.routed(logits, chosen, normed=True)
    _, ids = reference.route(logits, chosen, normed=True)
    y = experts.of_experts(x, gate_up, groups, chosen)
    of_each = [one.rows().unflatten(0, (count, -1)) for one in (gate_up, down)]
    if held != "w8a8":
        z = experts.of_experts(reference.silu_and_mul(y), down, groups, chosen=0)
        close(experts.mix(z, groups, shares), reference.mixed(x, *of_each, shares, ids))
        return
    (numbers, scales), of_choice = reference.in_int8(x), ids.flatten()[groups.order.long()]
    own = (numbers * scales[:, None])[groups.order.long() // chosen]
    close(y, torch.einsum("ck,cnk->cn", own, of_each[0][of_choice]))
