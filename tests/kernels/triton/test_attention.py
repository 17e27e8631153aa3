"""Attention's kernels, run by Triton's interpreter, against the reference."""

import pytest
import torch

from kernels import reference
from kernels.heads import Scores
from kernels.kv_layer import FURTHEST, INT4
from kernels.triton import decode, prefill
from kernels.triton.merge import merge
from tests.support.paged import Paged, paged

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, at infinities
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.02}

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
each_width = pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(2, 2, 64), (6, 2, 64), (8, 1, 128), (3, 1, 24)]
)


def compare(case: Paged, q: torch.Tensor, window: int = 0, cap: float = 0.0) -> torch.Tensor:
    """The kernels' result for all sequences of the batch."""
    scores = Scores(q.shape[2] ** -0.5, cap, window)
    out = torch.full_like(q, torch.nan)
    splits = decode.Splits.of(
        len(case.batch.lengths), q.shape[1], q.shape[2], 600, torch.device("cpu")
    )
    splits.parts.fill_(torch.nan)
    splits.weights.fill_(torch.nan)
    decodes = case.batch.num_decodes
    if decodes:
        decode.decode(out, q, case.layer, case.batch, scores, splits)
    if len(case.batch.tiles):
        prefill.prefill(out, q, case.layer, case.batch, scores)
    expected = reference.paged_attention(q, case.layer, case.batch, scores)
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    return out


def queries(case: Paged, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """As they lie in the rows of a fused product."""
    count = int(case.batch.starts[-1])
    return torch.randn(count, heads + 2, dim).to(dtype)[:, :heads]


@each_dtype
@each_width
def test_decode(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Of one token, ragged, to the last of a split, and over the border of one."""
    torch.manual_seed(0)
    case = paged([1] * 5, [1, 37, 256, 257, 530], kv_heads, dim, block_size=16, dtype=dtype)
    compare(case, queries(case, heads, dim, dtype))


@each_dtype
@each_width
def test_prefill(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Whole prompts and later pieces of some, over several tiles of queries and of tokens."""
    torch.manual_seed(1)
    group = heads // kv_heads
    size = prefill.queries_per_tile(group)
    lens = [2, size, size + 3, 5]
    case = paged(
        lens, [2, size, size + 70, 130], kv_heads, dim, block_size=16, dtype=dtype, queries=size
    )
    compare(case, queries(case, heads, dim, dtype))


@pytest.mark.parametrize("window", [1, 20, 64, 300])
def test_of_a_window_what_lies_before_is_not_seen(window: int) -> None:
    torch.manual_seed(2)
    case = paged([1, 1, 70, 9], [400, 7, 90, 200], 2, 16, queries=prefill.queries_per_tile(2))
    compare(case, queries(case, 4, 16, torch.float32), window)


@each_dtype
@pytest.mark.parametrize("stored", [*FURTHEST, INT4])
def test_mixed_batches_of_few_bits(stored: torch.dtype, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    lens, lengths = [1, 1, 9, 33], [300, 5, 80, 33]
    size = prefill.queries_per_tile(3)
    case = paged(lens, lengths, 2, 32, dtype=dtype, stored=stored, queries=size)
    q = queries(case, 6, 32, dtype)
    plain = compare(case, q)
    assert not torch.allclose(plain, compare(case, q, cap=0.5))
    assert not torch.allclose(plain, compare(case, q, window=20))


def test_a_rows_result_does_not_depend_on_its_batch() -> None:
    """Not on how many programs share its splits, nor on how a prompt is cut."""
    torch.manual_seed(4)
    case = paged([1] * 3, [520, 300, 40], 2, 16)
    q = queries(case, 4, 16, torch.float32)
    together = torch.empty_like(q)
    cpu = torch.device("cpu")
    wide = decode.Splits.of(3, 4, 16, 600, cpu)
    decode.decode(together, q, case.layer, case.batch, Scores(0.25), wide)
    alone = torch.empty_like(q)
    narrow = decode.Splits(wide.size, 1, wide.parts.clone(), wide.weights.clone())
    decode.decode(alone, q, case.layer, case.batch, Scores(0.25), narrow)
    assert torch.equal(together, alone)

    whole = paged([100], [100], 1, 16, queries=prefill.queries_per_tile(4))
    q = queries(whole, 4, 16, torch.float32)
    at_once, late = torch.empty_like(q), torch.empty_like(q[50:])
    prefill.prefill(at_once, q, whole.layer, whole.batch, Scores(0.25))
    batch = whole.batch
    piece = type(batch)(
        positions=batch.positions[50:],
        slots=batch.slots[50:],
        starts=torch.tensor([0, 50], dtype=torch.int32),
        lengths=batch.lengths,
        block_tables=batch.block_tables,
        tiles=torch.tensor([[0, first] for first in range(0, 50, 16)], dtype=torch.int32),
        num_decodes=0,
    )
    prefill.prefill(late, q[50:], whole.layer, piece, Scores(0.25))
    # The interpreter's tiles are multiplied by numpy: a row's last bit depends on its place there.
    torch.testing.assert_close(at_once[50:], late, rtol=1e-6, atol=1e-6)


def test_merge() -> None:
    """Of parts of a softmax the whole; what lies beyond a sequence's splits is not looked at."""
    torch.manual_seed(5)
    scores, values = torch.randn(2, 3, 4, 10) * 5, torch.randn(2, 3, 4, 10, 8)
    parts = (scores.softmax(-1)[..., None] * values).sum(-2)
    weights = scores.logsumexp(-1) / torch.log(torch.tensor(2.0))
    lengths = torch.tensor([40, 11], dtype=torch.int32)
    parts[1, :, 2:], weights[1, :, 2:] = torch.nan, torch.nan
    out = torch.empty(2, 3, 8)
    merge(out, parts, weights, lengths, 10)
    for row, splits in enumerate((4, 2)):
        flat = scores[row, :, :splits].flatten(1).softmax(-1)[..., None]
        expected = (flat * values[row, :, :splits].flatten(1, 2)).sum(1)
        torch.testing.assert_close(out[row], expected)


def test_a_sequence_of_no_tokens_gives_zeros() -> None:
    """What fills a graph's batch up."""
    case = paged([1, 1], [9, 1], 1, 16)
    case.batch.lengths[1] = 0
    q, out = torch.randn(2, 2, 16), torch.full((2, 2, 16), torch.nan)
    splits = decode.Splits.of(2, 2, 16, 64, torch.device("cpu"))
    decode.decode(out, q, case.layer, case.batch, Scores(0.25), splits)
    assert not out[0].isnan().any()
    assert torch.equal(out[1], torch.zeros(2, 16))
