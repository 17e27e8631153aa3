"""A checkpoint's tensors in the order that the C++ kernels read: packed once on a host, into a file
that its processes share, or in memory where that cannot be."""

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.library import Library
from kernels.cpu.matrix import PANEL, Matrix, elements_of, grouped, quantized
from kernels.cpu.memory import HUGE, LINE, huge_bytes, zeros
from kernels.cpu.program import Format
from services.worker.engine import packed_file
from services.worker.engine.checkpoint import Checkpoint, Floats, Stored, open_checkpoint
from services.worker.engine.model_config import ModelConfig
from services.worker.engine.models.registry import build_model
from services.worker.engine.runner import Dtype

log = logging.getLogger(__name__)

_HEADS = {"lm_head", "score"}
_Rounded = Callable[[Floats], tuple[NDArray[np.generic], NDArray[np.floating]]]
_ROUNDED: dict[str, _Rounded] = {"int8": quantized, "uint8": grouped}
"""By what panels are of."""
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
    dtype: str
    """Of numpy."""
    plus: float
    """What is added to a vector."""

    @property
    def end(self) -> int:
        elements = elements_of(self.n, self.k, self.dtype) if self.in_panels else self.n
        return self.offset + elements * np.dtype(self.dtype).itemsize


class _Layout:
    """Where each tensor lies, in the order in which the model asks for them; tied ones lie once. As
    `Weights`."""

    def __init__(self, number_format: Format, quantization: str) -> None:
        of_rows = "float32" if number_format == "float32" else "uint16"
        self._matrices = {"int8": "int8", "int4": "uint8"}.get(quantization, of_rows)
        self._tables = "int8" if quantization == "int4" else self._matrices
        """Of embeddings and heads."""
        self.parts: dict[tuple[str, ...], _Part] = {}
        self.end = 0

    def table(self, name: str, rows: int, width: int) -> None:
        self._add((f"{name}.weight",), rows, width, self._tables)

    def vector(self, name: str, size: int, plus: float = 0.0) -> None:
        self._add((f"{name}.weight",), size, 1, plus=plus)

    def matrix(self, layers: Mapping[str, int], width: int, bias: bool = False) -> None:
        rows = sum(layers.values())
        dtype = self._tables if _HEADS & layers.keys() else self._matrices
        self._add(tuple(f"{name}.weight" for name in layers), rows, width, dtype)
        if bias:
            self._add(tuple(f"{name}.bias" for name in layers), rows, 1)

    def _add(
        self, names: tuple[str, ...], n: int, k: int, panels: str = "", plus: float = 0.0
    ) -> None:
        """`panels`: of what, if it is a matrix."""
        if names in self.parts:
            return
        part = _Part(self.end, names, n, k, bool(panels), panels or "float32", plus)
        self.parts[names] = part
        self.end = -(-part.end // LINE) * LINE


class CpuWeights:
    """As `Weights`."""

    def __init__(
        self,
        library: Library,
        directory: str,
        model: ModelConfig,
        dtype: Dtype,
        packed_dir: str | None,
        threads: int,
        quantization: str = "auto",
    ) -> None:
        """`dtype`: in which is computed. Matrices stored in bfloat16 stay so in any case, but for
        `quantization`, see EngineConfig. `threads`: that pack. Raises UnsupportedModel."""
        with open_checkpoint(directory, model) as checkpoint:
            tensors = checkpoint.tensors
            self.num_parameters = sum(stored.size for stored in tensors.values())
            self.format: Format = _format(dtype, tensors)
            layout = _Layout(self.format, quantization)
            build_model(model, layout)
            packer = _Packer(library, checkpoint, layout, threads)
            about = f"{checkpoint.fingerprint} {library.name} {list(layout.parts.values())}"
            key = sha256(about.encode()).hexdigest()
            self._parts = layout.parts
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
        part = self._parts[names]
        return Matrix(
            self._view(names),
            part.n,
            part.k,
            self._floats(tuple(f"{name}.bias" for name in layers)) if bias else None,
        )

    def _floats(self, names: tuple[str, ...]) -> Floats:
        return self._view(names).view(np.float32)

    def _view(self, names: tuple[str, ...]) -> NDArray[np.generic]:
        part = self._parts[names]
        return self._memory[part.offset : part.end].view(part.dtype)


def _format(dtype: Dtype, tensors: Mapping[str, Stored]) -> Format:
    if dtype == "bfloat16":
        return "bfloat16"
    matrices = [stored for stored in tensors.values() if len(stored.shape) > 1]
    narrow = all(stored.dtype == "BF16" for stored in matrices)
    return "bfloat16_weights" if narrow else "float32"


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


class _Packer:
    """Packs in threads, piece by piece."""

    def __init__(
        self, library: Library, checkpoint: Checkpoint, layout: _Layout, threads: int
    ) -> None:
        self._library, self._checkpoint, self._layout = library, checkpoint, layout
        self._threads = threads

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
            vectors = [self._checkpoint.tensors[name].float32() for name in part.names]
            whole = np.concatenate(vectors) + np.float32(part.plus)
            return part.offset, whole.view(np.uint8)
        panel = elements_of(PANEL, part.k, part.dtype)
        size = panel * np.dtype(part.dtype).itemsize
        begin, end = (first - part.offset) // size, -(-(last - part.offset) // size)
        content = np.empty((end - begin, panel), part.dtype)
        strip = max(1, _STRIP // (PANEL * part.k))
        for at in range(begin, end, strip):
            panels = content[at - begin : at - begin + strip]
            rows = self._rows(part, at * PANEL, min(part.n, (at + len(panels)) * PANEL))
            if part.dtype in _ROUNDED:
                rounded, scales = _ROUNDED[part.dtype](rows.view(np.float32))
                self._library.pack(rounded, panels, scales)
            else:
                self._library.pack(rows, panels)
        return part.offset + begin * size, content.reshape(-1).view(np.uint8)

    def _rows(self, part: _Part, first: int, last: int) -> NDArray[np.generic]:
        """Rows [first, last) of the part's tensors, one below the other."""
        found, above = [], 0
        for name in part.names:
            stored = self._checkpoint.tensors[name]
            own = max(0, first - above), min(stored.shape[0], last - above)
            if own[0] < own[1]:
                exact = stored.float32 if part.dtype != "uint16" else stored.bfloat16
                found.append(exact(*own))
            above += stored.shape[0]
        return np.concatenate(found) if len(found) > 1 else found[0]
