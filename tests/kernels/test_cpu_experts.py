"""Layers of experts on the C++ kernels, against the same written out in torch: of every format and
instruction set, of few rows and many; and which weights a step reads."""

import ctypes
import functools
import mmap
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.library import Library, supported
from kernels.cpu.matrix import Held, Matrix
from kernels.cpu.program import Format, Geometry, Limits, Program
from kernels.cpu.recorder import Recorder
from kernels.mixture import Mixture
from kernels.sampling import SAMPLING
from tests.support.programs import compute, logits_of, packed, stood_for

EPSILON = 1e-5
FORMATS: list[tuple[Format, Held]] = [
    ("float32", ""),
    ("bfloat16_weights", ""),
    ("bfloat16", ""),
    ("float32", "int8"),
    ("bfloat16", "int4"),
    ("bfloat16_weights", "int8_groups"),
    ("bfloat16", "int4_zeros"),
    ("bfloat16", "fp8"),
    ("float32", "fp8_blocks"),
    ("float32", "w8a8"),
]
each_library = pytest.mark.parametrize("instruction_set", supported())
each_format = pytest.mark.parametrize(("number_format", "held"), FORMATS)


@dataclass(frozen=True)
class Model:
    """Two layers, the second of which sees the rows alone that are sampled."""

    experts: int = 20
    chosen: int = 3
    normed: bool = False
    width: int = 128
    inner: int = 128
    vocab: int = 77

    @functools.cached_property
    def weights(self) -> dict[str, Tensor]:
        """Values that bfloat16 holds, so that all formats compute with the same."""
        generator = torch.Generator().manual_seed(5)

        def draw(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator) * 0.2).bfloat16().float()

        found = {"embed": draw(self.vocab, self.width), "head": draw(self.vocab, self.width)}
        for layer in range(2):
            found |= {
                f"router.{layer}": draw(self.experts, self.width),
                f"gate_up.{layer}": draw(self.experts * 2 * self.inner, self.width),
                f"down.{layer}": draw(self.experts * self.width, self.inner),
            }
        return found

    def value(self, name: str, held: Held) -> Tensor:
        if not held or not name.startswith(("gate_up", "down")):
            return self.weights[name]
        return torch.from_numpy(stood_for(held, self.weights[name].numpy()))

    def logits(self, ids: list[int], held: Held) -> Tensor:
        """[tokens, vocab], from definitions."""
        x = self.value("embed", held)[torch.tensor(ids)]
        for layer in range(2):
            y = F.rms_norm(x, (self.width,), None, EPSILON)
            shares = (y @ self.value(f"router.{layer}", held).T).softmax(-1)
            gate_up = self.value(f"gate_up.{layer}", held).view(self.experts, -1, self.width)
            down = self.value(f"down.{layer}", held).view(self.experts, -1, self.inner)
            of_rows = []
            for row, share in zip(y, shares, strict=True):
                best = share.sort(descending=True, stable=True).indices[: self.chosen]
                total = share[best].sum() if self.normed else torch.tensor(1.0)
                of_row = torch.zeros(self.width)
                for expert in best.tolist():
                    gate, up = (gate_up[expert] @ row).chunk(2)
                    of_row += share[expert] / total * (down[expert] @ (F.silu(gate) * up))
                of_rows.append(of_row)
            x = x + torch.stack(of_rows)
        return F.rms_norm(x, (self.width,), None, EPSILON) @ self.value("head", held).T


@contextmanager
def compiled(
    model: Model,
    instruction_set: str,
    number_format: Format,
    held: Held,
    threads: int = 2,
    tokens: int = 300,
    matrices: dict[str, Matrix] | None = None,
) -> Iterator[Program]:
    """`matrices`: in place of those that are packed here."""
    library = Library(instruction_set)

    def matrix(name: str) -> Matrix:
        if found := (matrices or {}).get(name):
            return found
        to: Held = held if name.startswith(("gate_up", "down")) else ""
        of = model.weights[name]
        if number_format != "float32" and not to:
            return packed(library, of.bfloat16().view(torch.uint16).numpy())
        return packed(library, of.numpy(), to=to)

    recorder, ones = Recorder(), np.ones(model.width, np.float32)
    x = recorder.embed(matrix("embed"))
    for layer in range(2):
        names = (f"{name}.{layer}" for name in ("router", "gate_up", "down"))
        mixture = Mixture(*map(matrix, names), model.experts, model.chosen, model.normed)
        if layer:
            x = recorder.wanted(x)
        x = recorder.add(x, recorder.experts(recorder.norm(x, ones, EPSILON), mixture))
    logits = recorder.linear(recorder.norm(x, ones, EPSILON), matrix("head"))
    geometry = Geometry(1, 1, 16, 1, 16)
    limits = Limits(tokens=tokens, sampled=tokens, context=600)
    program = Program(library, recorder, logits, geometry, limits, [], number_format, 1, threads)
    yield program
    program.close()


def run(program: Program, ids: list[int], sampled: list[int] | None = None) -> Tensor:
    """Logits behind those tokens, each of which is a sequence, or behind all."""
    count = len(ids)
    rows = list(range(count)) if sampled is None else sampled
    arrays = (ids, [0] * count, range(count + 1), [1] * count, [0] * count, rows)
    best = compute(
        program, *(np.array(one, np.int32) for one in arrays), np.zeros(len(rows), SAMPLING)
    )
    found = torch.from_numpy(logits_of(program)[: len(rows)].copy())
    finite = found.isfinite().all(-1)
    assert best.tolist() == torch.where(finite, found.nan_to_num().argmax(-1), -1).tolist()
    return found


def tokens(model: Model, count: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, model.vocab, count).tolist()
    return found


@pytest.mark.parametrize(
    "model",
    [
        Model(),
        Model(normed=True),
        Model(experts=16, chosen=16),
        Model(experts=33, chosen=17, normed=True),
        Model(experts=3, chosen=1),
        Model(experts=1, chosen=1, normed=True),
    ],
    ids=str,
)
@each_library
def test_rows_are_what_their_experts_make_of_them(instruction_set: str, model: Model) -> None:
    with compiled(model, instruction_set, "float32", "") as program:
        for count in (1, 2, 9, 300):
            ids = tokens(model, count, seed=count)
            torch.testing.assert_close(
                run(program, ids), model.logits(ids, ""), rtol=1e-4, atol=1e-4
            )


@each_format
@each_library
def test_in_every_format(instruction_set: str, number_format: Format, held: Held) -> None:
    """bfloat16 may choose others: not in these few rows."""
    model, ids = Model(), tokens(Model(), 40)
    with compiled(model, instruction_set, number_format, held) as program:
        found, expected = run(program, ids), model.logits(ids, held)
    most = 0.05 if held == "w8a8" else 0.02 if number_format == "bfloat16" else 1e-3
    assert (found - expected).norm() < most * expected.norm()


@each_format
@each_library
def test_a_row_is_the_same_whatever_is_beside_it(
    instruction_set: str, number_format: Format, held: Held
) -> None:
    """Bit for bit: alone, among few, among many, and those of one expert all of the same row."""
    model = Model()
    ids = tokens(model, 200)
    with compiled(model, instruction_set, number_format, held, threads=1) as program:
        alone = torch.cat([run(program, [one]) for one in ids])
    with compiled(model, instruction_set, number_format, held, threads=3) as program:
        for count in (2, 7, 31, 200):
            assert torch.equal(run(program, ids[:count]), alone[:count])
        assert torch.equal(run(program, ids[:1] * 150 + ids[1:80])[150:], alone[1:80])
        few = [3, 70, 199]
        assert torch.equal(run(program, ids, few), alone[few])
        assert torch.equal(run(program, ids), alone)


@each_library
def test_what_is_not_finite_spoils_its_own_row(instruction_set: str) -> None:
    model = Model()
    ids = [token for token in tokens(model, 60) if token != 5]
    for value in (np.nan, np.inf):
        with compiled(model, instruction_set, "float32", "") as program:
            want = run(program, ids)
        broken = Model()
        broken.weights["embed"][5] = value
        with compiled(broken, instruction_set, "float32", "") as program:
            found = run(program, [*ids[:9], 5, *ids[9:]])
        assert not found[9].isfinite().any()
        assert torch.equal(torch.cat((found[:9], found[10:])), want)


@pytest.mark.parametrize("held", ["", "int8", "int4"])
@each_library
def test_a_decode_reads_the_chosen_experts_alone(instruction_set: str, held: Held) -> None:
    """The others' pages may not be read: who tries dies."""
    call = (
        f"from tests.kernels.test_cpu_experts import closed; closed({instruction_set!r}, {held!r})"
    )
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=False)
    assert done.stdout == "the same, then closed\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


def closed(instruction_set: str, held: Held) -> None:
    """An expert takes whole pages here. For one row they are closed but for those that it chooses;
    at last a closed one is read, which ends the process: they are."""
    model = Model(experts=8, chosen=2, width=256, inner=256)
    library = Library(instruction_set)
    names = [f"{name}.{layer}" for layer in range(2) for name in ("gate_up", "down")]
    whole = {name: packed(library, model.weights[name].numpy(), to=held) for name in names}
    in_pages = {name: _in_pages(matrix) for name, matrix in whole.items()}
    with compiled(model, instruction_set, "float32", held, matrices=in_pages) as program:
        want = run(program, [11])
        chosen = []
        for mixture in program._mixtures:
            groups = _groups(program, mixture)
            chosen.append(groups[1 : 1 + groups[0]])
        assert all(len(experts) == 2 for experts in chosen)
        for name, matrix in in_pages.items():
            for expert in {*range(8)} - {*chosen[int(name[-1])]}:
                _close(matrix, expert, model.experts)
        assert torch.equal(run(program, [11]), want)
    print("the same, then closed", flush=True)
    bytes(in_pages["down.0"].panels)


def _groups(program: Program, mixture: Mixture[Matrix]) -> list[int]:
    from kernels.cpu import structures as c

    found = c.Mixture.from_address(program._mixtures[mixture])
    count = 2 * mixture.experts + 2
    return list((ctypes.c_int * count).from_address(found.groups))


def _in_pages(matrix: Matrix) -> Matrix:
    memory = mmap.mmap(-1, matrix.panels.nbytes)
    panels: Any = np.frombuffer(memory, matrix.panels.dtype)
    panels[:] = matrix.panels
    return Matrix(panels, matrix.n, matrix.k, None, matrix.held)


def _close(matrix: Matrix, expert: int, experts: int) -> None:
    size = matrix.panels.nbytes // experts
    first = -(-expert * size // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (expert + 1) * size // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(matrix.panels.ctypes.data + first)
    assert end > first
    assert libc.mprotect(address, ctypes.c_size_t(end - first), 0) == 0
