"""The C++ kernels, as a small Llama's forward pass, against the same written out in torch. On every
instruction set that this processor has."""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.cpu import build
from kernels.cpu.library import Library, Unavailable, supported
from kernels.cpu.matrix import Held, Matrix
from kernels.cpu.program import Format, Geometry, KvFormat, Limits, Program
from kernels.cpu.recorder import Recorder, Rows
from kernels.heads import Scores
from kernels.kv_layer import INT4
from kernels.sampling import SAMPLING
from tests.support.programs import compute, launch, logits_of, packed, stood_for

EPSILON = 1e-5
NUM_BLOCKS = 48
TOLERANCE = {"float32": 2e-5, "bfloat16_weights": 2e-5, "bfloat16": 0.05}
SHORT_ROWS = 1e-3
"""At least, where rows meet few bits: they are int16 there."""

each_library = pytest.mark.parametrize("instruction_set", supported())
WEIGHTS: dict[str, dict[str, Any]] = {
    "wide": {},
    "int8": {"to": "int8"},
    "int4": {"to": "int4", "hidden": 128, "inner": 192},
    "int8_groups": {"to": "int8_groups", "hidden": 128, "inner": 192},
    "int4_zeros": {"to": "int4_zeros", "hidden": 128, "inner": 256, "heads": 8},
    "fp8": {"to": "fp8"},
    "fp8_blocks": {"to": "fp8_blocks", "hidden": 128, "inner": 256, "heads": 8},
}
STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": INT4}
each_kv_format = pytest.mark.parametrize("kv_format", STORED)
each_of_8_bits = pytest.mark.parametrize("kv_format", ["int8", "fp8"])
each_weights = pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
each_format = pytest.mark.parametrize("number_format", ["float32", "bfloat16_weights", "bfloat16"])


@dataclass(frozen=True)
class Model:
    heads: int = 6
    kv_heads: int = 2
    dim: int = 32
    hidden: int = 72
    inner: int = 100
    vocab: int = 331
    layers: int = 2
    block_tokens: int = 16
    cap: float = 0.0
    window: int = 0
    to: Held = ""
    """Its matrices are of values that this stands for."""
    kv_format: KvFormat = "auto"

    @property
    def scores(self) -> Scores:
        return Scores(self.dim**-0.5, self.cap, self.window)

    def weights(self) -> dict[str, Tensor]:
        """Values that bfloat16 holds, so that all formats compute with the same."""
        generator = torch.Generator().manual_seed(5)

        def draw(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator) * 0.2).bfloat16().float()

        found = {"embed": draw(self.vocab, self.hidden), "head": draw(self.vocab, self.hidden)}
        queries = self.heads * self.dim
        for layer in range(self.layers):
            found |= {
                f"norm1.{layer}": 1 + draw(self.hidden),
                f"qkv.{layer}": draw(queries + 2 * self.kv_heads * self.dim, self.hidden),
                f"bias.{layer}": draw(queries + 2 * self.kv_heads * self.dim),
                f"out.{layer}": draw(self.hidden, queries),
                f"norm2.{layer}": 1 + draw(self.hidden),
                f"gate_up.{layer}": draw(2 * self.inner, self.hidden),
                f"down.{layer}": draw(self.hidden, self.inner),
            }
        if self.to:
            matrices = {name: w.numpy() for name, w in found.items() if w.dim() == 2}
            found |= {n: torch.from_numpy(stood_for(self.to, w)) for n, w in matrices.items()}
        return found

    def angles(self) -> Tensor:
        frequencies = 100.0 ** -(torch.arange(0, self.dim, 2) / self.dim)
        return torch.arange(600.0)[:, None] * frequencies

    def logits(self, token_ids: list[int]) -> Tensor:
        """[tokens, vocab], from definitions."""
        w = self.weights()
        x = w["embed"][torch.tensor(token_ids)]
        count = len(token_ids)
        angles = self.angles()[:count, None]
        seen = torch.ones(count, count).tril().triu(1 - (self.window or count)).bool()

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return F.rms_norm(x, (self.hidden,), weight, EPSILON)

        def turned(x: Tensor) -> Tensor:
            a, b = x.chunk(2, dim=-1)
            cos, sin = angles.cos(), angles.sin()
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

        for layer in range(self.layers):
            qkv = F.linear(norm(x, w[f"norm1.{layer}"]), w[f"qkv.{layer}"], w[f"bias.{layer}"])
            parts = qkv.view(len(x), -1, self.dim).split(
                [self.heads, self.kv_heads, self.kv_heads], 1
            )
            group = self.heads // self.kv_heads
            q, k, v = turned(parts[0]), turned(parts[1]), parts[2]
            if self.kv_format != "auto":
                k, v = (reference.as_stored(part, STORED[self.kv_format]) for part in (k, v))
            k, v = (part.repeat_interleave(group, 1).transpose(0, 1) for part in (k, v))
            found = q.transpose(0, 1) @ k.transpose(1, 2) * self.scores.scale
            if self.cap:
                found = self.cap * (found / self.cap).tanh()
            y = found.masked_fill(~seen, -torch.inf).softmax(-1) @ v
            x = x + F.linear(y.transpose(0, 1).flatten(1), w[f"out.{layer}"])
            gate, up = F.linear(norm(x, w[f"norm2.{layer}"]), w[f"gate_up.{layer}"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w[f"down.{layer}"])
        return F.linear(F.rms_norm(x, (self.hidden,), None, EPSILON), w["head"])


@contextmanager
def compiled(
    model: Model,
    instruction_set: str,
    number_format: Format,
    threads: int = 2,
    sampled: int = 8,
    tokens: int = 300,
) -> Iterator[Program]:
    library, weights = Library(instruction_set), model.weights()

    def of_format(tensor: Tensor) -> np.ndarray:
        if number_format == "float32" or model.to:
            return tensor.numpy()
        return tensor.bfloat16().view(torch.uint16).numpy()

    def matrix(name: str, bias: Tensor | None = None) -> Matrix:
        of_bias = None if bias is None else bias.numpy()
        return packed(library, of_format(weights[name]), of_bias, model.to)

    recorder = Recorder()
    x = recorder.embed(matrix("embed"))
    for layer in range(model.layers):
        normed = recorder.norm(x, weights[f"norm1.{layer}"].numpy(), EPSILON)
        qkv = recorder.linear(normed, matrix(f"qkv.{layer}", weights[f"bias.{layer}"]))
        qkv = recorder.rotary(qkv, layer)
        y = recorder.attention(qkv, layer, model.heads * model.dim, model.scores)
        if layer == model.layers - 1:
            x, y = recorder.wanted(x), recorder.wanted(y)
        x = recorder.add(x, recorder.linear(y, matrix(f"out.{layer}")))
        normed = recorder.norm(x, weights[f"norm2.{layer}"].numpy(), EPSILON)
        gate_up = recorder.linear(normed, matrix(f"gate_up.{layer}"))
        x = recorder.add(x, recorder.linear(recorder.silu_mul(gate_up), matrix(f"down.{layer}")))
    ones = np.ones(model.hidden, np.float32)
    logits = recorder.linear(recorder.norm(x, ones, EPSILON), matrix("head"))
    angles = model.angles()
    program = Program(
        library,
        recorder,
        logits,
        Geometry(
            model.heads,
            model.kv_heads,
            model.dim,
            model.layers,
            model.block_tokens,
            model.kv_format,
        ),
        Limits(tokens=tokens, sampled=sampled, context=600),
        [(angles.cos().numpy(), angles.sin().numpy())],
        number_format,
        NUM_BLOCKS,
        threads,
    )
    program.arena[:] = 0xFF  # NaN in all types, and of scales
    yield program
    program.close()


class Sequence:
    """A prompt on scattered blocks, some of whose tokens are computed."""

    def __init__(self, token_ids: list[int], free: list[int], block_tokens: int) -> None:
        self.token_ids = token_ids
        self.blocks = [free.pop() for _ in range(-(-len(token_ids) // block_tokens))]
        self.done = 0


def run(program: Program, parts: list[tuple[Sequence, int]]) -> Tensor:
    """Computes the next `count` tokens of each; logits of each one's last."""
    ids: list[int] = []
    positions: list[int] = []
    starts, lengths = [0], []
    for sequence, count in parts:
        span = range(sequence.done, sequence.done + count)
        ids += [sequence.token_ids[i] for i in span]
        positions += span
        sequence.done += count
        starts.append(len(ids))
        lengths.append(sequence.done)
    tables = np.zeros((len(parts), max(len(s.blocks) for s, _ in parts)), np.int32)
    for row, (sequence, _) in enumerate(parts):
        tables[row, : len(sequence.blocks)] = sequence.blocks
    rows = np.array(starts[1:], np.int32) - 1
    arrays = (np.array(values, np.int32) for values in (ids, positions, starts, lengths))
    greedy = np.zeros(len(rows), SAMPLING)
    best = compute(program, *arrays, tables, rows, greedy)
    logits = torch.from_numpy(logits_of(program)[: len(rows)].copy())
    assert best.tolist() == logits.argmax(-1).tolist()
    return logits


def sequences(model: Model, *lengths: int) -> list[Sequence]:
    random = np.random.default_rng(0)
    free = random.permutation(NUM_BLOCKS).tolist()
    return [
        Sequence(random.integers(0, model.vocab, n).tolist(), free, model.block_tokens)
        for n in lengths
    ]


@each_weights
@each_format
@each_library
def test_prompts_in_pieces_beside_decodes(
    instruction_set: str, number_format: Format, weights: dict[str, Any]
) -> None:
    model = Model(**weights)
    a, b, c = sequences(model, 45, 120, 17)
    tolerance = max(TOLERANCE[number_format], SHORT_ROWS if model.to else 0.0)
    want = [model.logits(s.token_ids) for s in (a, b, c)]
    with compiled(model, instruction_set, number_format) as program:
        for parts in (
            [(b, 100)],
            [(a, 43), (b, 19), (c, 16)],
            [(a, 1), (c, 1), (b, 1)],
            [(a, 1)],
        ):
            got = run(program, parts)
            for row, (sequence, _) in zip(got, parts, strict=True):
                expected = want[(a, b, c).index(sequence)][sequence.done - 1]
                torch.testing.assert_close(row, expected, rtol=0, atol=tolerance * 20)
                if number_format != "bfloat16":
                    torch.testing.assert_close(row, expected, rtol=tolerance, atol=tolerance * 5)


@pytest.mark.parametrize(
    "model",
    [
        Model(heads=4, kv_heads=4, dim=16, block_tokens=32),
        Model(heads=5, kv_heads=1, dim=48),
        Model(heads=14, kv_heads=1, dim=16, layers=1),  # more heads in a group than a tile has rows
        Model(heads=2, kv_heads=1, dim=64, hidden=64, inner=64, vocab=64, block_tokens=48),
        Model(cap=0.6, window=16, block_tokens=32),
        Model(kv_heads=1, window=35, layers=3),
        Model(window=1),
    ],
    ids=["multi-head", "multi-query", "wide-group", "all-multiples", "capped", "window", "alone"],
)
@pytest.mark.parametrize("threads", [1, 3])
@each_library
def test_shapes(instruction_set: str, model: Model, threads: int) -> None:
    long, short = sequences(model, 70, 9)
    want = model.logits(long.token_ids)
    with compiled(model, instruction_set, "float32", threads) as program:
        run(program, [(short, 9), (long, 33)])
        got = run(program, [(long, 36)])
        torch.testing.assert_close(got[0], want[68], rtol=1e-4, atol=1e-4)
        got = run(program, [(long, 1)])
        torch.testing.assert_close(got[0], want[69], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "model",
    [
        Model(),
        Model(heads=5, kv_heads=1, dim=48, block_tokens=32),
        Model(heads=14, kv_heads=1, dim=16, layers=1),
        Model(cap=0.6, window=16),
        Model(window=35, layers=3),
    ],
    ids=["plain", "multi-query", "wide-group", "capped", "window"],
)
@each_format
@each_kv_format
@each_library
def test_keys_and_values_of_few_bits(
    instruction_set: str, kv_format: KvFormat, number_format: Format, model: Model
) -> None:
    """Beside the definitions with keys and values rounded so; what lies between two numbers may be
    either, by the last bit of a sum. The cache is NaN beyond what was written."""
    model = replace(model, kv_format=kv_format)
    a, b, c = sequences(model, 45, 120, 17)
    want = {id(s): model.logits(s.token_ids) for s in (a, b, c)}
    exact = {id(s): replace(model, kv_format="auto").logits(s.token_ids) for s in (a, b, c)}
    apart, step = [], []
    with compiled(model, instruction_set, number_format) as program:
        for parts in ([(b, 100)], [(a, 43), (b, 19), (c, 16)], [(a, 1), (c, 1), (b, 1)], [(a, 1)]):
            for row, (sequence, _) in zip(run(program, parts), parts, strict=True):
                of, at = id(sequence), sequence.done - 1
                apart.append((row - want[of][at]).abs().mean())
                step.append((exact[of][at] - want[of][at]).abs().mean())
    room = 0.0
    if number_format == "bfloat16":  # its own sums are that rough, and steps of 4 bits are wide
        room = 0.35 if kv_format == "int4" else 0.2
    assert max(apart) <= room + max(step) / 3
    assert np.median(apart) <= room + np.median(step) / 10
    assert min(step) > 0


@each_of_8_bits
@each_library
def test_each_token_and_head_has_its_own_scale(instruction_set: str, kv_format: KvFormat) -> None:
    """Of values, whose order in a piece is the simpler one: [dim / 16][16 tokens][16]."""
    model = Model(layers=1, kv_format=kv_format)
    (a,), dim, w = sequences(model, 16), model.dim, model.weights()
    x = F.rms_norm(w["embed"][torch.tensor(a.token_ids)], (model.hidden,), w["norm1.0"], EPSILON)
    of_heads = F.linear(x, w["qkv.0"], w["bias.0"]).view(16, -1, dim)[:, -model.kv_heads :]
    with compiled(model, instruction_set, "float32") as program:
        run(program, [(a, 16)])
        pieces = program.arena.reshape(NUM_BLOCKS, 2, model.kv_heads, -1)[a.blocks[0], 1].copy()
    for wanted, piece in zip(of_heads.unbind(1), torch.from_numpy(pieces), strict=True):
        scales, numbers = piece[16 * dim :].view(torch.float32), piece[: 16 * dim]
        scales = scales / (256 if kv_format == "fp8" else 1)  # of such the kernels read 2^-8 each
        largest, most = wanted.abs().amax(1), 127 if kv_format == "int8" else 448
        torch.testing.assert_close(scales * most, largest)
        found = numbers.view(STORED[kv_format]).float().view(dim // 16, 16, 16)
        found = found.transpose(0, 1).flatten(1) * scales[:, None]
        half = largest[:, None] / 254 if kv_format == "int8" else wanted.abs() / 16 + 1e-3
        assert ((found - wanted).abs() <= half * 1.001 + 1e-6).all()
        assert (found.abs().amax(1) / largest - 1).abs().max() < 1e-5


@each_of_8_bits
@each_library
def test_numbers_at_the_edges_of_8_bits(
    instruction_set: str, kv_format: KvFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """e4m3's subnormal ones and ties between them; a head next to nothing, which is stored as
    zeros; and of a head with one that is no number the scale is none."""
    model = replace(Model(), layers=1, kv_format=kv_format)
    dim, heads = model.dim, model.kv_heads
    steps = torch.arange(heads * dim).view(heads, dim) * 2.0**-11
    steps[:, ::2] *= -1
    steps[:, 0] = 448
    for last in (None, 1e-33, torch.nan, torch.inf):
        wanted = steps.clone()
        if last is not None:
            wanted[-1] = torch.linspace(-1e-33, 1e-33, dim)
            wanted[-1, 5] = last
        weights = model.weights()
        weights["qkv.0"][-heads * dim :] = 0
        weights["bias.0"][-heads * dim :] = wanted.flatten()
        monkeypatch.setattr(Model, "weights", lambda _, weights=weights: weights)
        (a,) = sequences(model, 3)
        with compiled(model, instruction_set, "float32") as program:
            last_id(program, a)
            arena = program.arena.reshape(NUM_BLOCKS, 2, heads, -1)
            pieces = torch.from_numpy(arena[a.blocks[0], 1].copy())
        numbers, scales = reference.in_8_bits(wanted, STORED[kv_format])
        found = pieces[:, 16 * dim :].contiguous().view(torch.float32)[:, :3]
        unit = 256 if kv_format == "fp8" else 1
        torch.testing.assert_close(
            found / unit, scales[:, None].expand(-1, 3), equal_nan=True, rtol=1e-6, atol=0
        )
        stored = pieces[:, : 16 * dim].view(heads, dim // 16, 16, 16).transpose(1, 2)
        for head in range(heads):
            if scales[head].isfinite():
                for token in stored[head, :3].reshape(3, dim):
                    assert (token.view(STORED[kv_format]).float() == numbers[head].float()).all()


@pytest.mark.parametrize("dim", [16, 32, 48, 128])
@each_library
def test_numbers_of_4_bits_lie_two_to_a_byte_of_one_token(
    instruction_set: str, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of mixed heads, each with its scale, below 0 where the furthest is above; a head next to
    nothing is stored as zeros, and of one with a number that is none the scale is none."""
    model = replace(Model(), layers=1, dim=dim, kv_format="int4")
    heads, weights = model.kv_heads, model.weights()
    generator = torch.Generator().manual_seed(3)
    for last in (None, 1e-33, torch.nan, torch.inf):
        wanted = torch.randn(2, heads, dim, generator=generator)  # keys, values
        wanted[:, 0, 1] = torch.tensor([90.0, -90.0])
        if last is not None:
            wanted[:, -1] = torch.linspace(-1e-33, 1e-33, dim)
            wanted[:, -1, 5] = last
        weights["qkv.0"][-2 * heads * dim :] = 0
        weights["bias.0"][-2 * heads * dim :] = wanted.flatten()
        monkeypatch.setattr(Model, "weights", lambda _, weights=weights: weights)
        monkeypatch.setattr(Model, "angles", lambda _: torch.zeros(600, dim // 2))
        (a,) = sequences(model, 3)
        with compiled(model, instruction_set, "float32") as program:
            last_id(program, a)
            arena = program.arena.reshape(NUM_BLOCKS, 2, heads, -1)
            pieces = torch.from_numpy(arena[a.blocks[0]].copy())
        content, scales = reference.in_few_bits(wanted, INT4)
        found = pieces[..., 8 * dim :].contiguous().view(torch.float32)[..., :3]
        torch.testing.assert_close(
            found, scales[..., None].expand(-1, -1, 3), equal_nan=True, rtol=1e-5, atol=0
        )
        keys, values = (part[:, : 8 * dim].int() for part in pieces)
        # [heads, dim / 4, 2 nibbles, 2, 16 tokens], [heads, dim / 16, 2 nibbles, 8, 16 tokens]
        quads = keys.view(heads, dim // 4, 16, 2).transpose(2, 3)
        halves = values.view(heads, dim // 16, 8, 8, 2).permute(0, 1, 3, 2, 4).flatten(3)
        of_keys, of_values = (
            torch.stack((part & 15, part >> 4), dim=2).flatten(1, 3)[..., :3] - 8
            for part in (quads, halves)
        )
        numbers = reference.of_4_bits(content)
        for side, part in enumerate((of_keys, of_values)):
            for head in range(heads):
                if scales[side, head].isfinite():
                    apart = (part[head] - numbers[side, head, :, None]).abs()
                    assert apart.max() <= 1
                    assert apart.mean() < 0.02  # ties, by the last bit of a sum


@pytest.mark.parametrize(
    ("weights", "window"),
    [
        *itertools.product(WEIGHTS.values(), [0, 27]),
        ({"kv_format": "int8"}, 0),
        ({"kv_format": "fp8"}, 27),
        ({"kv_format": "int4"}, 0),
        ({"kv_format": "int4"}, 27),
    ],
    ids=str,
)
@each_format
@each_library
def test_what_a_row_gives_is_its_own(
    instruction_set: str, number_format: Format, weights: dict[str, Any], window: int
) -> None:
    """Bit for bit the same, alone or in any company, in one piece or in many, on any threads."""
    model = replace(Model(), vocab=64, window=window, **weights)

    def last_of(program: Program, pieces: list[int], company: list[int]) -> Tensor:
        subject, *others = sequences(model, 61, *company)
        got = torch.empty(0)
        for index, count in enumerate(pieces):
            beside = [(other, len(other.token_ids)) for other in others] if index == 0 else []
            got = run(program, [*beside, (subject, count)])
        return got[-1]

    cases: list[tuple[list[int], list[int]]] = [
        ([61], []),
        ([60, 1], [30]),
        ([1, 59, 1], [5, 160, 1]),
        ([17, 13, 31], [16, 2, 2, 2]),
    ]
    found = []
    for threads in (1, 2, 3):
        with compiled(model, instruction_set, number_format, threads) as program:
            found += [last_of(program, *case) for case in cases]
    assert all(torch.equal(found[0], other) for other in found[1:])


@each_library
def test_only_what_was_asked_for_is_sampled_and_nothing_beyond_is_read(
    instruction_set: str,
) -> None:
    model = Model()
    (a,) = sequences(model, 40)
    with compiled(model, instruction_set, "float32", sampled=40) as program:
        tables = np.array([a.blocks], np.int32)
        rows = np.array([39, 3, 17], np.int32)
        span = np.arange(40, dtype=np.int32)
        ids = np.array(a.token_ids, np.int32)
        ends = np.array([0, 40], np.int32)
        compute(program, ids, span, ends, ends[1:], tables, rows, np.zeros(3, SAMPLING))
        got = torch.from_numpy(logits_of(program)[:3])
        torch.testing.assert_close(got, model.logits(a.token_ids)[rows], rtol=1e-4, atol=1e-4)


def test_an_instruction_set_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cpu.library.supported", lambda: ("avx2",))
    with pytest.raises(Unavailable, match="no avx512"):
        Library("avx512")


def stale(recorder: Recorder, x: Rows, square: Matrix) -> Rows:
    """A norm of rows as they are no more when a linear takes it."""
    normed = recorder.norm(x, np.ones(24, np.float32), EPSILON)
    recorder.add(x, recorder.linear(x, square))
    return normed


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda r, x, m: r.linear(r.silu_mul(x), m), "rows of 12 meet a matrix of 24"),
        (lambda r, x, m: r.add(x, x), "only what linears or experts just gave"),
        (lambda r, x, m: r.linear(stale(r, x, m), m), "were added to since"),
        (lambda r, x, m: r.add(r.embed(m), stale(r, x, m)), "were added to since"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    wrong: Callable[[Recorder, Rows, Matrix], None], message: str
) -> None:
    library = Library(supported()[0])
    recorder = Recorder()
    x = recorder.embed(packed(library, np.zeros((10, 24), np.float32)))
    with pytest.raises(ValueError, match=message):
        wrong(recorder, x, packed(library, np.zeros((24, 24), np.float32)))


@pytest.mark.parametrize("kv_format", ["auto", *STORED])
@each_format
@each_library
def test_numbers_that_are_none_are_told(
    instruction_set: str, number_format: Format, kv_format: KvFormat
) -> None:
    """Scores that overflow must not look like an answer."""
    model = replace(Model(), layers=1, kv_format=kv_format)
    weights = model.weights()
    queries_and_keys = (model.heads + model.kv_heads) * model.dim
    weights["qkv.0"][:queries_and_keys] *= 1e20
    (a,) = sequences(model, 20)
    with (
        pytest.MonkeyPatch.context() as patch,
        compiled(model, instruction_set, number_format) as program,
    ):
        assert last_id(program, a) >= 0
        patch.setattr(Model, "weights", lambda _: weights)
        with compiled(model, instruction_set, number_format) as overflowing:
            assert last_id(overflowing, a) == -1


def last_id(program: Program, sequence: Sequence) -> int:
    count = len(sequence.token_ids)
    ids, span = np.array(sequence.token_ids, np.int32), np.arange(count, dtype=np.int32)
    ends, row = np.array([0, count], np.int32), np.array([count - 1], np.int32)
    table = np.array([sequence.blocks], np.int32)
    return int(compute(program, ids, span, ends, ends[1:], table, row, np.zeros(1, SAMPLING))[0])


def test_a_step_that_is_too_large_is_refused() -> None:
    """It would be written beyond the program's memory."""
    model = replace(Model(), layers=1)
    with compiled(model, supported()[0], "float32", sampled=2) as program:

        def step(tokens: int, rows: int = 1, length: int = 1) -> None:
            span, ends = np.zeros(tokens, np.int32), np.array([0, tokens], np.int32)
            table, lengths = np.zeros((1, 1), np.int32), np.array([length], np.int32)
            sampled = np.zeros(rows, np.int32)
            compute(program, span, span, ends, lengths, table, sampled, np.zeros(rows, SAMPLING))

        step(1)
        for too_large in ({"tokens": 301}, {"tokens": 1, "rows": 3}, {"tokens": 1, "length": 601}):
            with pytest.raises(ValueError, match="a step beyond"):
                step(**too_large)


def test_a_program_beyond_what_threads_can_share_is_refused() -> None:
    """Their counts would overflow, and tasks be computed by nobody, or by two."""
    model = replace(Model(), layers=1, hidden=16, vocab=16, heads=16, kv_heads=16)
    most = 2**18 // 16
    with compiled(model, supported()[0], "float32", tokens=most):
        pass
    few = f"max_batched_tokens must be at most {most} where keys have 16 heads, is {most + 1}"
    with pytest.raises(ValueError, match=few), compiled(model, "avx2", "float32", tokens=most + 1):
        pass
    deep = replace(model, layers=210)
    with pytest.raises(ValueError, match="too many layers"), compiled(deep, "avx2", "float32"):
        pass


def test_a_programs_threads_end_with_it() -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = threads()
    with compiled(Model(), supported()[0], "float32", threads=3):
        assert threads() == before + 3
    assert threads() == before


def test_a_compiler_that_cannot_is_told_and_keeps_nothing_from_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    told = build.build()
    assert len(told) == len(build.FLAGS)
    assert all("no such flag" in words for words in told)
    monkeypatch.setattr(build, "_is_x86", lambda: False)
    (told_of_machine,) = build.build()
    assert "for x86-64" in told_of_machine


@each_library
def test_a_step_launched_behind_another_takes_what_that_samples(instruction_set: str) -> None:
    """Ids that are not known yet are filled in; in any row, from any row."""
    model = Model()
    a, b = sequences(model, 20, 33)
    ids = np.array(a.token_ids + b.token_ids, np.int32)
    span = np.array([*range(20), *range(33)], np.int32)
    starts, lengths = np.array([0, 20, 53], np.int32), np.array([20, 33], np.int32)
    tables = np.array([a.blocks + a.blocks[:1], b.blocks], np.int32)
    greedy = np.zeros(2, SAMPLING)
    first = (ids, span, starts, lengths, tables, np.array([19, 52], np.int32), greedy)

    def second(order: list[int], ids: np.ndarray) -> tuple[np.ndarray, ...]:
        counts = np.arange(3, dtype=np.int32)
        return ids, lengths[order], counts, lengths[order] + 1, tables[order], counts[:2], greedy

    with compiled(model, instruction_set, "float32", threads=2) as program:
        known = compute(program, *first)
        assert known[0] != known[1]
        for order in ([0, 1], [1, 0]):
            expected = compute(program, *second(order, known[order]))
            running = launch(program, *first)
            awaited = np.array([[0, order[0]], [1, order[1]]], np.int32)
            behind = launch(program, *second(order, np.zeros(2, np.int32)), awaited)
            assert program.collect(running).tolist() == known.tolist()
            assert program.collect(behind).tolist() == expected.tolist()


def test_a_row_that_the_step_before_does_not_sample_is_refused() -> None:
    model = replace(Model(), layers=1)
    with compiled(model, supported()[0], "float32") as program:
        (a,) = sequences(model, 1)
        one, ends = np.zeros(1, np.int32), np.array([0, 1], np.int32)
        table = np.array([a.blocks], np.int32)
        step = (one, one, ends, ends[1:], table, one, np.zeros(1, SAMPLING))
        compute(program, *step)
        for awaited in ([[0, 1]], [[0, -1]], [[1, 0]], [[-1, 0]]):
            with pytest.raises(ValueError, match="do not fit"):
                launch(program, *step, np.array(awaited, np.int32))


@each_library
def test_what_follows_a_token_that_is_none_ends_and_harms_nobody(instruction_set: str) -> None:
    """A row whose logits are not finite has no token; the step behind it runs all the same."""
    model = replace(Model(), layers=1)
    (a,) = sequences(model, 20)
    ids, span = np.array(a.token_ids, np.int32), np.arange(20, dtype=np.int32)
    with compiled(model, instruction_set, "float32") as program:
        table = np.array([a.blocks], np.int32)

        def step(first: int, end: int) -> tuple[np.ndarray, ...]:
            ends = np.array([0, end - first], np.int32)
            row = np.array([end - first - 1], np.int32)
            length = np.array([end], np.int32)
            part = slice(first, end)
            return ids[part].copy(), span[part], ends, length, table, row, np.zeros(1, SAMPLING)

        # What the cache holds of the tokens before is NaN still.
        running = launch(program, *step(17, 18))
        behind = launch(program, *step(18, 19), np.zeros((1, 2), np.int32))
        assert program.collect(running).tolist() == [-1]
        assert program.collect(behind).tolist() == [-1]
        assert compute(program, *step(0, 20)).tolist()[0] >= 0
