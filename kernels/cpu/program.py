"""A model's forward pass as a list of operations that the C++ kernels run in one call.

A model says once what it computes, by the methods of `Recorder`; what these return stands for rows
of a step that has not come yet. `Program.launch` then runs the list for a step's tokens, in all
threads and without the interpreter. What a captured graph is to a GPU. A thread of the library's
own drives them, so that a step may be launched while another runs.

Between operations rows are float32, whatever the weights are.
"""

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.driver import Driver
from kernels.cpu.library import Library
from kernels.sampling import SAMPLING

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Format = Literal["float32", "bfloat16_weights", "bfloat16"]

PIECE = 16
"""Tokens that attention takes at a time: a KV block has a multiple of them."""

_EMBED, _LINEAR, _ROTARY, _ATTENTION, _GATHER, _SAMPLE = range(6)
_PLAIN, _NORM, _SILU_MUL = range(3)
_PUT, _ADD = range(2)
NOTHING_AWAITED = np.zeros((0, 2), np.int32)
_OPERAND_PAD = 32  # as in native/program.h
_LINE = 64  # bytes of a cache line


class _Matrix(ctypes.Structure):
    _fields_ = [
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
    ]


class _Op(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int),
        ("prelude", ctypes.c_int),
        ("epilogue", ctypes.c_int),
        ("layer", ctypes.c_int),
        ("source", ctypes.c_int),
        ("target", ctypes.c_int),
        ("sampled", ctypes.c_int),
        ("epsilon", ctypes.c_float),
        ("norm", ctypes.c_void_p),
        ("matrix", _Matrix),
        ("table", ctypes.c_void_p),
    ]


class _Buffer(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("width", ctypes.c_long)]


class _Shape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("heads", "kv_heads", "dim", "layers")),
        ("block_tokens", ctypes.c_int),
        ("scale", ctypes.c_float),
    ]


class _Program(ctypes.Structure):
    _fields_ = [
        ("ops", ctypes.POINTER(_Op)),
        ("num_ops", ctypes.c_int),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("shape", _Shape),
        ("arena", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("operand", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_long),
        ("tiles", ctypes.c_void_p),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("tokens", "sequences", "sampled", "table_width")),
        *(
            (name, ctypes.c_void_p)
            for name in ("token_ids", "positions", "starts", "lengths", "block_tables", "rows")
        ),
        ("samplings", ctypes.c_void_p),
        ("sampled_ids", ctypes.c_void_p),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("step", _Step),
        ("token_ids", ctypes.c_void_p),
        ("num_awaited", ctypes.c_int),
        ("awaited", ctypes.c_void_p),
        ("before", ctypes.c_void_p),
        ("failed", ctypes.c_int),
    ]


@dataclass(frozen=True)
class Geometry:
    """What attention needs to know. Sizes in features; `dim` is of a head, a multiple of 16."""

    heads: int
    kv_heads: int
    dim: int
    layers: int
    block_tokens: int
    """Of a KV block: a multiple of 16."""


@dataclass(frozen=True)
class Limits:
    """Of one step."""

    tokens: int
    sampled: int
    """Rows after which a token is sampled."""
    context: int
    """Tokens of a sequence."""


class Matrix:
    """Weights [n, k] in panels, which is the order in which the kernels read them."""

    def __init__(
        self, library: Library, weights: NDArray[np.generic], bias: Floats | None = None
    ) -> None:
        """`weights`: float32, or uint16 that are the bits of bfloat16; k is even."""
        self.n, self.k = weights.shape
        self.panels = aligned(-(-self.n // PIECE) * PIECE * self.k, weights.dtype)
        library.pack(np.ascontiguousarray(weights), self.panels)
        self.bias = bias

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes


@dataclass(eq=False)
class Rows:
    """Stands for float32 [rows of the step, width]."""

    width: int
    sampled: bool
    """The step's sampled rows, and not all of its tokens."""
    prelude: tuple[int, Floats | None, float] = (_PLAIN, None, 0.0)
    """What the linear that takes it does with its rows first."""
    origin: "Rows | None" = None
    """Of a norm or an activation: what it is of."""
    added: int = 0
    """Times that something was added to it. Of a norm or an activation: before it was taken."""


class Recorder:
    """Takes down what a model computes, operation by operation."""

    def __init__(self) -> None:
        self.ops: list[dict[str, Any]] = []

    def embed(self, table: NDArray[np.generic]) -> Rows:
        """Rows of the table [vocab, width] by the step's token ids; of the weights' type."""
        return self._emit(_EMBED, table.shape[1], False, table=table)

    def norm(self, x: Rows, weight: Floats, epsilon: float) -> Rows:
        """x / sqrt(mean(x²) + epsilon) * weight."""
        return Rows(x.width, x.sampled, (_NORM, weight, epsilon), x, x.added)

    def silu_mul(self, x: Rows) -> Rows:
        """silu of the row's first half times its second half."""
        return Rows(x.width // 2, x.sampled, (_SILU_MUL, None, 0.0), x, x.added)

    def linear(self, x: Rows, weights: Matrix) -> Rows:
        """x W^T + bias."""
        if x.width != weights.k:
            raise ValueError(f"rows of {x.width} meet a matrix of {weights.k}")
        if x.origin is not None and x.origin.added != x.added:
            raise ValueError("a norm or activation is of rows that were added to since")
        return self._emit(
            _LINEAR,
            weights.n,
            x.sampled,
            source=x.origin or x,
            prelude=x.prelude,
            matrix=weights,
            epilogue=_PUT,
        )

    def add(self, x: Rows, y: Rows) -> Rows:
        """x + y, where y is what the last `linear` gave; x is no more."""
        op = self.ops[-1]
        if op["target"] is not y or op["kind"] != _LINEAR or x.width != y.width:
            raise ValueError("only what a linear just gave is added, to rows of its width")
        op["target"], op["epilogue"] = x, _ADD
        x.added += 1
        return x

    def add_norm(self, x: Rows, y: Rows, weight: Floats, epsilon: float) -> tuple[Rows, Rows]:
        """`add`, and the sum's `norm`."""
        x = self.add(x, y)
        return x, self.norm(x, weight, epsilon)

    def rotary(self, qkv: Rows, layer: int) -> Rows:
        """Queries and keys of [heads + 2 kv_heads, dim] turned by their positions, in place; keys
        and values stored in the cache."""
        self.ops.append({"kind": _ROTARY, "source": qkv, "target": qkv, "layer": layer})
        return qkv

    def attention(self, qkv: Rows, layer: int, width: int) -> Rows:
        """Each token's queries over its sequence's tokens in the cache, itself included."""
        return self._emit(_ATTENTION, width, False, source=qkv, layer=layer)

    def sampled(self, x: Rows) -> Rows:
        """The rows whose logits are wanted: what comes after is computed for them alone."""
        return self._emit(_GATHER, x.width, True, source=x)

    def _emit(self, kind: int, width: int, sampled: bool, **fields: Any) -> Rows:
        rows = Rows(width, sampled)
        self.ops.append({"kind": kind, "target": rows, **fields})
        return rows


class Program:
    """What was recorded, with memory for a step's rows. Used from one thread at a time."""

    def __init__(
        self,
        library: Library,
        recorder: Recorder,
        logits: Rows,
        geometry: Geometry,
        limits: Limits,
        rotary: tuple[Floats, Floats],
        number_format: Format,
        num_blocks: int,
        threads: int,
    ) -> None:
        """`rotary`: cos and sin, [context, dim / 2] each. Raises MemoryError where no thread can be
        made."""
        self._library = library
        dot = number_format == "bfloat16" and library.has_dot
        self._format = _DOT if dot else _FORMATS[number_format]
        self._rows = logits
        self._keep: list[Any] = [rotary]
        """What the structures point at."""
        element = 2 if number_format == "bfloat16" else 4
        g = geometry
        self.arena = aligned(
            num_blocks * g.layers * 2 * g.kv_heads * g.block_tokens * g.dim * element, np.uint8
        )
        """KV blocks: [num_blocks, layers, 2 (K, V), kv_heads, block_tokens, dim] of float32 or
        bfloat16, a head's tokens and dims in the order that native/rows.h says. Zeros, of which a
        page costs memory once it is written."""
        self._buffers, places = self._lay_buffers(recorder, limits)
        ops = [self._op(op, places) for op in recorder.ops]
        ops.append(_Op(kind=_SAMPLE, source=places[logits], sampled=1))
        self._ops = (_Op * len(ops))(*ops)
        self._tasks = (ctypes.c_int * len(ops))()
        scratch = _up(library.scratch_bytes(g.dim, limits.context, logits.width), _LINE)
        widest = max(op["matrix"].k for op in recorder.ops if op["kind"] == _LINEAR)
        self._program = _Program(
            ops=self._ops,
            num_ops=len(ops),
            buffers=self._buffers,
            shape=_Shape(g.heads, g.kv_heads, g.dim, g.layers, g.block_tokens, g.dim**-0.5),
            arena=self.arena.ctypes.data,
            cos=rotary[0].ctypes.data,
            sin=rotary[1].ctypes.data,
            operand=self._memory(limits.tokens * (widest + _OPERAND_PAD) * 4),
            scratch=self._memory(scratch * threads),
            scratch_bytes=scratch,
            tiles=self._memory(limits.tokens * 16),
        )
        self._limits = limits
        self._sampled_ids = np.empty(0, np.int32)  # of the step launched last
        self._driver = Driver(library, threads, self._program, self._tasks, self._format)
        self.ended = self._driver.ended
        """To be polled: readable while a step has ended that was not collected."""
        self.close = weakref.finalize(self, self._driver.end)
        """Ends the threads, as the program's own end does."""

    def launch(
        self,
        token_ids: Ints,
        positions: Ints,
        starts: Ints,
        lengths: Ints,
        block_tables: Ints,
        rows: Ints,
        samplings: NDArray[np.void],
        awaited: Ints = NOTHING_AWAITED,
    ) -> "Launched":
        """Has a step computed, after those launched before, of T tokens of S sequences, laid one
        after the other.

        token_ids, positions: [T]; starts: [S + 1], where each sequence's tokens begin;
        lengths: [S], tokens in the cache, these included; block_tables: [S, width]; rows: [R], of
        the tokens after which one is sampled, and how (SAMPLING). awaited: [A, 2], places in
        token_ids that are not known yet, each with the row that samples it in the step launched
        before. All arrays are the program's until `collect`.
        """
        arrays = (token_ids, positions, starts, lengths, block_tables, rows)
        assert all(a.dtype == np.int32 and a.flags.c_contiguous for a in (*arrays, awaited))
        assert samplings.dtype == SAMPLING
        limits, before = self._limits, self._sampled_ids
        if (
            not len(token_ids) == len(positions) == starts[-1] <= limits.tokens
            or not len(rows) == len(samplings) <= limits.sampled
            or not len(lengths) == len(starts) - 1 == len(block_tables)
            or lengths.max() > limits.context
            or not np.all((awaited >= 0) & (awaited < (len(token_ids), len(before))))
        ):
            raise ValueError(f"a step beyond {limits}, or of parts that do not fit")
        sampled_ids = np.empty(len(rows), np.int32)
        step = _Step(
            len(token_ids),
            len(lengths),
            len(rows),
            block_tables.shape[1],
            *(array.ctypes.data for array in (*arrays, samplings, sampled_ids)),
        )
        launch = _Launch(
            step, step.token_ids, len(awaited), awaited.ctypes.data, before.ctypes.data
        )
        self._sampled_ids = sampled_ids
        self._driver.launch(launch)
        return Launched(launch, sampled_ids, (*arrays, samplings, awaited, before))

    def collect(self, launched: "Launched") -> Ints:
        """Waits for the step launched first of those not collected. Gives the sampled ids, [R]; -1
        for a row whose logits are not finite."""
        self._driver.wait()
        if launched.launch.failed:
            raise RuntimeError(f"{self._library.instruction_set} has no format {self._format}")
        return launched.sampled_ids

    def _memory(self, size: int) -> int:
        memory = aligned(size, np.uint8)
        self._keep.append(memory)
        return memory.ctypes.data

    def _lay_buffers(self, recorder: Recorder, limits: Limits) -> tuple[Any, dict[Rows, int]]:
        """Memory for all rows: what is used no more gives its place to the next of its size."""
        last: dict[Rows, int] = {}
        for number, op in enumerate(recorder.ops):
            for rows in (op.get("source"), op["target"]):
                if rows is not None:
                    last[rows] = number
        last[self._rows] = len(recorder.ops)
        places: dict[Rows, int] = {}
        free: dict[tuple[int, bool], list[int]] = {}
        sizes: list[tuple[int, bool]] = []
        for number, op in enumerate(recorder.ops):
            target = op["target"]
            size = (target.width, target.sampled)
            if target not in places:
                if not free.get(size):
                    free[size] = [len(sizes)]
                    sizes.append(size)
                places[target] = free[size].pop()
            for rows in {op.get("source"), target} - {None}:
                if last[rows] == number:
                    free.setdefault((rows.width, rows.sampled), []).append(places[rows])
        memory = [
            aligned((limits.sampled if sampled else limits.tokens) * width, np.float32)
            for width, sampled in sizes
        ]
        self._keep.append(memory)
        self.logits: Floats = memory[places[self._rows]].reshape(-1, self._rows.width)
        """[sampled, vocab], of the last step's rows."""
        buffers = [
            _Buffer(m.ctypes.data, width) for m, (width, _) in zip(memory, sizes, strict=True)
        ]
        return (_Buffer * len(buffers))(*buffers), places

    def _op(self, op: dict[str, Any], places: dict[Rows, int]) -> _Op:
        target: Rows = op["target"]
        found = _Op(kind=op["kind"], target=places[target], sampled=target.sampled)
        found.layer = op.get("layer", 0)
        if "source" in op:
            found.source = places[op["source"]]
        if op["kind"] == _EMBED:
            found.table = self._pointer(op["table"])
        if op["kind"] == _LINEAR:
            matrix: Matrix = op["matrix"]
            found.prelude, norm, found.epsilon = op["prelude"]
            found.norm = self._pointer(norm)
            found.epilogue = op["epilogue"]
            bias = self._pointer(matrix.bias)
            found.matrix = _Matrix(self._pointer(matrix.panels), bias, matrix.n, matrix.k)
        return found

    def _pointer(self, array: NDArray[Any] | None) -> int | None:
        if array is None:
            return None
        assert array.flags.c_contiguous
        self._keep.append(array)
        return array.ctypes.data


@dataclass(frozen=True, eq=False)
class Launched:
    """A step on its way, with all memory that it reads and writes."""

    launch: _Launch
    sampled_ids: Ints
    arrays: tuple[NDArray[Any], ...]


_FORMATS: dict[Format, int] = {"float32": 0, "bfloat16_weights": 1, "bfloat16": 2}
_DOT = 3


def aligned(count: int, dtype: Any) -> NDArray[Any]:
    """Zeros [count] that begin with a cache line."""
    size = count * np.dtype(dtype).itemsize
    memory = np.zeros(size + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    return memory[start : start + size].view(dtype)


def _up(value: int, to: int) -> int:
    return -(-value // to) * to
