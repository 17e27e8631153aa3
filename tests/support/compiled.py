"""What Triton's compiler would be asked for: kernels are told apart as it does, and none runs.

Constants count by their value, tensors by their type and whether they begin at 16 bytes, numbers by
whether they are 1, multiples of 16 or others; but for what a kernel says is none of its business.
"""

import inspect
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction


@contextmanager
def compiled() -> Iterator[set[Hashable]]:
    """One entry for each kernel that is compiled, in the end."""
    found: set[Hashable] = set()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        bound = dict(zip(kernel.arg_names, args, strict=False)) | named
        as_seen = [(name, _seen(kernel, name, value)) for name, value in bound.items()]
        found.add((kernel.__name__, *as_seen))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", run)
        yield found


def _seen(kernel: Any, name: str, value: Any) -> Hashable:
    constants, no_numbers, no_places = _rules(kernel)
    if name in constants or name not in kernel.arg_names:
        return repr(value)
    if isinstance(value, Tensor):
        begins = value.storage_offset() * value.itemsize % 16 == 0
        return value.dtype, begins or name in no_places
    if isinstance(value, int) and name not in no_numbers:
        return value == 1, value % 16 == 0
    return type(value).__name__


@cache
def _rules(kernel: Any) -> tuple[set[str], set[str], set[str]]:
    parameters = inspect.signature(kernel.fn).parameters.values()
    constants = {one.name for one in parameters if one.annotation is tl.constexpr}
    rules = ("do_not_specialize", "do_not_specialize_on_alignment")
    return constants, *({*(kernel.kwargs[rule] or ())} for rule in rules)  # type: ignore[return-value]
