"""The built kernels, loaded: the best instruction set that this processor has, or a given one."""

import ctypes
import functools
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.build import FLAGS, HERE, path_of
from kernels.cpu.matrix import NARROW, Held

_ROUNDING = HERE / "matrix.py"
_NEEDS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"},
    "avx512_bf16": {
        "avx512_bf16",
        "avx512_vnni",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512dq",
        "avx2",
        "fma",
        "f16c",
    },
}
"""Of the processor's flags, as Linux names them."""


class Unavailable(Exception):
    """The processor lacks the instruction set, or the kernels are not built; says which."""


class Library:
    """The C functions of one instruction set."""

    def __init__(self, instruction_set: str) -> None:
        """Raises Unavailable."""
        self.instruction_set = instruction_set
        if instruction_set not in supported():
            raise Unavailable(f"this processor has no {instruction_set}")
        path = path_of(instruction_set)
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise Unavailable(
                f"the kernels are not built (kernels/cpu/build.py): {error}"
            ) from None
        pointer, number, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        self.start_driver = _function(
            library.penstock_driver,
            [integer, pointer, integer, integer, integer],
            pointer,
        )
        self.end_driver = _function(library.penstock_end_driver, [pointer], None)
        self.scratch_bytes = _function(library.penstock_scratch_bytes, [ctypes.c_int] * 4, number)
        self.most_tokens = _function(library.penstock_most_tokens, [pointer], number)
        self._pack = _function(
            library.penstock_pack, [pointer, pointer, number, number, ctypes.c_int], None
        )
        self._pack_narrow = _function(
            library.penstock_pack_narrow, [*[pointer] * 4, number, number, integer], None
        )

    @property
    def name(self) -> str:
        """Another one for each source, that of rounding, too: what one of them has packed is no
        other's."""
        rounding = sha256(_ROUNDING.read_bytes()).hexdigest()
        return f"{path_of(self.instruction_set).stem}-{rounding[:12]}"

    @property
    def has_dot(self) -> bool:
        """It multiplies pairs of bf16 and sums them in float: twice as fast as float alone."""
        return self.instruction_set == "avx512_bf16"

    def pack(
        self,
        held: Held,
        panels: NDArray[np.generic],
        rows: NDArray[np.generic],
        scales: NDArray[np.floating] | None = None,
        zeros: NDArray[np.uint8] | None = None,
    ) -> None:
        """A matrix by rows, [n, k], into panels (matrix.py's `elements_of`): of 2- or 4-byte
        elements, or numbers of a format of few bits, a byte each, with scales, as matrix.py's
        `quantized` and `in_e4m3` ([n]) and `grouped` ([n, k / GROUP]) give both, or of e4m3 by
        blocks, float32 [n, k / E4M3_GROUP], and zeros [n, k / GROUP]."""
        n, k = rows.shape
        to = panels.ctypes.data
        if not held:
            self._pack(rows.ctypes.data, to, n, k, rows.itemsize)
            return
        assert scales is not None
        of_groups = None if zeros is None else zeros.ctypes.data
        given = rows.ctypes.data, scales.ctypes.data, of_groups
        self._pack_narrow(*given, to, n, k, NARROW[held].weights)


def _function(function, arguments, result):  # type: ignore[no-untyped-def]
    function.argtypes, function.restype = arguments, result
    return function


def built() -> tuple[str, ...]:
    """Those of `supported` that are there."""
    return tuple(name for name in supported() if path_of(name).exists())


@functools.cache
def supported() -> tuple[str, ...]:
    """Instruction sets of this processor that kernels exist for, the best first. None of them on
    another system than Linux: the thread team sleeps on its futexes."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    return tuple(name for name in reversed(FLAGS) if _NEEDS[name] <= flags)
