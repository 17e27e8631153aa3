"""Runs a recorded forward pass (recorder.py) for a step's tokens: in one call, in all threads and
without the interpreter. What a captured graph is to a GPU. A thread of the library's own drives
them, so that a step may be launched while another runs."""

import ctypes
import weakref
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kernels.cpu import structures as c
from kernels.cpu.deltas import Deltas
from kernels.cpu.driver import Driver
from kernels.cpu.library import Library
from kernels.cpu.matrix import NARROW, Matrix
from kernels.cpu.memory import LINE, zeros
from kernels.cpu.recorder import MEET, Floats, Recorder, Rows
from kernels.heads import QkNorm, Scores
from kernels.mixture import Mixture
from kernels.sampling import EDIT, NO_EDITS, NO_TOP, SAMPLING_WORDS, Top, word_of

Ints: TypeAlias = "array[int]"
"""Of type "i". Whatever numpy does first in a step is a walk through memory that the kernels have
driven out of the caches; this is not."""
NO_INTS = array("i")
Format = Literal["float32", "bfloat16_weights", "bfloat16"]
KvFormat = Literal["auto", "int8", "fp8", "int4"]


@dataclass(frozen=True)
class Geometry:
    """What attention needs to know. Sizes in features; `dim` is of a head, a multiple of 16."""

    heads: int
    kv_heads: int
    dim: int
    layers: int
    """Of a KV block."""
    block_tokens: int
    """Of a KV block: a multiple of 16."""
    kv_format: KvFormat = "auto"
    """Of keys and values in the cache; auto: as attention computes with them, else numbers of 8
    or 4 bits and a scale, a float, for each token and head."""
    places: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Of each layer the number of its group, and which of a block's layers it is; without: one
    group has all."""

    @property
    def groups(self) -> int:
        """Each has block tables of its own."""
        return 1 + max((group for group, _ in self.places.values()), default=0)


@dataclass(frozen=True)
class Limits:
    """Of one step."""

    tokens: int
    sampled: int
    """Rows after which a token is sampled."""
    context: int
    """Tokens of a sequence."""


class Program:
    """What was recorded, with memory for a step's rows. Used from one thread at a time."""

    def __init__(
        self,
        library: Library,
        recorder: Recorder,
        logits: Rows | None,
        geometry: Geometry,
        limits: Limits,
        angles: Sequence[tuple[Floats, Floats]],
        number_format: Format,
        num_blocks: int,
        threads: int,
        deltas: Deltas | None = None,
    ) -> None:
        """`logits`: None, nothing is ever sampled. `angles`: of each of the model's rotary
        embeddings cos and sin, [context, dims / 2] each, which turn a head's first `dims`.
        `deltas`: of adapters; None: there are none. Raises ValueError for more than a step can
        count, and MemoryError where no thread can be made."""
        self._library = library
        dot = number_format == "bfloat16" and library.has_dot
        self._format = c.BF16_PRODUCTS if dot else _FORMATS[number_format]
        self._rows, self._deltas = logits, deltas
        self._state_width = next(
            (op["source"].width for op in recorder.ops if op["kind"] == c.POOL), 0
        )
        self._keep: list[Any] = []
        """What the structures point at."""
        self._mixtures: dict[Mixture[Matrix], int] = {}
        self.workspace_bytes = 0
        """Of memory besides weights and KV blocks; it does not grow."""
        self._geometry = g = geometry
        of_token = g.dim * (2 if number_format == "bfloat16" else 4)
        if g.kv_format != "auto":
            of_token = (g.dim // 2 if g.kv_format == "int4" else g.dim) + 4
        self.arena = zeros(
            num_blocks * g.layers * 2 * g.kv_heads * g.block_tokens * of_token, np.uint8
        )
        """KV blocks: [num_blocks, layers, 2 (K, V), kv_heads, block_tokens, dim], a head's tokens
        and dims, and scales, in the order that native/cache.h says. Zeros, of which a page costs
        memory once it is written."""
        self._buffers, places = self._lay_buffers(recorder, limits)
        self._turns = [
            c.Turn(self._counted(cos), self._counted(sin), 2 * cos.shape[1]) for cos, sin in angles
        ]
        ops: list[c.Op] = []
        self._meetings: list[tuple[int, dict[str, Any]]] = []
        """What Python does between two operations, each with the number of the second."""
        for op in recorder.ops:
            if op["kind"] == MEET:
                self._meetings.append((len(ops), op))
            else:
                ops.append(self._op(op, places))
        if logits is not None:
            ops.append(c.Op(kind=c.SAMPLE, source=places[logits], which=c.SAMPLED))
        self._ops = (c.Op * len(ops))(*ops)
        vocab = 0 if logits is None else logits.width
        products = [op for op in recorder.ops if op["kind"] in (c.LINEAR, c.EXPERTS)]
        widest = max(op["matrix"].k for op in products)
        operand = max((op["matrix"].k + c.OPERAND_PAD) * op["target"].choices for op in products)
        least = library.scratch_bytes(g.dim, limits.context, vocab, widest)
        scratch = _up(least, LINE)
        self._program = c.Program(
            ops=self._ops,
            num_ops=len(ops),
            buffers=self._buffers,
            shape=c.Shape(
                g.heads, g.kv_heads, g.dim, g.layers, g.block_tokens, _KV_FORMATS[g.kv_format]
            ),
            arena=self.arena.ctypes.data,
            operand=self._space(limits.tokens * operand * 4),
            scratch=self._space(scratch * threads),
            scratch_bytes=scratch,
            tiles=self._space(limits.tokens * 16),
        )
        if of_mixtures := [op["target"].choices for op in products if "mixture" in op]:
            each = (self._space(limits.tokens * max(of_mixtures) * 4) for _ in range(4))
            self._program.choices = c.Choices(*each)
        if deltas is not None:
            self._program.low = self._space(limits.tokens * deltas.most_ranks * 4)
            self._program.low_width = deltas.most_ranks
        most = library.most_tokens(ctypes.addressof(self._program))
        if not most:
            raise ValueError(f"the model has too many layers: {len(ops)} operations of a step")
        if limits.tokens > most:
            raise ValueError(
                f"max_batched_tokens must be at most {most} where keys have {g.kv_heads} heads, "
                f"is {limits.tokens}"
            )
        self._limits = limits
        self._sampled_ids = NO_INTS  # of the step launched last
        self._running: deque[Launched] = deque()
        """What may not have ended, collected or given up."""
        self._driver = Driver(library, threads, self._program, self._format)
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
        samplings: Ints,
        awaited: Ints = NO_INTS,
        edits: NDArray[np.void] = NO_EDITS,
        samples: bool = True,
        pooled_rows: Ints = NO_INTS,
        pool_starts: Ints = NO_INTS,
        adapters: Ints = NO_INTS,
    ) -> "Launched":
        """Has a step computed, after those launched before, of T tokens of S sequences, laid one
        after the other.

        token_ids, positions: [T]; starts: [S + 1], where each sequence's tokens begin;
        lengths: [S], tokens in the cache, these included; block_tables: [groups, S, width];
        rows: [R], of the tokens after which one is sampled, and how (R rows of SAMPLING, in words).
        awaited: [A, 2], places in token_ids that are not known yet, each with the row that samples
        it in the step launched before. edits: [E] of EDIT, those of all rows. samples: False, it
        stops before it does, and `sample` goes on. pooled_rows: [N], other tokens, whose states are
        summed up (`Launched.sums`); pool_starts: [P + 1], where those of each sum begin, and the
        end. adapters: [T], the place of each token's adapter, -1: none; empty: no token has one.
        All arrays are the program's until the step has ended.
        """
        limits, before = self._limits, self._sampled_ids
        tables = self._geometry.groups * len(lengths)
        table_width, uneven = divmod(len(block_tables), max(1, tables))
        pools = max(0, len(pool_starts) - 1)
        if (
            not len(token_ids) == len(positions) == starts[-1] <= limits.tokens
            or len(rows) > limits.sampled
            or len(samplings) != len(rows) * SAMPLING_WORDS
            or len(rows) + len(pooled_rows) > limits.tokens
            or (len(rows) and self._rows is None)
            or (len(pooled_rows) and not self._state_width)
            or len(pooled_rows) != (pool_starts[-1] if pools else 0)
            or len(lengths) != len(starts) - 1
            or uneven
            or max(lengths) > limits.context
            or (awaited and not _within(awaited[::2], len(token_ids)))
            or (awaited and not _within(awaited[1::2], len(before)))
            or (adapters and (self._deltas is None or len(adapters) != len(token_ids)))
        ):
            raise ValueError(f"a step beyond {limits}, or of parts that do not fit")
        sampled_ids = array("i", bytes(4 * len(rows)))
        width = max(samplings[_LOGPROBS::SAMPLING_WORDS], default=0)
        top = Top.for_rows(len(rows), width) if width else NO_TOP
        sums = np.empty((pools, self._state_width), np.float32) if pools else NO_SUMS
        step = c.Step(
            len(token_ids),
            len(lengths),
            len(rows),
            table_width,
            len(pooled_rows),
            pools,
            0,
            len(self._ops) - (not samples),
            token_ids.buffer_info()[0],
            positions.buffer_info()[0],
            starts.buffer_info()[0],
            lengths.buffer_info()[0],
            block_tables.buffer_info()[0],
            rows.buffer_info()[0],
            pooled_rows.buffer_info()[0],
            pool_starts.buffer_info()[0],
            _address_of(sums, _FLOATS) if pools else None,
            samplings.buffer_info()[0],
            None,
            None,
            _address_of(edits, EDIT) if len(edits) else None,
            _address_of(top.ids, _INTS) if width else None,
            _address_of(top.logprobs, _FLOATS) if width else None,
            width,
            sampled_ids.buffer_info()[0],
        )
        if adapters and self._deltas is not None:
            step.adapters = adapters.buffer_info()[0]
            step.ranks = self._deltas.ranks({*adapters} - {-1})
        launch = c.Launch(
            step,
            step.token_ids,
            len(awaited) // 2,
            awaited.buffer_info()[0],
            before.buffer_info()[0],
        )
        kept = (token_ids, positions, starts, lengths, block_tables, rows, samplings)
        more = (edits, awaited, before, pooled_rows, pool_starts, adapters)
        launched = Launched(launch, sampled_ids, top, sums, (kept, more))
        self._sampled_ids = sampled_ids
        return self._drive(launched)

    def sample(
        self, launched: "Launched", grammars: Ints, allowed: NDArray[np.int32]
    ) -> "Launched":
        """Has the step launched last, which stopped before it sampled, go on; what is given is to
        be collected in its place.

        grammars: [R], which row of `allowed` tells what may be sampled; -1: anything. allowed:
        [grammars, ceil(vocab / 32)], bit i % 32 of word i / 32 is set where token i may be.
        """
        assert self._rows is not None
        assert launched.sampled_ids is self._sampled_ids
        vocab, step = self._rows.width, launched.launch.step
        if (
            len(grammars) != step.sampled
            or allowed.shape[1] != -(-vocab // 32)
            or max(grammars) >= len(allowed)
        ):
            raise ValueError("grammars of other rows, or of another vocabulary")
        rest = c.Step.from_buffer_copy(step)
        rest.first, rest.end = step.end, len(self._ops)
        rest.grammars, rest.allowed = grammars.buffer_info()[0], _address_of(allowed, _INTS)
        launch = c.Launch(rest, rest.token_ids, 0, None, None)
        arrays = (launched.arrays, grammars, allowed)
        given = launched.sampled_ids, launched.top, launched.sums
        return self._drive(Launched(launch, *given, arrays))

    def _drive(self, launched: "Launched") -> "Launched":
        while self._running and self._running[0].launch.ended_ns:
            self._running.popleft()
        self._running.append(launched)
        if self._meetings:
            self._drive_in_parts(launched)
        else:
            self._driver.launch(launched.launch)
        return launched

    def _drive_in_parts(self, launched: "Launched") -> None:
        """One behind the other, with a meeting between two; returns when all are done."""
        last, began_ns = launched.launch, 0
        for place, op in self._meetings:
            if not last.step.first < place <= last.step.end:
                continue
            part = c.Launch.from_buffer_copy(last)
            part.step.end = place
            self._driver.launch(part)
            self._driver.wait(part)
            began_ns = began_ns or part.started_ns
            source, target = op["source"], op["target"]
            if count := _count(source, part.step):
                op["meet"](self._memory[source][:count], self._memory[target][:count])
            last.step.first = place
        self._driver.launch(last)
        self._driver.wait(last)
        last.started_ns = began_ns or last.started_ns

    def collect(self, launched: "Launched") -> Ints:
        """Waits for the step. Gives the sampled ids, [R]; below 0: why a row has none.
        Left by an exception of a signal's handler, it may be called again, or never."""
        self._driver.wait(launched.launch)
        if launched.launch.failed:
            raise RuntimeError(f"{self._library.instruction_set} has no format {self._format}")
        return launched.sampled_ids

    def logits(self, launched: "Launched") -> NDArray[np.float32]:
        """[R, vocab], in the step's own memory: of the step launched last, once it was collected.
        Edits, and what is not allowed, have changed them."""
        assert self._rows is not None
        assert launched.sampled_ids is self._sampled_ids
        return self._memory[self._rows][: len(launched.sampled_ids)]

    def _space(self, size: int) -> int:
        return self._counted(zeros(size, np.uint8))

    def _counted(self, workspace: NDArray[Any]) -> int:
        self.workspace_bytes += workspace.nbytes
        return self._pointer(workspace)

    def _lay_buffers(self, recorder: Recorder, limits: Limits) -> tuple[Any, dict[Rows, int]]:
        """Memory for all rows: what is used no more gives its place to the next of its size."""
        last: dict[Rows, int] = {}
        for number, op in enumerate(recorder.ops):
            for rows in _rows_of(op):
                last[rows] = number
        if self._rows is not None:
            last[self._rows] = len(recorder.ops)
        places: dict[Rows, int] = {}
        free: dict[tuple[int, int], list[int]] = {}
        sizes: list[tuple[int, int]] = []

        def size_of(rows: Rows) -> tuple[int, int]:
            most = limits.sampled if rows.which == c.SAMPLED else limits.tokens
            return rows.width, most * rows.choices

        for number, op in enumerate(recorder.ops):
            target = op["target"]
            size = size_of(target)
            if target not in places:
                if not free.get(size):
                    free[size] = [len(sizes)]
                    sizes.append(size)
                places[target] = free[size].pop()
            for rows in _rows_of(op):
                if last[rows] == number:
                    free.setdefault(size_of(rows), []).append(places[rows])
        memory = [zeros(most * width, np.float32) for width, most in sizes]
        self._memory = {
            rows: memory[place].reshape(-1, rows.width) for rows, place in places.items()
        }
        """Of a step's rows, which others have in turn."""
        buffers = [
            c.Buffer(self._counted(m), width) for m, (width, _) in zip(memory, sizes, strict=True)
        ]
        return (c.Buffer * len(buffers))(*buffers), places

    def _op(self, op: dict[str, Any], places: dict[Rows, int]) -> c.Op:
        target: Rows = op["target"]
        found = c.Op(kind=op["kind"], target=places[target], which=target.which)
        layer, found.factor = op.get("layer", 0), op.get("factor", 0)
        found.group, found.layer = self._geometry.places.get(layer, (0, layer))
        if "source" in op:
            found.source = places[op["source"]]
        if op["kind"] in (c.LINEAR, c.EXPERTS):
            found.prelude, norm, found.epsilon = op["prelude"]
            found.norm = None if norm is None else self._pointer(norm)
        found.epilogue, found.gathers = op.get("epilogue", c.PUT), op.get("gathers", False)
        if op["kind"] in (c.ADD_NORM, c.POOL):
            found.norm, found.epsilon = self._pointer(op["norm"]), op["epsilon"]
        if op["kind"] == c.ROTARY:
            found.turn, found.epsilon = self._turn(op["rope"], op["qk_norm"])
        if op["kind"] == c.ATTENTION:
            scores: Scores = op["scores"]
            found.scores = c.Scores(scores.scale, scores.cap, scores.window)
        if "matrix" in op:
            matrix: Matrix = op["matrix"]
            bias = None if matrix.bias is None else self._pointer(matrix.bias)
            weights = NARROW[matrix.held].weights if matrix.held else c.AS_ROWS
            panels = self._pointer(matrix.panels)
            rows = target.width if op["kind"] == c.EXPERTS else matrix.n
            found.matrix = c.Matrix(panels, bias, rows, matrix.k, weights)
            if self._deltas is not None and op["kind"] == c.LINEAR:
                table = self._deltas.table(matrix)
                found.deltas = None if table is None else self._address(table)
        if "mixture" in op:
            found.mixture = self._mixture(op["mixture"])
        if "shared" in op:
            found.shared, found.shared_gate = places[op["shared"]], places[op["shared_gate"]]
        return found

    def _mixture(self, mixture: Mixture[Matrix]) -> int:
        """Of a layer: all its operations' one."""
        if mixture not in self._mixtures:
            groups = self._space((2 * mixture.experts + 2) * 4)
            shared = mixture.shared is not None
            made = c.Mixture(mixture.experts, mixture.chosen, mixture.normed, shared, groups)
            self._mixtures[mixture] = self._address(made)
        return self._mixtures[mixture]

    def _turn(self, rope: int, norm: QkNorm | None) -> tuple[c.Turn, float]:
        """And the epsilon of the norm before it."""
        of = self._turns[rope]
        if norm is None:
            return of, 0.0
        widths, weights = (len(norm.q), len(norm.k)), (norm.q, norm.k)
        found = c.Turn(of.cos, of.sin, of.dims, *widths, *map(self._pointer, weights))
        return found, norm.epsilon

    def _address(self, structures: Any) -> int:
        self._keep.append(structures)
        return ctypes.addressof(structures)

    def _pointer(self, array: NDArray[Any]) -> int:
        assert array.flags.c_contiguous
        self._keep.append(array)
        return array.ctypes.data


@dataclass(slots=True, weakref_slot=True, eq=False)
class Launched:
    """A step on its way, with all memory that it reads and writes."""

    launch: c.Launch
    sampled_ids: Ints
    top: Top
    sums: NDArray[np.float32]
    """[P, width]: of the states of its pooled rows."""
    arrays: tuple[Any, ...]

    @property
    def started_ns(self) -> int:
        """When the kernels began, by `time.monotonic_ns`; 0 before."""
        found: int = self.launch.started_ns
        return found

    @property
    def ended_ns(self) -> int:
        """When they had written all, so, too; 0 before."""
        found: int = self.launch.ended_ns
        return found


_FORMATS: dict[Format, int] = {
    "float32": c.FLOATS,
    "bfloat16_weights": c.BF16_WEIGHTS,
    "bfloat16": c.BF16_CACHE,
}
_KV_FORMATS: dict[KvFormat, int] = {
    "auto": c.AS_COMPUTED,
    "int8": c.KV_INT8,
    "fp8": c.KV_FP8,
    "int4": c.KV_INT4,
}


def _rows_of(op: dict[str, Any]) -> set[Rows]:
    """That it reads or writes."""
    named = ("source", "shared", "shared_gate", "target")
    return {op[name] for name in named if name in op}


def _count(rows: Rows, step: c.Step) -> int:
    """Of a step's; none of them are of choices."""
    of = {c.ALL: step.tokens, c.SAMPLED: step.sampled, c.WANTED: step.sampled + step.pooled}
    return int(of[rows.which])


def _within(places: Ints, end: int) -> bool:
    return min(places) >= 0 and max(places) < end


def _address_of(array: NDArray[Any], dtype: np.dtype[Any]) -> int:
    """Of its first element, behind which the others lie in order (else TypeError)."""
    assert array.dtype == dtype
    return ctypes.addressof(_NOTHING.from_buffer(array.data))


NO_SUMS = np.empty((0, 0), np.float32)
_LOGPROBS = word_of("logprobs")
_INTS, _FLOATS = np.dtype(np.int32), np.dtype(np.float32)
_NOTHING = ctypes.c_char * 0


def _up(value: int, to: int) -> int:
    return -(-value // to) * to
