"""Fresh random inputs of kernels, on the device."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.matrix import Held
from kernels.deltas import Delta
from kernels.kv_layer import KvLayer
from kernels.paged_batch import PagedBatch, tiles_of
from kernels.sampling import SAMPLING
from kernels.triton import deltas
from kernels.triton.deltas import Deltas
from kernels.triton.matrix import NarrowMatrix
from kernels.triton.prefill import queries_per_tile

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Heads:
    queries: int
    keys: int
    dim: int


@dataclass(frozen=True)
class Attention:
    q: Tensor
    layer: KvLayer
    batch: PagedBatch


def attention(
    query_lens: list[int],
    lengths: list[int],
    heads: Heads,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    eight_bits: bool = False,
) -> Attention:
    """Sequences on scattered blocks; those of one new token first. Places that are no sequence's
    are NaN."""
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    num_blocks = sum(counts) + 1
    shape = (num_blocks, 2, heads.keys, BLOCK_SIZE)
    values = torch.randn(*shape, heads.dim, device=device, dtype=dtype)
    order = torch.randperm(num_blocks - 1, device="cpu").int()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    begin = 0
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        tables[row, :count] = own = order[begin : begin + count]
        values[int(own[-1]), :, :, (length - 1) % BLOCK_SIZE + 1 :] = torch.nan
        begin += count
    values[num_blocks - 1] = torch.nan
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    decodes = query_lens.count(1)
    queries = queries_per_tile(heads.queries // heads.keys)
    positions = np.concatenate(
        [np.arange(n - count, n) for count, n in zip(query_lens, lengths, strict=True)]
    )
    rows = np.repeat(np.arange(len(lengths)), query_lens)
    blocks = tables.numpy()[rows, positions // BLOCK_SIZE]

    def ints(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(device)

    batch = PagedBatch(
        positions=ints(positions),
        slots=ints(blocks * BLOCK_SIZE + positions % BLOCK_SIZE),
        starts=ints(starts),
        lengths=ints(np.array(lengths)),
        block_tables=tables.to(device),
        tiles=ints(tiles_of(starts, decodes, queries)),
        num_decodes=decodes,
    )
    q = torch.randn(int(starts[-1]), heads.queries, heads.dim, device=device, dtype=dtype)
    if not eight_bits:
        return Attention(q, KvLayer(values), batch)
    scales = torch.rand(shape, device=device) / 100
    stored = (values.float().clamp(-4, 4) * 100).to(torch.float8_e4m3fn)
    return Attention(q, KvLayer(stored, scales), batch)


@dataclass(frozen=True)
class Experts:
    x: Tensor
    logits: Tensor
    gate_up: Tensor
    down: Tensor


def of_experts(
    tokens: int,
    count: int,
    chosen: int,
    width: int,
    inner: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> Experts:
    """Rows, which choose by chance, and weights. What nobody chose is NaN."""

    def made(*shape: int) -> Tensor:
        found = torch.randn(shape, device=device, dtype=dtype)
        return found.mul_(shape[-1] ** -0.5)

    logits = torch.randn(tokens, count, device=device)
    nobodys = torch.ones(count, dtype=torch.bool, device=device)
    nobodys[logits.topk(chosen).indices.unique()] = False
    gate_up, down = made(count, 2 * inner, width), made(count, width, inner)
    gate_up[nobodys], down[nobodys] = torch.nan, torch.nan
    return Experts(made(tokens, width), logits, gate_up, down)


@dataclass(frozen=True)
class Adapted:
    x: Tensor
    y: Tensor
    places: Tensor
    """Of rows."""
    found: Deltas
    exact: dict[int, list[Delta]]
    """The same."""
    matrices: list[Tensor]
    """What both are of."""


def adapted(
    rows: int,
    count: int,
    rank: int,
    inner: int,
    widths: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> Adapted:
    """Rows that have one of `count` adapters, in turn, or every ninth none."""

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).mul_(shape[-1] ** -0.5)

    table = torch.zeros(count, deltas.PARTS, deltas.FIELDS, dtype=torch.int64)
    exact: dict[int, list[Delta]] = {place: [] for place in range(count)}
    kept = []
    for place in range(count):
        for part, width in enumerate(widths):
            pair = [made(rank, size) for size in (inner, width)]
            held = [F.pad(one, (0, deltas.aligned(one.shape[1]) - one.shape[1])) for one in pair]
            table[place, part, :3] = torch.tensor([*(one.data_ptr() for one in held), rank])
            exact[place].append(Delta(sum(widths[:part]), *pair))
            kept += held
    turns = torch.arange(rows, device=device, dtype=torch.int32) % 9
    return Adapted(
        x=made(rows, inner),
        y=made(rows, sum(widths)),
        places=torch.where(turns < 8, turns % count, -1),
        found=Deltas(table.to(device), widths, rank, count),
        exact=exact,
        matrices=kept,
    )


def few_bits(
    held: Held, n: int, k: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> NarrowMatrix:
    """Numbers of all values, and scales that keep products near 1."""
    found = NarrowMatrix.empty(held, n, k, dtype, device)
    found.numbers.random_(0, 256)
    most = {"int4": 8, "int4_zeros": 16, "fp8": 480, "fp8_blocks": 480}.get(held, 128)
    found.scales.uniform_(0.5, 1).mul_(k**-0.5 / most)
    if found.zeros is not None:
        found.zeros.random_(0, 16)
    return found


def samplings(rows: int, device: torch.device, **fields: float) -> tuple[np.ndarray, Tensor]:
    """Rows of SAMPLING with seeds and positions of their own, here and on the device."""
    found = np.zeros(rows, SAMPLING)
    found["top_p"] = 1
    for name, value in fields.items():
        found[name] = value
    generator = np.random.default_rng()
    found["seed"] = generator.integers(0, 2**64, rows, np.uint64)
    found["position"] = generator.integers(0, 2**31 - 1, rows)
    return found, torch.from_numpy(found.view(np.int32).reshape(rows, -1)).to(device)
