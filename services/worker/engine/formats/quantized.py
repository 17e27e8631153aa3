"""Matrices of Hugging Face checkpoints that are quantized: what lies there of each is put together.

What a tensor is, its own shape and those beside it say: bits, groups, zeros and their order are
never taken from config.json, which may claim what is not so.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.worker.engine.formats.fp8 import Fp8
from services.worker.engine.formats.packed import columns, unpacked
from services.worker.engine.formats.scheme import Scheme
from services.worker.engine.formats.stored import Plain, Quantized, Rows, Shape, Stored
from services.worker.engine.formats.stored import widened as widened_bits
from services.worker.engine.models.config import UnsupportedModel

_ACTIVATIONS = (
    "input_scale", "input_zero_point", "output_scale", "output_zero_point", "q_scale", "k_scale",
    "v_scale",
)  # fmt: skip
"""Of rows and of the cache, which are not rounded here."""
_OF_FLOATS = ("F32", "F16", "BF16")
_AWQ = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Where each of eight columns lies in its word."""


def put_together(
    folder: Path, found: Mapping[str, Stored], wanted: Mapping[str, Shape], scheme: Scheme
) -> dict[str, Stored]:
    """The tensors found, those of a quantized matrix as one under the matrix's name. Raises
    UnsupportedModel."""
    left = dict(found)
    made: dict[str, Stored] = {}
    for name, shape in wanted.items():
        if len(shape) == 2:
            layer = _Layer(folder, name.removesuffix(".weight"), shape, left)
            if (matrix := _matrix(layer, scheme)) is not None:
                if name in left:
                    raise layer.refusal("weight", "is there beside what it is made of")
                made[name] = matrix
    for name in list(left):
        unknown = name not in wanted and name not in made
        if name.rsplit(".", 1)[-1] in _ACTIVATIONS or (unknown and _is_zero_bias(name, left[name])):
            del left[name]
    return left | made


def _is_zero_bias(name: str, stored: Stored) -> bool:
    """Some writers give every linear layer one."""
    floats = isinstance(stored, Plain) and stored.dtype in _OF_FLOATS
    vector = len(stored.shape) == 1
    return name.endswith(".bias") and floats and vector and not stored.float32().any()


class _Layer:
    """A linear layer's tensors, which are taken out of all that are left."""

    def __init__(self, folder: Path, name: str, shape: Shape, left: dict[str, Stored]) -> None:
        self._folder, self.name, self.shape, self._left = folder, name, shape, left

    def __contains__(self, part: str) -> bool:
        return f"{self.name}.{part}" in self._left

    def type_of(self, part: str) -> str:
        """ "" where there is none."""
        found = self._left.get(f"{self.name}.{part}")
        return found.dtype if isinstance(found, Plain) else ""

    def take(self, part: str, types: tuple[str, ...], *shapes: Shape) -> Plain:
        """Of the given types, and of one of the shapes, in which -1 is any above 0."""
        found = self._left.pop(f"{self.name}.{part}", None)
        if not isinstance(found, Plain):
            raise self.refusal(part, "is missing")
        if found.dtype not in types:
            raise self.refusal(part, f"is {found.dtype}, not {' or '.join(types)}")
        if not any(_fits(found.shape, shape) for shape in shapes):
            told = " or ".join(str(list(shape)).replace("-1", "any") for shape in shapes)
            raise self.refusal(part, f"is {list(found.shape)}, config.json makes it {told}")
        return found

    def refusal(self, part: str, words: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._folder}: tensor {self.name}.{part} {words}")


def _fits(shape: Shape, wanted: Shape) -> bool:
    return len(shape) == len(wanted) and all(
        a == b or (b == -1 and a > 0) for a, b in zip(shape, wanted, strict=True)
    )


def _matrix(layer: _Layer, scheme: Scheme) -> Stored | None:
    """None where the matrix is not quantized."""
    if "qweight" in layer:
        if scheme.method == "gptq":
            return _gptq(layer, scheme.zeros_less)
        return _awq(layer) if scheme.method == "awq" else None
    if "weight_packed" in layer:
        return _packed(layer)
    if layer.type_of("weight") == "I8":
        return _integers(layer, scheme.rounds_rows)
    if layer.type_of("weight") == "F8_E4M3":
        return _fp8(layer, scheme)
    return None


def _packed(layer: _Layer) -> Quantized:
    """compressed-tensors' pack-quantized: numbers of a row in words, lowest bits first."""
    n, k = layer.shape
    packed = layer.take("weight_packed", ("I32",), (n, -(-k // 8)), (n, -(-k // 4)))
    bits = 4 if packed.shape[1] == -(-k // 8) else 8
    if "weight_shape" in layer:
        told = layer.take("weight_shape", ("I64", "I32"), (2,)).values().tolist()
        if told != [n, k]:
            raise layer.refusal("weight_shape", f"says {told}, config.json makes it {[n, k]}")
    half = 1 << bits - 1

    def integers(first: int, last: int) -> NDArray[Any]:
        return unpacked(packed.values(first, last), bits)[:, :k] - half

    scales, groups = _scales(layer)
    zeros = None
    if "weight_zero_point" in layer:
        per = 32 // bits
        words = layer.take("weight_zero_point", ("I32",), (-(-n // per), groups))

        def zeros(first: int, last: int) -> NDArray[Any]:
            found = unpacked(words.values(first // per, -(-last // per)).T, bits).T
            return found[first % per :][: last - first] - half

    return _of_groups(layer, f"int{bits}", bits, integers, scales, groups, zeros, "weight_g_idx")


def _integers(layer: _Layer, rounds_rows: bool) -> Quantized:
    """Its int-quantized and naive-quantized: a byte each."""
    weight = layer.take("weight", ("I8",), layer.shape)
    scales, groups = _scales(layer)
    zeros = None
    if "weight_zero_point" in layer:
        told = layer.take("weight_zero_point", ("I8",), (layer.shape[0], groups), (1,))
        zeros = _by_row(told)
    found = _of_groups(layer, "int8", 8, weight.values, scales, groups, zeros, "weight_g_idx")
    return replace(found, rounds_rows=rounds_rows)


def _gptq(layer: _Layer, zeros_less: int) -> Quantized:
    """[k, n], numbers of a column in words."""
    n, k = layer.shape
    weight = layer.take("qweight", ("I32",), (-(-k // 8), n), (-(-k // 4), n))
    bits = 4 if weight.shape[0] == -(-k // 8) else 8
    half, per = 1 << bits - 1, 32 // bits
    scale = layer.take("scales", _OF_FLOATS, (-1, n))
    groups = scale.shape[0]
    words = layer.take("qzeros", ("I32",), (groups, -(-n // per)))

    def integers(first: int, last: int) -> NDArray[Any]:
        return unpacked(columns(weight, first, last).T, bits)[:, :k] - half

    def zeros(first: int, last: int) -> NDArray[Any]:
        found = unpacked(columns(words, first // per, -(-last // per)), bits).T
        return found[first % per :][: last - first] + zeros_less - half

    kind = f"GPTQ's int{bits}"
    return _of_groups(layer, kind, bits, integers, _by_column(scale), groups, zeros, "g_idx")


def _awq(layer: _Layer) -> Quantized:
    """[k, n], numbers of a row in words."""
    n, k = layer.shape
    weight = layer.take("qweight", ("I32",), (k, -(-n // 8)))
    scale = layer.take("scales", _OF_FLOATS, (-1, n))
    groups = scale.shape[0]
    words = layer.take("qzeros", ("I32",), (groups, -(-n // 8)))

    def of(tensor: Plain) -> Rows:
        def rows(first: int, last: int) -> NDArray[Any]:
            found = unpacked(columns(tensor, first // 8, -(-last // 8)), 4)
            in_order = found.reshape(len(found), -1, 8)[:, :, _AWQ].reshape(len(found), -1)
            return in_order.T[first % 8 :][: last - first] - 8

        return rows

    return _of_groups(layer, "AWQ's int4", 4, of(weight), _by_column(scale), groups, of(words))


def _fp8(layer: _Layer, scheme: Scheme) -> Fp8:
    n, k = layer.shape
    weight = layer.take("weight", ("F8_E4M3",), (n, k))
    part = "weight_scale_inv" if "weight_scale_inv" in layer else "weight_scale"
    shapes: list[Shape] = [(), (1,), (n,), (n, 1)]
    rows, width = scheme.blocks or (n, k)
    width = min(width, k)  # each scale is told so often
    if scheme.blocks:
        shapes.append((-(-n // rows), -(-k // width)))
    scale = layer.take(part, _OF_FLOATS, *shapes)
    whole = _whole(scale)
    if len(scale.shape) < 2 or scale.shape == (n, 1):
        whole, width = whole.reshape(-1, 1), k
        rows = n if whole.size == 1 else 1

    def scales(first: int, last: int) -> NDArray[Any]:
        return whole[np.arange(first, last) // rows].astype(np.float32)

    return Fp8(layer.shape, weight.values, scales, width)


def _of_groups(
    layer: _Layer,
    kind: str,
    bits: int,
    integers: Rows,
    scales: Rows,
    groups: int,
    zeros: Rows | None,
    order: str = "",
) -> Quantized:
    n, k = layer.shape
    of_columns = None
    if order and order in layer:
        of_columns = layer.take(order, ("I32",), (k,)).values().astype(np.intp)
        if (of_columns == -1).all():  # there is room for an order, and none
            of_columns = None
        elif of_columns.min() < 0 or of_columns.max() >= groups:
            raise layer.refusal(order, f"names groups that are none of its {groups}")
    in_turn = np.arange(k) // (k // groups) if groups <= k and not k % groups else None
    if of_columns is None and in_turn is None:
        raise layer.refusal("weight", f"has {groups} groups, which do not divide {k} columns")
    if of_columns is not None and in_turn is not None and (of_columns == in_turn).all():
        of_columns = None
    if zeros is not None and _nothing(zeros, n):
        zeros = None
    return Quantized(kind, layer.shape, bits, integers, scales, zeros, groups, of_columns)


def _nothing(rows: Rows, n: int) -> bool:
    return not any(rows(first, min(first + 1024, n)).any() for first in range(0, n, 1024))


def _scales(layer: _Layer) -> tuple[Rows, int]:
    """And of how many groups of a row."""
    n = layer.shape[0]
    scale = layer.take("weight_scale", _OF_FLOATS, (n, -1), (n,), (1,), ())
    return _by_row(scale), scale.shape[1] if len(scale.shape) == 2 else 1


def _by_row(tensor: Plain) -> Rows:
    """[rows, groups] of a tensor [n, groups], [n], or of one number for all."""
    if len(tensor.shape) == 2:
        return lambda first, last: _floats(tensor, tensor.values(first, last))
    whole = _whole(tensor).reshape(-1, 1)
    if len(whole) == 1:
        return lambda first, last: np.repeat(whole, last - first, axis=0)
    return lambda first, last: whole[first:last]


def _by_column(tensor: Plain) -> Rows:
    return lambda first, last: _floats(tensor, columns(tensor, first, last).T)


def _floats(tensor: Plain, values: NDArray[Any]) -> NDArray[Any]:
    return widened_bits(values) if tensor.dtype == "BF16" else values


def _whole(tensor: Plain) -> NDArray[Any]:
    """A number, too, as a list of one."""
    listed = tensor if tensor.shape else Plain(tensor.file, tensor.offset, (1,), tensor.dtype)
    return _floats(listed, listed.values())
