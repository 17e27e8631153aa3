"""Kernels at the sizes of Llama 3.1 8B, against the floors that bytes and operations set."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from bench.gpu.device import Device, seconds
from bench.gpu.inputs import (
    Attention,
    Heads,
    adapted,
    attention,
    few_bits,
    of_experts,
    samplings,
)
from kernels import reference
from kernels.cpu.matrix import NARROW, Held
from kernels.heads import Scores
from kernels.triton import activation, experts, linear, norm, rotary
from kernels.triton.decode import Splits, decode
from kernels.triton.deltas import add_deltas, rows_of
from kernels.triton.prefill import prefill
from kernels.triton.sampling import SamplerRoom, sample


@dataclass(frozen=True)
class Measured:
    name: str
    seconds: float
    floor_s: float
    """The larger of the time for its bytes and the time for its operations."""

    @property
    def of_floor(self) -> float:
        return self.floor_s / self.seconds


def run(device: Device) -> Iterator[Callable[[], Measured]]:
    """One measurement each, so that whoever takes them may stop between two."""
    dry = device.is_dry
    heads = Heads(4, 2, 64) if dry else Heads(32, 8, 128)
    shapes = [(2, 70)] if dry else [(256, 512), (64, 4096), (8, 32768), (1, 131072)]
    for eight_bits in (False, True):
        for rows, length in shapes:
            yield partial(_decode, device, heads, rows, length, eight_bits)
    for rows, length in [(1, 70)] if dry else [(1, 8192), (4, 2048), (16, 512)]:
        yield partial(_prefill, device, heads, rows, length)
    for tokens in [3] if dry else [256, 8192]:
        yield partial(_add_norm, device, tokens, 64 if dry else 4096)
        yield partial(_silu_mul, device, tokens, 64 if dry else 14336)
        yield partial(_rotary, device, tokens, heads)
    for tokens in [3] if dry else [1, 8, 64, 4096]:
        yield partial(
            _experts, device, tokens, (4, 2) if dry else (128, 8), (64, 32) if dry else (2048, 768)
        )
    for tokens in [3] if dry else [1, 16, 128]:
        for by_torch in (False, True):
            yield partial(_routing, device, tokens, by_torch)
    for tokens, count in [(3, 2)] if dry else [(1, 1), (64, 1), (64, 8), (256, 8), (4096, 1)]:
        for rank in [16] if dry else [16, 64]:
            yield partial(
                _adapters, device, tokens, count, rank, (64, 32) if dry else (4096, 14336)
            )
    for rows in [3] if dry else [1, 16, 64, 256, 4096]:
        for held in ("", "int8") if dry else ("", *NARROW):
            yield partial(_linear, device, rows, held, (64, 64) if dry else (6144, 4096))
    kinds: list[dict[str, float]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 50},
    ]
    for fields in kinds[:1] if dry else kinds:
        for rows in [2] if dry else [1, 256]:
            yield partial(_sampling, device, rows, 1100 if dry else 128256, fields)


def _timed(
    device: Device, name: str, run: Callable[[], object], moved: float, operations: float = 0
) -> Measured:
    floor = max(moved / device.bytes_per_s, operations / device.flops_per_s)
    return Measured(name, seconds(run, device.torch), floor)


def _decode(device: Device, heads: Heads, rows: int, length: int, eight_bits: bool) -> Measured:
    case = attention([1] * rows, [length] * rows, heads, device.torch, eight_bits=eight_bits)
    splits = Splits.of(rows, heads.queries, heads.dim, length, device.torch)
    out = torch.empty_like(case.q)
    return _timed(
        device,
        f"decode attention, {rows} x {length}{', fp8' * eight_bits}",
        lambda: decode(out, case.q, case.layer, case.batch, Scores(0.1), splits),
        _cache_bytes(case),
    )


def _cache_bytes(case: Attention) -> float:
    """Read once: keys, values and scales."""
    values, scales = case.layer.values, case.layer.scales
    return values.nbytes + (0 if scales is None else scales.nbytes)


def _prefill(device: Device, heads: Heads, rows: int, length: int) -> Measured:
    case = attention([length] * rows, [length] * rows, heads, device.torch)
    out = torch.empty_like(case.q)
    products = rows * length * (length + 1) / 2
    return _timed(
        device,
        f"prefill attention, {rows} x {length}",
        lambda: prefill(out, case.q, case.layer, case.batch, Scores(0.1)),
        2 * case.q.nbytes + _cache_bytes(case),
        4 * heads.queries * heads.dim * products,
    )


def _add_norm(device: Device, tokens: int, width: int) -> Measured:
    x, y = (torch.randn(tokens, width, device=device.torch).bfloat16() for _ in range(2))
    weight = torch.zeros(width, device=device.torch).bfloat16() + 1
    name = f"add and norm, {tokens} x {width}"
    return _timed(device, name, lambda: norm.add_rms_norm(x, y, weight, 1e-5), 4 * x.nbytes)


def _silu_mul(device: Device, tokens: int, width: int) -> Measured:
    x = torch.randn(tokens, 2 * width, device=device.torch).bfloat16()
    name = f"silu and mul, {tokens} x {width}"
    return _timed(device, name, lambda: activation.silu_and_mul(x), 1.5 * x.nbytes)


def _rotary(device: Device, tokens: int, heads: Heads) -> Measured:
    case = attention([tokens], [tokens], heads, device.torch)
    width = (heads.queries + 2 * heads.keys) * heads.dim
    qkv = torch.randn(tokens, width, device=device.torch).bfloat16()
    angles = torch.rand(tokens, heads.dim // 2, device=device.torch)
    tables = angles.cos(), angles.sin()
    return _timed(
        device,
        f"rotary and KV write, {tokens} tokens",
        lambda: rotary.rotary_store(
            qkv, tables, case.batch.positions, case.batch.slots, case.layer
        ),
        2 * qkv.nbytes,
    )


def _experts(
    device: Device, tokens: int, counts: tuple[int, int], sizes: tuple[int, int]
) -> Measured:
    """Of Qwen3-30B-A3B a layer, of which tokens choose by chance."""
    (count, chosen), (width, inner) = counts, sizes
    case = of_experts(tokens, count, chosen, width, inner, device.torch)

    def run() -> object:
        shares, groups = experts.routed(case.logits, chosen, normed=True)
        y = experts.of_experts(case.x, case.gate_up, groups, chosen)
        y = experts.of_experts(activation.silu_and_mul(y), case.down, groups, chosen=0)
        return experts.mix(y, groups, shares)

    met = len(case.logits.topk(chosen).indices.unique())
    return _timed(
        device,
        f"experts, {tokens} tokens, {chosen} of {count}",
        run,
        (case.gate_up.nbytes + case.down.nbytes) * met / count,
        2 * 3 * width * inner * tokens * chosen,
    )


def _routing(device: Device, tokens: int, by_torch: bool) -> Measured:
    """Of Qwen3-30B-A3B a layer's; its floor is one launch, which bytes are far below. By torch: as
    prompts are, in some thirty."""
    count, chosen = 128, 8
    logits = torch.randn(tokens, count, device=device.torch).bfloat16()
    number = torch.zeros(1, device=device.torch)

    def of_torch() -> object:
        shares, ids = reference.route(logits, chosen, normed=True)
        return shares, experts.grouped(ids, count)

    run = of_torch if by_torch else partial(experts.routed, logits, chosen, True)
    name = f"routing, {tokens} tokens, {chosen} of {count}{', by torch' * by_torch}"
    launch_s = seconds(number.zero_, device.torch)
    return Measured(name, seconds(run, device.torch), launch_s)


def _linear(device: Device, rows: int, held: Held, sizes: tuple[int, int]) -> Measured:
    """Queries, keys and values; "" as stored, by torch. Operations are counted at bfloat16's rate,
    so many rows of w8a8 may reach more than their floor."""
    n, k = sizes
    x = torch.randn(rows, k, device=device.torch).bfloat16()
    moved = (rows * k + rows * n) * x.itemsize
    name = f"linear, {rows} rows, {held or 'as stored'}"
    if not held:
        wide = torch.randn(n, k, device=device.torch).bfloat16()
        run = partial(F.linear, x, wide)
        return _timed(device, name, run, moved + wide.nbytes, 2 * rows * n * k)
    matrix = few_bits(held, n, k, device.torch)
    run = partial(linear.linear, x, matrix)
    return _timed(device, name, run, moved + matrix.nbytes, 2 * rows * n * k)


def _adapters(
    device: Device, tokens: int, count: int, rank: int, sizes: tuple[int, int]
) -> Measured:
    """Of gate and up; their memory is read once, rows are sorted outside, once a step."""
    inner, width = sizes
    case = adapted(tokens, count, rank, inner, (width, width), device.torch)
    rows = rows_of(case.places)
    met = len({*case.places.tolist()} - {-1})
    matrices = sum(one.nbytes for one in case.matrices) * met / count
    return _timed(
        device,
        f"adapters, {tokens} tokens, {count} of rank {rank}",
        lambda: add_deltas(case.y, case.x, rows, case.found),
        matrices + case.x.nbytes + 2 * case.y.nbytes,
        2 * 2 * rank * (inner + width) * tokens,
    )


def _sampling(device: Device, rows: int, vocab: int, fields: dict[str, float]) -> Measured:
    logits = torch.randn(rows, vocab, device=device.torch).bfloat16() * 3
    _, there = samplings(rows, device.torch, **fields)
    room = SamplerRoom.of(rows, vocab, device.torch)
    tokens = torch.empty(rows, dtype=torch.int32, device=device.torch)
    return _timed(
        device,
        f"sampling {fields}, {rows} x {vocab}",
        lambda: sample(tokens, logits, there, room),
        logits.nbytes,
    )
