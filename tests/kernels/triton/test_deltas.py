"""What adapters add to linears, run by Triton's interpreter, against the reference."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kernels import reference
from kernels.deltas import Delta
from kernels.triton import deltas
from kernels.triton.deltas import FIELDS, PARTS, Deltas, Sizes, add_deltas, aligned, rows_of

torch.set_num_threads(1)
RANKS = [[5, 0, 16], [1, 17, 2], [0, 0, 0], [33, 3, 40]]
"""Of each place, of each part."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-4}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows beyond 20 are many, so that both ways are tried on few."""
    monkeypatch.setattr(deltas, "_FEW_ROWS", 20)


class Case:
    """Adapters of a matrix, in both forms."""

    def __init__(self, widths: list[int], inner: int, dtype: torch.dtype, at_once: int = 3) -> None:
        self.table = torch.zeros(len(RANKS), 2, PARTS, FIELDS, dtype=torch.int64)
        self.table[:, 0] = -1  # another matrix's
        self.kept: list[torch.Tensor] = []
        self.expected: dict[int, list[Delta]] = {}
        for place, of_parts in enumerate(RANKS):
            first = 0
            for part, (ranks, width) in enumerate(zip(of_parts, widths, strict=False)):
                down, up = (torch.randn(ranks, n) / 4 for n in (inner, width))
                held = [self._laid(one.to(dtype)) for one in (down, up)]
                self.table[place, 1, part, :3] = torch.tensor(
                    [*(h.data_ptr() for h in held), ranks]
                )
                self.expected.setdefault(place, []).append(
                    Delta(first, *(one.to(dtype) for one in (down, up)))
                )
                first += width
        self.found = Deltas(self.table[:, 1], tuple(widths), 48, at_once)

    def _laid(self, rows: torch.Tensor) -> torch.Tensor:
        """What lies between rows is no number."""
        width = rows.shape[1]
        self.kept.append(F.pad(rows, (0, aligned(width) - width), value=torch.nan))
        return self.kept[-1]


@pytest.mark.parametrize(
    "places",
    [
        [0],
        [-1, 3, 3, -1, 0, 1, 1, 3, 0, -1, 2, 0, 1, 1, 0, 3, 3, 0],
        [3] * 40 + [-1, 1, 0] * 8 + [1] * 30,
        [-1] * 3,
    ],
    ids=["one", "few", "many", "none"],
)
@pytest.mark.parametrize(
    ("widths", "inner", "dtype"),
    [
        ([160, 24, 24], 200, torch.float32),
        ([136, 136], 64, torch.bfloat16),
        ([48], 1100, torch.float32),
    ],
)
def test_rows_get_what_their_adapters_add(
    widths: list[int], inner: int, places: list[int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    case = Case(widths, inner, dtype)
    x = torch.randn(len(places), inner + 8).to(dtype)[:, 4:-4]  # rows need not lie side by side
    y = torch.randn(len(places), sum(widths)).to(dtype)
    expected, rows = y.clone(), torch.tensor(places, dtype=torch.int32)
    reference.add_deltas(expected, x, rows, case.expected)
    add_deltas(y, x, rows_of(rows), case.found)
    rtol = TOLERANCE[dtype]
    torch.testing.assert_close(y, expected, rtol=rtol, atol=rtol * float(expected.float().std()))


def test_a_row_depends_on_itself_alone() -> None:
    """To the bit, whether others have adapters or not, are numbers or not, and however many
    programs share its tile."""
    torch.manual_seed(1)
    case = Case([96], 300, torch.float32)
    x, y = torch.randn(20, 300), torch.randn(20, 96)
    places = torch.tensor([0, 1, 3, -1] * 5, dtype=torch.int32)
    together = y.clone()
    add_deltas(together, x, rows_of(places), case.found)
    assert torch.equal(together[3::4], y[3::4])
    shared = y.clone()
    add_deltas(shared, x, rows_of(places), replace(case.found, at_once=1))
    assert torch.equal(together, shared)
    for row in (0, 6, 17):
        others = torch.arange(20) != row
        for with_adapters in (False, True):
            alone, own = y.clone(), rows_of(places)
            if not with_adapters:  # in the same place of the same tile
                own = replace(own, places=own.places.where(own.order == row, -1))
            add_deltas(alone, x.masked_fill(others[:, None], torch.nan), own, case.found)
            assert torch.equal(alone[row], together[row])


def test_sizes_are_powers_of_two() -> None:
    for sizes in (deltas._FEW, deltas._MANY):
        assert isinstance(sizes, Sizes)
        for size in (sizes.rows, sizes.ranks, sizes.step, sizes.columns):
            assert size & (size - 1) == 0
            assert size >= 16
