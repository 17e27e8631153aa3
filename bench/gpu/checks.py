"""Every kernel against its reference in float64 or float32, on fresh random inputs. What a kernel
is to write is NaN before, and an error is ‖out − ref‖ / ‖ref‖, which NaN fails."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.gpu.device import Device
from bench.gpu.inputs import Heads, adapted, attention, few_bits, of_experts, samplings
from kernels import reference
from kernels.cpu.matrix import NARROW, Held
from kernels.heads import QkNorm, Scores
from kernels.kv_layer import KvLayer
from kernels.triton import activation, embed, experts, linear, norm, rotary
from kernels.triton.decode import Splits, decode
from kernels.triton.deltas import add_deltas, rows_of
from kernels.triton.prefill import prefill
from kernels.triton.sampling import SamplerRoom, sample
from services.worker.engine.runners import sampler

TOLERANCE = 1e-2
"""Of bfloat16; an error of indexing is near 1."""


@dataclass(frozen=True)
class Check:
    name: str
    error: float
    most: float

    @property
    def passed(self) -> bool:
        return self.error <= self.most


def run(device: Device) -> Iterator[Check]:
    dry = device.is_dry
    for heads in [Heads(3, 1, 64)] if dry else HEADS:
        yield from _attention(device.torch, heads, dry)
        yield from _rotary(device.torch, heads)
    yield from _rows(device.torch, 64 if dry else 4096)
    for tokens in [3, 40] if dry else [1, 64, 4096]:
        yield _experts(device.torch, tokens, dry)
    for tokens in [1, 40] if dry else [1, 2, 16, 33, 128]:
        for counts in [(5, 2)] if dry else [(128, 8), (8, 2), (60, 4)]:
            yield from _routing(device.torch, tokens, *counts)
    for rows in [3, 300] if dry else [1, 64, 256, 4096]:
        yield _adapters(device.torch, rows, dry)
    for held in NARROW:
        yield from _few_bits(device.torch, held, dry)
    yield from _sampling(device.torch, 2 if dry else 64, 1100 if dry else 128256)


HEADS = [Heads(32, 8, 128), Heads(9, 3, 64), Heads(16, 16, 128), Heads(64, 8, 128)]


def _attention(device: torch.device, heads: Heads, dry: bool) -> Iterator[Check]:
    query_lens, lengths = ([1, 1, 9], [5, 300, 40]) if dry else (
        [1] * 6 + [1000, 7, 300],
        [1, 255, 256, 257, 5000, 9999, 1000, 4097, 2000],
    )  # fmt: skip
    splits = Splits.of(len(lengths), heads.queries, heads.dim, 16384, device)
    for eight_bits in (False, True):
        for window in (0, 100):
            case = attention(query_lens, lengths, heads, device, eight_bits=eight_bits)
            scores = Scores(heads.dim**-0.5, window=window)
            out = torch.full_like(case.q, torch.nan)
            decode(out, case.q, case.layer, case.batch, scores, splits)
            prefill(out, case.q, case.layer, case.batch, scores)
            wide = KvLayer(case.layer.values.float(), None)
            if case.layer.scales is not None:
                wide = KvLayer(wide.values * case.layer.scales[..., None])
            expected = reference.paged_attention(case.q.float(), wide, case.batch, scores)
            name = f"attention {heads}{' fp8' * eight_bits}{f' window {window}' * bool(window)}"
            yield _compared(name, out, expected)


def _rotary(device: torch.device, heads: Heads) -> Iterator[Check]:
    tokens = 37
    case = attention([tokens], [tokens + 20], heads, device)
    width = (heads.queries + 2 * heads.keys) * heads.dim
    angles = torch.rand(100, heads.dim // 2, device=device) * 6
    tables = angles.cos(), angles.sin()
    # The interpreter cuts off where a GPU rounds: three times, with a norm, and that adds up.
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    weights = torch.randn(2, heads.dim, device=device).to(dtype)
    for qk_norm in (None, QkNorm(weights[0], weights[1], 1e-6)):
        for eight_bits in (False, True):
            qkv = torch.randn(tokens, width, device=device).to(dtype)
            exact, found = (_empty(case.layer, eight_bits) for _ in range(2))
            to = (tables, case.batch.positions, case.batch.slots)
            expected = reference.rotary_store(qkv.clone(), *to, exact, qk_norm)
            q = rotary.rotary_store(qkv.clone(), *to, found, qk_norm)
            name = f"rotary {heads}{' fp8' * eight_bits}{' norm' * (qk_norm is not None)}"
            yield _compared(f"{name}, queries", q, expected)
            size = found.values.shape[3]
            slots = case.batch.slots.long()
            places = slots // size, slots % size
            stored = reference.load_kv(found, *places, torch.float32)
            wanted = reference.load_kv(exact, *places, torch.float32)
            # The reference rounds to bfloat16 before it does to 8 bits: to the next, at times.
            yield _compared(f"{name}, cache", stored, wanted, 0.03 if eight_bits else TOLERANCE)


def _empty(layer: KvLayer, eight_bits: bool) -> KvLayer:
    values = torch.full_like(layer.values, torch.nan)
    if not eight_bits:
        return KvLayer(values)
    scales = torch.full(layer.values.shape[:-1], torch.nan, device=values.device)
    return KvLayer(values.to(torch.float8_e4m3fn), scales)


def _rows(device: torch.device, width: int) -> Iterator[Check]:
    x, y = (torch.randn(33, width, device=device).bfloat16() for _ in range(2))
    weight = torch.randn(width, device=device).bfloat16()
    expected = reference.add_rms_norm(x.clone(), y, weight, 1e-5)
    found = norm.add_rms_norm(x.clone(), y, weight, 1e-5)
    yield _compared("add and norm, sum", found[0], expected[0])
    yield _compared("add and norm, norm", found[1], expected[1])
    alone = norm.rms_norm(x, weight, 1e-5)
    yield _compared("norm", alone, reference.rms_norm(x, weight, 1e-5))
    yield _compared("silu and mul", activation.silu_and_mul(x), reference.silu_and_mul(x))
    ids = torch.randint(0, 33, (50,), device=device, dtype=torch.int32)
    last = torch.tensor([7, 3], device=device, dtype=torch.int32)
    expected_rows = x[ids.long()]
    expected_rows[4], ids[4] = x[3], -2
    yield _compared("embed", embed.embed(ids, last, x), expected_rows, most=0)


def _experts(device: torch.device, tokens: int, dry: bool) -> Check:
    count, chosen, width, inner = (4, 2, 80, 32) if dry else (128, 8, 2048, 768)
    # The interpreter cuts off where a GPU rounds: each of three products.
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    case = of_experts(tokens, count, chosen, width, inner, device, dtype)
    shares, groups = experts.routed(case.logits, chosen, normed=True)
    y = experts.of_experts(case.x, case.gate_up, groups, chosen)
    y = experts.of_experts(activation.silu_and_mul(y), case.down, groups, chosen=0)
    x, gate_up, down = (one.float() for one in (case.x, case.gate_up, case.down))
    expected = reference.mixed(x, gate_up, down, *reference.route(case.logits, chosen, normed=True))
    return _compared(f"experts, {tokens} tokens", experts.mix(y, groups, shares), expected)


def _routing(device: torch.device, tokens: int, count: int, chosen: int) -> Iterator[Check]:
    """Of logits many of which are equal; choices and tiles are what torch makes of them."""
    logits = (torch.randn(tokens, count, device=device) * 4).round() / 4
    for normed in (False, True):
        name = f"routing, {tokens} tokens, {chosen} of {count}{', normed' * normed}"
        shares, found = experts.routed(logits, chosen, normed)
        wanted, ids = reference.route(logits, chosen, normed)
        yield _compared(f"{name}, shares", shares, wanted, most=1e-5)
        expected = experts.grouped(ids, count)
        needed = expected.experts < count
        differ = [
            *(getattr(found, part) != getattr(expected, part) for part in _OF_CHOICES),
            *((getattr(found, part) != getattr(expected, part))[needed] for part in _OF_TILES),
        ]
        yield Check(f"{name}, choices", float(torch.cat(differ).float().mean()), 0)


_OF_CHOICES, _OF_TILES = ("order", "places", "experts"), ("first", "end")


def _few_bits(device: torch.device, held: Held, dry: bool) -> Iterator[Check]:
    """Of few rows, in splits, and of many; of experts; of an embedding. Sizes fill no tile."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    n, k = (40, 128) if dry else (1000, 4096)
    matrix = few_bits(held, n, k, device, dtype)
    for rows in [3] if dry else [1, 16, 30, 64, 100, 700]:
        x = torch.randn(rows, k, device=device).to(dtype)
        bias = torch.randn(n, device=device).to(dtype)
        expected = reference.narrow_linear(x.float(), matrix, bias)
        yield _compared(f"{held}, {rows} rows", linear.linear(x, matrix, bias), expected)
    if held == "w8a8":
        return
    count, chosen, width, inner = (3, 2, 128, 128) if dry else (16, 2, 1024, 512)
    gate_up = few_bits(held, count * 2 * inner, width, device, dtype)
    down = few_bits(held, count * width, inner, device, dtype)
    for rows in [3] if dry else [1, 500]:
        x = torch.randn(rows, width, device=device).to(dtype)
        logits = torch.randn(rows, count, device=device)
        shares, groups = experts.routed(logits, chosen, normed=True)
        y = experts.of_experts(x, gate_up, groups, chosen)
        y = experts.of_experts(activation.silu_and_mul(y), down, groups, chosen=0)
        up, out = (one.rows().unflatten(0, (count, -1)) for one in (gate_up, down))
        routed = reference.route(logits, chosen, normed=True)
        expected = reference.mixed(x.float(), up, out, *routed)
        found = experts.mix(y, groups, shares)
        yield _compared(f"{held}, experts, {rows} tokens", found, expected)
    ids = torch.randint(0, n, (50,), device=device, dtype=torch.int32)
    rows_of_it = matrix.rows(ids.long())
    yield _compared(f"{held}, embed", embed.embed(ids, ids, matrix), rows_of_it)


def _adapters(device: torch.device, rows: int, dry: bool) -> Check:
    inner, widths = (40, (48, 24, 24)) if dry else (4096, (4096, 1024, 1024))
    # The interpreter cuts off where a GPU rounds: twice.
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    case = adapted(rows, 2 if dry else 8, 20, inner, widths, device, dtype)
    expected = case.y.to(torch.float32, copy=True)
    reference.add_deltas(expected, case.x, case.places, case.exact)
    add_deltas(case.y, case.x, rows_of(case.places), case.found)
    return _compared(f"adapters, {rows} rows", case.y, expected)


def _sampling(device: torch.device, rows: int, vocab: int) -> Iterator[Check]:
    logits = torch.randn(rows, vocab, device=device) * torch.logspace(-1, 1, rows)[:, None].to(
        device
    )
    room = SamplerRoom.of(rows, vocab, device)
    for fields in (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 50},
        {"temperature": 1.0, "top_k": 700, "top_p": 0.95},
    ):
        here, there = samplings(rows, device, **fields)
        tokens = torch.full((rows,), -7, dtype=torch.int32, device=device)
        sample(tokens, logits, there, room)
        # On the CPU: that both draw the same is the contract.
        batch = sampler.SamplingBatch.of(here, torch.device("cpu"))
        expected = sampler.sample(logits.cpu(), batch).numpy()
        differ = float(np.mean(tokens.cpu().numpy() != expected))
        # Two logarithms rounded otherwise may turn a draw between two that are all but equal.
        yield Check(f"sampling {fields}, rows that differ", differ, 0.05)


def _compared(name: str, found: Tensor, expected: Tensor, most: float = TOLERANCE) -> Check:
    wide, exact = found.double(), expected.double()
    error = float((wide - exact).norm() / exact.norm())
    return Check(name, error if error == error else float("inf"), most)


def guarded(checks: Callable[[], Iterator[Check]]) -> list[Check]:
    """A kernel that does not run at all fails as a check, and ends the rest."""
    found: list[Check] = []
    try:
        for check in checks():
            found.append(check)
    except Exception as error:
        found.append(Check(f"{type(error).__name__}: {error}", float("inf"), 0))
    return found
