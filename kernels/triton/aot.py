"""Compiles the kernels for a GPU that need not be there: `python -m kernels.triton.aot`.

It is the launches of the kernels' own functions that are compiled, made on tensors without
memory: so with the constants and the alignment that a model of these sizes brings. Prints a line of
JSON for each: the kernel, its constants, its registers, stack (what spilled) and shared memory.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kernels.cpu.matrix import NARROW, Held
from kernels.heads import QkNorm, Scores
from kernels.kv_layer import INT4, KvLayer
from kernels.paged_batch import PagedBatch
from kernels.triton import (
    activation,
    decode,
    deltas,
    embed,
    experts,
    linear,
    norm,
    prefill,
    rotary,
    sampling,
)
from kernels.triton.matrix import NarrowMatrix

CAPABILITY = 90
_TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Case:
    """A model's sizes."""

    heads: int
    kv_heads: int
    dim: int
    hidden: int = 2048
    inner: int = 8192
    vocab: int = 128256
    dtype: torch.dtype = torch.bfloat16
    stored: torch.dtype | None = None
    """Keys and values; None: as they are computed."""
    scores: Scores = field(default=Scores(0.1))
    qk_norm: bool = False
    experts: tuple[int, int] | None = None
    """And how many of them each token chooses; `inner` is of one of them then."""
    adapter_rank: int = 0
    """At most, of an adapter; 0: there are none."""
    held: tuple[Held, ...] = ()
    """Weights of few bits, besides."""


CASES = (
    Case(32, 8, 64, adapter_rank=64),  # as Llama 3.2 1B
    # as Llama 3.1 8B
    Case(32, 8, 128, 4096, 14336, stored=torch.float8_e4m3fn, held=tuple(NARROW)),
    Case(32, 8, 128, stored=torch.int8),
    Case(32, 8, 128, stored=INT4),
    Case(32, 8, 128, scores=Scores(0.1, window=4096)),  # as Mistral 7B
    Case(9, 3, 64, 576, 1536, 49152),  # as SmolLM 135M
    Case(16, 16, 128),  # a head each
    Case(64, 8, 128, 8192),  # as Llama 3.1 70B
    Case(16, 8, 128, qk_norm=True),  # as Qwen3 0.6B
    Case(8, 4, 256, 2304, 9216, 256000, scores=Scores(0.1, 50.0, 4096)),  # as Gemma 2 2B
    Case(32, 8, 64, dtype=torch.float32, adapter_rank=64, held=("int8", "int4_zeros")),
    # as Mixtral 8x7B
    Case(32, 8, 128, 4096, 14336, 32000, experts=(8, 2), held=("int8", "int4")),
    Case(32, 4, 128, 2048, 768, 151936, qk_norm=True, experts=(128, 8)),  # as Qwen3 30B-A3B
)


def launch_all(case: Case, device: torch.device, block_size: int = 16) -> None:
    """Each kernel once, as a runner launches it, on memory that nobody filled."""

    def room(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def ints(*shape: int) -> Tensor:
        return room(*shape, dtype=torch.int32)

    tokens, blocks, context = 32, 64, 8192
    shape = (blocks, 4, 2, case.kv_heads, block_size)
    width = case.dim // 2 if case.stored == INT4 else case.dim
    values = room(*shape, width, dtype=case.stored or case.dtype)[:, 1]
    scales = room(*shape, dtype=torch.float32)[:, 1] if case.stored else None
    layer = KvLayer(values, scales)
    batch = PagedBatch(
        positions=ints(tokens),
        slots=ints(tokens),
        starts=ints(17),
        lengths=ints(16),
        block_tables=ints(16, context // block_size),
        tiles=ints(16, 2),
        num_decodes=8,
    )
    angles = (room(context, case.dim // 2, dtype=torch.float32),) * 2
    weight, head = room(case.hidden), room(case.dim)
    width = (case.heads + 2 * case.kv_heads) * case.dim
    qk_norm = QkNorm(head, head, 1e-6) if case.qk_norm else None
    splits = decode.Splits.of(16, case.heads, case.dim, context, device)
    x = embed.embed(ints(tokens), ints(16), room(case.vocab, case.hidden))
    norm.rms_norm(x, weight, 1e-5)
    norm.add_rms_norm(x, x, weight, 1e-5)
    activation.silu_and_mul(room(tokens, 2 * case.inner))
    activation.gelu_and_mul(room(tokens, 2 * case.inner))
    q = rotary.rotary_store(
        room(tokens, width), angles, batch.positions, batch.slots, layer, qk_norm
    )
    if case.experts:
        _launch_experts(case, x)
    if case.adapter_rank:
        _launch_deltas(case, x)
    for held in case.held:
        _launch_narrow(case, held, device)
    out = room(tokens, case.heads, case.dim)
    decode.decode(out, q, layer, batch, case.scores, splits)
    prefill.prefill(out, q, layer, batch, case.scores)
    sampling.sample(
        ints(16),
        room(16, case.vocab),
        ints(16, sampling.WORDS),
        sampling.SamplerRoom.of(16, case.vocab, device),
    )


def _launch_narrow(case: Case, held: Held, device: torch.device) -> None:
    """Products of one row and of many; rows of an embedding."""
    matrix = NarrowMatrix.empty(held, case.hidden, case.hidden, case.dtype, device)
    for rows in (1, 512):
        linear.linear(torch.empty(rows, case.hidden, dtype=case.dtype, device=device), matrix)
    if held != "w8a8":
        ids = torch.empty(32, dtype=torch.int32, device=device)
        embed.embed(ids, ids, matrix)


def _launch_experts(case: Case, x: Tensor) -> None:
    """In tiles of few rows and of many; chosen by one row, some, and the most of a program."""
    assert case.experts
    count, chosen = case.experts
    sizes = (count, 2 * case.inner, case.hidden), (count, case.hidden, case.inner)

    def narrow(held: Held, of_each: int, k: int) -> NarrowMatrix:
        return NarrowMatrix.empty(held, count * of_each, k, case.dtype, x.device)

    weights: list[list[Tensor | NarrowMatrix]] = [[x.new_empty(size) for size in sizes]]
    weights += [[narrow(held, *size) for _, *size in sizes] for held in case.held]
    for rows in (1, 128):
        experts.routed(x.new_empty(rows, count), chosen, normed=True)
    for rows, (gate_up, down) in product((16, 16 * count), weights):
        shares, groups = experts.routed(x.new_empty(rows, count), chosen, normed=True)
        y = experts.of_experts(x.new_empty(rows, case.hidden), gate_up, groups, chosen)
        y = experts.of_experts(activation.silu_and_mul(y), down, groups, chosen=0)
        experts.mix(y, groups, shares)


def _launch_deltas(case: Case, x: Tensor) -> None:
    """Of queries, keys and values, and of the way down; of few rows and of many."""
    most, of_heads = case.adapter_rank, [case.heads, case.kv_heads, case.kv_heads]
    table = x.new_empty((16, 2, deltas.PARTS, deltas.FIELDS), dtype=torch.int64)
    for rows in (16, 512):
        places = x.new_empty(rows, dtype=torch.int32)
        order = x.new_empty(rows, dtype=torch.int64)
        for inner, widths in (
            (case.hidden, [heads * case.dim for heads in of_heads]),
            (case.inner, [case.hidden]),
        ):
            of_it = deltas.Deltas(table[:, 1], tuple(widths), most, at_once=8)
            y = x.new_empty(rows, sum(widths))
            deltas.add_deltas(y, x.new_empty(rows, inner), deltas.Rows(places, order), of_it)


def compile_all(cases: tuple[Case, ...] = CASES) -> Iterator[dict[str, Any]]:
    """Each kernel of each case that differs from those before."""
    done = set()
    for case in cases:
        for kernel, bound, options in _launches(partial(launch_all, case, torch.device("meta"))):
            source = _source(kernel, bound)
            key = (kernel.__name__, source.hash(), *options.items())
            if key not in done:
                done.add(key)
                yield _compiled(kernel, source, options)


def _launches(launch: Callable[[], None]) -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """What `launch` launches: kernels, their arguments by name, options of the compiler."""
    found = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        bound = dict(zip(kernel.arg_names, args, strict=False))
        names = [name for name in ("num_warps", "num_stages") if name in named]
        options: dict[str, Any] = {name: named.pop(name) for name in names}
        found.append((kernel, bound | named, options))

    with _replaced(record):
        launch()
    return found


@contextmanager
def _replaced(run: Callable[..., None]) -> Iterator[None]:
    own = JITFunction.run
    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = own


def _source(kernel: Any, bound: dict[str, Any]) -> ASTSource:
    signature, constants, aligned = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = bound[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(place,)] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[parameter.name] = f"*{_TYPES[value.dtype]}"
            divides = value.storage_offset() * value.itemsize % 16 == 0
            divides &= not parameter.do_not_specialize_on_alignment
        else:
            signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
            divides = isinstance(value, int) and value % 16 == 0
        if divides and not parameter.do_not_specialize:
            aligned[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, aligned)


def _compiled(kernel: Any, source: ASTSource, options: dict[str, Any]) -> dict[str, Any]:
    target = GPUTarget("cuda", CAPABILITY, 32)
    compiled = triton.compile(source, target=target, options=options)
    constants = {kernel.arg_names[place[0]]: value for place, value in source.constants.items()}
    return {
        "kernel": kernel.__name__,
        "constants": constants,
        "types": [kind for kind in source.signature.values() if kind.startswith("*")],
        "shared_bytes": compiled.metadata.shared,
        **_resources(compiled.asm["cubin"]),
    }


def _resources(binary: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack: what did not fit in them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = dict(part.split(":", 1) for part in told.split() if ":" in part)
    return {"registers": int(found["REG"]), "stack_bytes": int(found["STACK"])}


def main() -> int:
    """Exit status: 0; a kernel that does not compile raises."""
    if triton.knobs.runtime.interpret:
        print("TRITON_INTERPRET is set: there is nothing to compile", file=sys.stderr)
        return 2
    for line in compile_all():
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
