"""A GGUF file's tensors by the names that the model families give them."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from services.common.checkpoints.gguf.header import (
    BLOCKS,
    Header,
    TensorAt,
    UnsupportedGguf,
    read_header,
)
from services.common.checkpoints.gguf.hub_config import ROPE_FACTORS
from services.worker.engine.formats import gguf_blocks
from services.worker.engine.formats.gguf_blocks import WIDENED, Blocks
from services.worker.engine.formats.stored import (
    Floats,
    Plain,
    Quantized,
    Shape,
    Stored,
    Widened,
    read_into,
)
from services.worker.engine.models.config import ModelConfig, UnsupportedModel

_OF_MODEL = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
}  # fmt: skip
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_EXPERTS = {
    "MixtralForCausalLM": ("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}),
    "Qwen3MoeForCausalLM": (
        "mlp",
        {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    ),
}
"""By architecture: where they lie, and what an expert's matrices are called."""
_STACKED = re.compile(r"blk\.(\d{1,5})\.ffn_(gate|up|down)_exps\.weight", re.ASCII)
_ROUTER = re.compile(r"blk\.(\d{1,5})\.ffn_gate_inp\.weight", re.ASCII)
_NAME = re.compile(r"(?:blk\.(\d{1,5})\.)?([a-z_]+)\.(weight|bias)", re.ASCII)
_TURNED = ("self_attn.q_proj", "self_attn.k_proj")
_INTEGERS: dict[str, tuple[int, Callable[[Blocks], NDArray[np.int8]]]] = {
    "Q4_0": (4, gguf_blocks.q4_0),
    "Q5_0": (5, gguf_blocks.q5_0),
    "Q8_0": (8, gguf_blocks.q8_0),
}


def tensors_of(file: BinaryIO, header: Header, config: ModelConfig) -> dict[str, Stored]:
    """By name; names that are not known stay as they are. llama.cpp turns neighbouring numbers of a
    head of a Llama, and has its rows of queries and keys in that order."""
    turns = header.metadata.get("general.architecture") == "llama"
    found: dict[str, Stored] = {}
    for own, at in header.tensors.items():
        if own == ROPE_FACTORS:  # part of the configuration
            continue
        if (parts := _STACKED.fullmatch(own)) and _are_experts(at, config):
            found |= _experts(file, at, config, *parts.groups())
            continue
        name = _name(own, config)
        if name in found:
            raise UnsupportedModel(f"{header.path}: tensor {name} is there twice, once as {own}")
        turned = config.head_dim if turns and any(f".{one}." in name for one in _TURNED) else 0
        found[name] = _tensor(file, at, turned)
    return found


def header_of(path: Any) -> Header:
    """Raises UnsupportedModel."""
    try:
        return read_header(path)
    except (UnsupportedGguf, OSError) as error:
        raise UnsupportedModel(str(error)) from error


def _are_experts(at: TensorAt, config: ModelConfig) -> bool:
    told = config.experts
    return told is not None and len(at.shape) == 3 and at.shape[0] == told.count


def _experts(
    file: BinaryIO, at: TensorAt, config: ModelConfig, layer: str, which: str
) -> dict[str, Stored]:
    """Of [experts, n, k] each [n, k]."""
    place, names = _OF_EXPERTS[config.architecture]
    before = f"model.layers.{int(layer)}.{place}.experts"
    each = at.bytes // at.shape[0]
    one = partial(TensorAt, at.type, at.shape[1:])
    return {
        f"{before}.{number}.{names[which]}.weight": _tensor(file, one(at.offset + number * each), 0)
        for number in range(at.shape[0])
    }


def _name(own: str, config: ModelConfig) -> str:
    if (of_router := _ROUTER.fullmatch(own)) and config.experts:
        return f"model.layers.{int(of_router[1])}.{_OF_EXPERTS[config.architecture][0]}.gate.weight"
    parts = _NAME.fullmatch(own)
    if parts is None:
        return own
    layer, name, kind = parts.groups()
    known = (_OF_LAYER if layer else _OF_MODEL).get(name)
    if known is None:
        return own
    return f"model.layers.{int(layer)}.{known}.{kind}" if layer else f"{known}.{kind}"


def _tensor(file: BinaryIO, at: TensorAt, head_dim: int) -> Stored:
    if at.type in ("F32", "F16", "BF16"):
        plain = Plain(file, at.offset, at.shape, at.type)
        return _Turned(plain, head_dim) if head_dim else plain
    read = _Read(file, at, head_dim)
    if at.type in WIDENED:
        return Widened(at.type, read.shape, partial(read.through, WIDENED[at.type]))
    bits, integers = _INTEGERS[at.type]
    return Quantized(
        at.type,
        read.shape,
        bits,
        partial(read.through, integers),
        partial(read.through, gguf_blocks.scales),
        groups=read.shape[1] // 32,
    )


@dataclass(frozen=True, slots=True)
class _Read:
    """Rows of blocks."""

    file: BinaryIO
    at: TensorAt
    head_dim: int
    """Above 0: rows of a head are in the other order."""

    @property
    def shape(self) -> Shape:
        """A vector is one row."""
        return self.at.shape if len(self.at.shape) > 1 else (1, *self.at.shape)

    def through(self, taken: Callable[[Blocks], Any], first: int, last: int) -> Any:
        _, weights, size = BLOCKS[self.at.type]
        of_row = self.shape[-1] // weights

        def blocks(first: int, last: int) -> Blocks:
            found = np.empty((last - first, of_row, size), np.uint8)
            read_into(self.file, found, self.at.offset + first * of_row * size)
            return found

        return taken(turned_back(blocks, self.head_dim, first, last))


@dataclass(frozen=True, slots=True)
class _Turned(Stored):
    plain: Plain
    head_dim: int

    @property
    def kind(self) -> str:  # type: ignore[override]
        return self.plain.kind

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        return self.plain.shape

    @property
    def fits_bfloat16(self) -> bool:
        return self.plain.fits_bfloat16

    def float32(self, first: int = 0, last: int | None = None) -> Floats:
        first, last, _ = slice(first, last).indices(self.shape[0])
        return turned_back(self.plain.float32, self.head_dim, first, last)


def turned_back(
    rows: Callable[[int, int], NDArray[Any]], head_dim: int, first: int, last: int
) -> NDArray[Any]:
    """Rows [first, last) of a matrix whose heads' halves were interleaved; 0: were not."""
    if not head_dim or first == last:
        return rows(first, last)
    begin, end = first // head_dim * head_dim, -(-last // head_dim) * head_dim
    heads = rows(begin, end)
    apart = heads.reshape(-1, head_dim // 2, 2, *heads.shape[1:]).swapaxes(1, 2)
    return apart.reshape(heads.shape)[first - begin : last - begin]
