"""The kernels over rows, run by Triton's interpreter, against the reference.

The interpreter cuts off what bfloat16 cannot hold, where a GPU rounds: last bits, of several steps.
"""

import pytest
import torch

from kernels import reference
from kernels.heads import QkNorm
from kernels.kv_layer import INT4
from kernels.triton import activation, embed, experts, norm, rotary
from kernels.triton.linear import heights
from tests.support.compiled import compiled
from tests.support.paged import paged

torch.set_num_threads(1)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-5}


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@each_dtype
def test_embed_takes_ids_that_only_the_device_knows(dtype: torch.dtype) -> None:
    table = torch.randn(11, 96).to(dtype)
    ids = torch.tensor([3, -1, 10, -3, -2, 0], dtype=torch.int32)
    last = torch.tensor([7, -1, 9], dtype=torch.int32)  # the second was not finite
    assert torch.equal(embed.embed(ids, last, table), table[[3, 7, 10, 9, 0, 0]])
    assert torch.equal(embed.embed(ids, last, table, 8), 8 * table[[3, 7, 10, 9, 0, 0]])


@each_dtype
@pytest.mark.parametrize("width", [64, 96, 576])
def test_norm_alone_and_with_the_sum_before_it(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y, weight = (torch.randn(n, width).to(dtype) for n in (5, 5, 1))
    x = torch.cat((x, x), dim=1)[:, :width]  # rows need not lie side by side
    close(norm.rms_norm(x, weight[0], 1e-5), reference.rms_norm(x, weight[0], 1e-5))
    expected = reference.add_rms_norm(x, y, weight[0], 1e-5)
    for found, want in zip(norm.add_rms_norm(x, y, weight[0], 1e-5), expected, strict=True):
        close(found, want)


@each_dtype
@pytest.mark.parametrize("width", [48, 1100])
def test_gates(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x = torch.randn(3, 2 * width).to(dtype) * 4
    close(activation.silu_and_mul(x), reference.silu_and_mul(x))
    close(activation.gelu_and_mul(x), reference.gelu_and_mul(x))


def same_choices(logits: torch.Tensor, chosen: int, normed: bool) -> experts.Grouped:
    """As the reference chooses, as torch orders them; by one program where rows are few."""
    shares, found = experts.routed(logits, chosen, normed)
    wanted, ids = reference.route(logits, chosen, normed)
    torch.testing.assert_close(shares, wanted, rtol=2e-6, atol=0, equal_nan=True)
    expected = experts.grouped(ids, logits.shape[1])
    assert (found.rows, found.count) == (expected.rows, expected.count)
    for name in ("order", "places", "experts"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    needed = expected.experts < found.count
    for name in ("first", "end"):
        assert torch.equal(getattr(found, name)[needed], getattr(expected, name)[needed]), name
    return found


@each_dtype
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("rows", "count", "chosen"),
    [
        (1, 128, 8),  # as of Qwen3 30B-A3B
        (13, 128, 8),
        (128, 128, 8),  # the most that one program routes
        (129, 128, 8),
        (1, 8, 2),  # as of Mixtral
        (64, 8, 2),
        (65, 8, 2),  # in tiles of many rows
        (300, 8, 2),
        (241, 60, 4),  # as of Qwen 1.5 MoE: no power of two
        (3, 5, 5),  # all of them
        (2, 1, 1),
    ],
)
def test_rows_choose_their_experts(
    rows: int, count: int, chosen: int, normed: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(5)
    logits = torch.randn(rows, count + 3).to(dtype)[:, 1:-2]  # rows need not lie side by side
    found = same_choices(logits, chosen, normed)
    assert len(found.order) == rows * chosen


@pytest.mark.parametrize("rows", [1, 6, 40])
def test_of_equal_logits_the_first_expert_is_chosen(rows: int) -> None:
    torch.manual_seed(6)
    values = torch.tensor([-1.0, -0.0, 0.0, 2.0])
    same_choices(values[torch.randint(0, 4, (rows, 20))], 6, normed=True)
    _, ids = reference.route(torch.zeros(rows, 20), 6, normed=True)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]] * rows
    found = same_choices(torch.zeros(rows, 20), 6, normed=False)
    whose = [found.order[found.places.long()].tolist(), found.experts.unique().tolist()]
    assert whose[0] == [*range(6 * rows)]
    assert {*whose[1]} - {20} == {*range(6)}


@pytest.mark.parametrize("rows", [1, 16, 17, 100])
def test_all_rows_may_choose_the_same_experts_and_none_others(rows: int) -> None:
    torch.manual_seed(7)
    logits = torch.randn(rows, 16)
    logits[:, [3, 9]] += 50
    logits[:, [0, 15]] = -torch.inf
    found = same_choices(logits, 2, normed=True)
    assert {*found.experts.tolist()} - {16} == {3, 9}
    assert (found.end - found.first)[found.experts < 16].max() == rows


def test_a_row_that_is_no_number_chooses_some_experts_and_others_theirs() -> None:
    torch.manual_seed(8)
    logits = torch.randn(6, 10)
    whole = experts.routed(logits, 3, True)[0]
    logits[1, 4], logits[4, 9], logits[5] = torch.nan, torch.inf, -torch.inf
    logits[3] = torch.tensor(-2, dtype=torch.int32).view(torch.float32)  # some other NaN
    shares, found = experts.routed(logits, 3, True)
    assert shares.isnan().any(1).tolist() == [row in (1, 3, 4, 5) for row in range(6)]
    assert torch.equal(shares[[0, 2]], whole[[0, 2]])
    assert sorted(found.order.tolist()) == sorted(found.places.tolist()) == [*range(18)]
    tiles = found.end - found.first
    assert tiles[found.experts < 10].sum() == 18


def test_few_rows_are_routed_by_one_launch_whatever_they_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of shapes alone: it runs on tensors without memory, where nothing can be waited for."""

    def never(*_: object) -> None:
        raise AssertionError("by torch, in thirty launches")

    monkeypatch.setattr(experts, "grouped", never)
    monkeypatch.setattr(experts.reference, "route", never)
    for count, chosen, most in ((128, 8, 128), (8, 2, 2048), (60, 4, 256)):
        for rows in (1, 3, most):
            with compiled() as found:
                shares, groups = experts.routed(
                    torch.empty(rows, count, device="meta"), chosen, True
                )
            assert {kernel for kernel, *_ in found} == {"route_kernel"}
            assert shares.shape == (rows, chosen)
            assert len(groups.experts) == experts.tiles_of(rows * chosen, count)[1]
        with pytest.raises(AssertionError, match="by torch"):
            experts.routed(torch.empty(most + 1, count), chosen, True)


@pytest.mark.parametrize(("count", "chosen", "most"), [(128, 8, 128), (60, 4, 256)])
def test_numbers_of_rows_are_routed_by_a_kernel_for_each_power_of_two(
    count: int, chosen: int, most: int
) -> None:
    """Up to what registers have room for."""
    kernels = []
    for rows in (range(1, most + 1), heights(most)):
        with compiled() as found:
            for each in rows:
                experts.routed(torch.empty(each, count, device="meta"), chosen, True)
        kernels.append(found)
    assert kernels[0] == kernels[1]
    assert len(kernels[0]) <= 7


@each_dtype
@pytest.mark.parametrize("rows", [1, 3, 90])
def test_experts_compute_what_their_rows_make_of_them(rows: int, dtype: torch.dtype) -> None:
    """Of a few rows, of as many as make several tiles of an expert, and of none."""
    torch.manual_seed(4)
    count, chosen, width, inner = 5, 2, 80, 24
    x = torch.randn(rows, width).to(dtype)
    gate_up = (torch.randn(count, 2 * inner, width) / 8).to(dtype)
    down = (torch.randn(count, width, inner) / 4).to(dtype)
    logits = torch.randn(rows, count)
    logits[:, 3] = -9  # nobody's choice
    _, ids = reference.route(logits, chosen, normed=False)
    shares, groups = experts.routed(logits, chosen, normed=False)
    y = experts.of_experts(x, gate_up, groups, chosen)
    y = experts.of_experts(reference.silu_and_mul(y), down, groups, chosen=0)
    close(experts.mix(y, groups, shares), reference.mixed(x, gate_up, down, shares, ids))


@pytest.mark.parametrize("turned", [1, 0.75])
@pytest.mark.parametrize("normed", ["", "head", "all"])
@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float32, torch.int8),
        (torch.float32, INT4),
    ],
)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 2, 64), (9, 3, 24), (8, 1, 128)])
def test_rotary_and_store(
    heads: int,
    kv_heads: int,
    dim: int,
    stored: torch.dtype | None,
    normed: str,
    turned: float,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(1)
    case = paged([1, 4, 2], [9, 11, 2], kv_heads, dim, dtype=dtype, stored=stored)
    qkv = torch.randn(7, (heads + 2 * kv_heads) * dim).to(dtype)
    angles = torch.randn(20, int(dim * turned) // 2)
    tables = angles.cos(), angles.sin()
    qk_norm = None
    if normed:
        widths = (dim, dim) if normed == "head" else (heads * dim, kv_heads * dim)
        qk_norm = QkNorm(*(torch.randn(width).to(dtype) for width in widths), 1e-6)
    batch, expected, found = case.batch, case.copy(), case.copy()
    to = (tables, batch.positions, batch.slots)
    want = reference.rotary_store(qkv.clone(), *to, expected, qk_norm)
    close(rotary.rotary_store(qkv.clone(), *to, found, qk_norm), want)

    written = torch.zeros(found.values.shape[:-1], dtype=torch.bool)
    size = found.values.shape[3]
    written[batch.slots // size, :, :, batch.slots % size] = True
    was = case.layer.values.view(torch.uint8), found.values.view(torch.uint8)
    assert torch.equal(was[0][~written], was[1][~written]), "another token's place was written to"
    places = batch.slots // size, slice(None), slice(None), batch.slots % size
    if stored:  # but for numbers whose last bit decides
        same = found.values.view(torch.uint8)[places] == expected.values.view(torch.uint8)[places]
        assert same.float().mean() > 0.99
        torch.testing.assert_close(found.scales[places], expected.scales[places])
    else:
        close(found.values[places], expected.values[places])


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8, INT4])
def test_bfloat16_is_stored_in_few_bits(stored: torch.dtype) -> None:
    """The reference rounds to bfloat16 before, and so to the next number of few bits at times."""
    torch.manual_seed(3)
    case = paged([1, 4, 2], [9, 11, 2], 3, 24, dtype=torch.bfloat16, stored=stored)
    qkv = torch.randn(7, 15 * 24).bfloat16()
    angles = torch.randn(20, 12)
    to = ((angles.cos(), angles.sin()), case.batch.positions, case.batch.slots)
    expected, found = case.copy(), case.copy()
    qk_norm = QkNorm(*torch.randn(2, 24).bfloat16(), 1e-6)
    want = reference.rotary_store(qkv.clone(), *to, expected, qk_norm)
    close(rotary.rotary_store(qkv.clone(), *to, found, qk_norm), want)
    size = found.values.shape[3]
    at = case.batch.slots // size, case.batch.slots % size
    wide, exact = (reference.load_kv(one, *at, torch.float32) for one in (found, expected))
    assert (wide - exact).norm() < 0.04 * exact.norm()
