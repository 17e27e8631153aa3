"""A checkpoint's tensors in the order that the C++ kernels read: packed once on a host, into a file
that its processes share, or in memory where that cannot be."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.library import Library
from kernels.cpu.matrix import PANEL, Held, Matrix, elements_of
from kernels.cpu.memory import HUGE, LINE, huge_bytes, zeros
from kernels.cpu.program import Format
from services.common.checkpoints.gguf import header
from services.worker.engine.formats import SOURCES
from services.worker.engine.formats.choice import Choice, narrow_rows, spans, told
from services.worker.engine.formats.stored import Floats, Stored
from services.worker.engine.models.registry import build_model
from services.worker.engine.parallel import part as part_module
from services.worker.engine.parallel import shard as shard_module
from services.worker.engine.parallel.shard import Shard
from services.worker.engine.sizes import Dtype
from services.worker.engine.weights import packed_file
from services.worker.engine.weights.checkpoint import Checkpoint, open_checkpoint

log = logging.getLogger(__name__)

_SOURCES = sha256(
    SOURCES.encode()
    + b"".join(
        Path(str(module)).read_bytes()
        for module in (part_module.__file__, shard_module.__file__, header.__file__, __file__)
    )
).hexdigest()[:12]
"""Likewise, of all that decides what a packed file has."""
_PIECE = 4 * HUGE
"""Bytes that a thread packs at a time. Written in whole huge pages, they lie in such in the page
cache."""
_STRIP = 2**18
"""Weights that are rounded at a time: on the way each takes some twenty bytes, in every thread."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Tensors that lie at `offset` as one: rows of a matrix in panels, or a vector of float32."""

    offset: int
    names: tuple[str, ...]
    n: int
    k: int
    in_panels: bool
    held: Held
    """What its matrix is in; "": as rows are."""
    dtype: str
    """Of numpy; of few bits it is bytes."""
    plus: float
    """What is added to a vector."""

    @property
    def end(self) -> int:
        elements = elements_of(self.n, self.k, self.held) if self.in_panels else self.n
        return self.offset + elements * np.dtype(self.dtype).itemsize


class _Layout:
    """Where each tensor lies, in the order in which the model asks for them; tied ones lie once. As
    `Weights`."""

    def __init__(
        self, number_format: Format, quantization: str, tensors: Mapping[str, Stored]
    ) -> None:
        self._of_rows = "float32" if number_format == "float32" else "uint16"
        self._choice = Choice(quantization)
        self._tensors = tensors
        self.parts: dict[tuple[str, ...], _Part] = {}
        self.end = 0

    def table(self, name: str, rows: int, width: int) -> None:
        stored = self._tensors[f"{name}.weight"]
        held = self._choice.of_table(stored)
        self._add_matrix((f"{name}.weight",), stored.shape[0], width, held)

    def vector(self, name: str, size: int, plus: float = 0.0) -> None:
        self._add_vector((f"{name}.weight",), size, plus)

    def matrix(self, layers: Mapping[str, int], width: int, bias: bool = False) -> None:
        names = tuple(f"{name}.weight" for name in layers)
        parts = [self._tensors[name] for name in names]
        rows = sum(stored.shape[0] for stored in parts)
        self._add_matrix(names, rows, width, self._choice.of_matrix(layers, parts))
        biases = tuple(f"{name}.bias" for name in layers)
        if bias and self._tensors.keys() >= {*biases}:
            self._add_vector(biases, rows)

    def _add_matrix(self, names: tuple[str, ...], n: int, k: int, held: Held) -> None:
        dtype = "uint8" if held else self._of_rows
        self._add(_Part(self.end, names, n, k, True, held, dtype, 0.0))

    def _add_vector(self, names: tuple[str, ...], size: int, plus: float = 0.0) -> None:
        self._add(_Part(self.end, names, size, 1, False, "", "float32", plus))

    def _add(self, part: _Part) -> None:
        if part.names not in self.parts:
            self.parts[part.names] = part
            self.end = -(-part.end // LINE) * LINE


class CpuWeights:
    """As `Weights`."""

    def __init__(
        self,
        library: Library,
        directory: str,
        shard: Shard,
        dtype: Dtype,
        packed_dir: str | None,
        threads: int,
        quantization: str = "auto",
    ) -> None:
        """`dtype`: in which is computed. Matrices stored in bfloat16 stay so in any case, but for
        `quantization`, see EngineConfig. `threads`: that pack. Raises UnsupportedModel."""
        with open_checkpoint(directory, shard.model) as checkpoint:
            tensors = shard.parts(checkpoint.tensors)
            self.num_parameters = sum(stored.size for stored in tensors.values())
            self.format: Format = _format(dtype, tensors)
            layout = _Layout(self.format, quantization, tensors)
            build_model(shard.config, layout)
            for words in told(_taken(layout, tensors)):
                log.warning("%s: %s", directory, words)
            packer = _Packer(library, checkpoint, tensors, layout, threads)
            about = (
                f"{checkpoint.fingerprint} {library.name} {_SOURCES} {list(layout.parts.values())} "
                f"{shard.model.scheme} rank {shard.rank} of {shard.ranks}"
            )
            key = sha256(about.encode()).hexdigest()
            self._parts = layout.parts
            self.linears: dict[Matrix, dict[str, int]] = {}
            """Output sizes of a matrix's layers, by name: of all that the model asked for."""
            self._memory, self.place = _take(packer, key, layout.end, packed_dir)

    @property
    def bytes(self) -> int:
        return len(self._memory)

    @property
    def huge_bytes(self) -> int:
        """Of them, those in huge pages."""
        return huge_bytes(self._memory)

    def table(self, name: str, rows: int, width: int) -> Matrix:
        return self.matrix({name: rows}, width)

    def vector(self, name: str, size: int, plus: float = 0.0) -> Floats:
        return self._floats((f"{name}.weight",))

    def matrix(self, layers: Mapping[str, int], width: int, bias: bool = False) -> Matrix:
        names = tuple(f"{name}.weight" for name in layers)
        biases = tuple(f"{name}.bias" for name in layers)
        part = self._parts[names]
        found = Matrix(
            self._view(names),
            part.n,
            part.k,
            self._floats(biases) if bias and biases in self._parts else None,
            part.held,
        )
        self.linears[found] = dict(layers)
        return found

    def _floats(self, names: tuple[str, ...]) -> Floats:
        return self._view(names).view(np.float32)

    def _view(self, names: tuple[str, ...]) -> NDArray[np.generic]:
        part = self._parts[names]
        return self._memory[part.offset : part.end].view(part.dtype)


def _format(dtype: Dtype, tensors: Mapping[str, Stored]) -> Format:
    if dtype == "bfloat16":
        return "bfloat16"
    matrices = [stored for stored in tensors.values() if len(stored.shape) > 1]
    narrow = all(stored.fits_bfloat16 for stored in matrices)
    return "bfloat16_weights" if narrow else "float32"


def _taken(layout: "_Layout", tensors: Mapping[str, Stored]) -> Iterator[tuple[Stored, str]]:
    """See `choice.told`."""
    for part in layout.parts.values():
        wide = "float32" if part.dtype == "float32" else "bfloat16"
        for name in part.names if part.in_panels else ():
            yield tensors[name], part.held or wide


def _take(
    packer: "_Packer", key: str, size: int, folder: str | None
) -> tuple[NDArray[np.uint8], str]:
    """The packed weights, and where they lie."""
    if folder is not None:
        try:
            path, memory = packed_file.mapped(Path(folder), key, size, packer.write)
            return memory, str(path)
        except OSError as error:
            log.warning(
                "packed weights cannot be kept for all processes of this host, so this one packs "
                "its own in memory: %s",
                error,
            )
    memory = zeros(size, np.uint8)
    packer.fill(memory)
    return memory, "memory"


def _stacked(rows: tuple[NDArray[Any], ...]) -> NDArray[Any]:
    """One row behind the other, as some layouts' are not."""
    return np.ascontiguousarray(np.concatenate(rows))


class _Packer:
    """Packs in threads, piece by piece."""

    def __init__(
        self,
        library: Library,
        checkpoint: Checkpoint,
        tensors: Mapping[str, Stored],
        layout: _Layout,
        threads: int,
    ) -> None:
        self._library, self._checkpoint, self._layout = library, checkpoint, layout
        self._tensors, self._threads = tensors, threads

    def fill(self, memory: NDArray[np.uint8]) -> None:
        self._each(lambda start, stop: self._pack(start, memory[start:stop]))

    def write(self, file: int) -> None:
        """Raises OSError."""

        def piece(start: int, stop: int) -> None:
            content = np.zeros(stop - start, np.uint8)
            self._pack(start, content)
            rest = content.data
            while rest:
                count = os.pwrite(file, rest, stop - len(rest))
                rest = rest[count:]

        self._each(piece)

    def _each(self, work: Callable[[int, int], None]) -> None:
        end = self._layout.end
        with ThreadPoolExecutor(self._threads) as pool:
            jobs = [
                pool.submit(work, start, min(end, start + _PIECE))
                for start in range(0, end, _PIECE)
            ]
            try:
                for job in jobs:
                    job.result()
            finally:
                pool.shutdown(cancel_futures=True)
        self._checkpoint.check_unchanged()

    def _pack(self, start: int, piece: NDArray[np.uint8]) -> None:
        """The bytes from `start` on: of a panel that begins before it or ends after, what is in."""
        stop = start + len(piece)
        for part in self._layout.parts.values():
            first, last = max(start, part.offset), min(stop, part.end)
            if first >= last:
                continue
            at, content = self._content(part, first, last)
            piece[first - start : last - start] = content[first - at : last - at]

    def _content(self, part: _Part, first: int, last: int) -> tuple[int, NDArray[np.uint8]]:
        """Bytes of a part that contain [first, last), and where they begin."""
        if not part.in_panels:
            vectors = [self._tensors[name].float32() for name in part.names]
            whole = np.concatenate(vectors) + np.float32(part.plus)
            return part.offset, whole.view(np.uint8)
        panel = elements_of(PANEL, part.k, part.held)
        size = panel * np.dtype(part.dtype).itemsize
        begin, end = (first - part.offset) // size, -(-(last - part.offset) // size)
        content = np.empty((end - begin, panel), part.dtype)
        strip = max(1, _STRIP // (PANEL * part.k))
        for at in range(begin, end, strip):
            panels = content[at - begin : at - begin + strip]
            found = self._rows(part, at * PANEL, min(part.n, (at + len(panels)) * PANEL))
            self._library.pack(part.held, panels, *map(_stacked, zip(*found, strict=True)))
        return part.offset + begin * size, content.reshape(-1).view(np.uint8)

    def _rows(self, part: _Part, first: int, last: int) -> Iterator[tuple[NDArray[Any], ...]]:
        """Rows [first, last) of the part's tensors, one below the other, and their scales if they
        have some."""
        for stored, *own in spans((self._tensors[name] for name in part.names), first, last):
            if part.held:
                yield narrow_rows(stored, part.held, *own)
            else:
                yield ((stored.bfloat16 if part.dtype == "uint16" else stored.float32)(*own),)
