"""GGUF files as llama.cpp's converter writes them, and what their types stand for: written after
ggml-common.h number by number, and not as the engine reads them."""

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Floats = NDArray[np.float32]
TYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2), "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210),
}  # fmt: skip
_HALVES = {"Q4_0": 1, "Q8_0": 1, "Q5_0": 1, "Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2, "Q6_K": 1}
_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
_EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
_EXPERTS = {
    "w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up",
    "down_proj": "down",
}  # fmt: skip
_ARCHITECTURES = {"mixtral": "llama", "qwen3_moe": "qwen3moe"}
_MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
Raw = tuple[str, tuple[int, ...], bytes]
"""A tensor's type, shape and bytes."""


def write(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Raw]) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _text(key) + _value(value)
    at = 0
    for name, (type_, shape, content) in tensors.items():
        sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += _text(name) + struct.pack("<I", len(shape)) + sizes
        head += struct.pack("<IQ", TYPES[type_][0], at)
        at += -(-len(content) // 32) * 32
    whole = _padded(head) + b"".join(_padded(content) for _, _, content in tensors.values())
    path.write_bytes(whole)
    return path


def convert(
    folder: Path, path: Path, type_of: Callable[[str], str], **metadata: Any
) -> dict[str, Floats]:
    """A checkpoint in Hugging Face form as a GGUF file; gives what its tensors stand for, by their
    names in the checkpoint. `type_of`: each matrix's, by that name."""
    config = json.loads((folder / "config.json").read_text())
    architecture, values, raw = config["model_type"], {}, {}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    architecture = _ARCHITECTURES.get(architecture, architecture)
    stacks: dict[str, dict[int, Raw]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        rows = tensor.astype(np.float32)
        turned = heads if "q_proj" in name else kv_heads if "k_proj" in name else 0
        turned = turned if architecture == "llama" else 0
        type_ = type_of(name) if rows.ndim > 1 else "F32"
        content = encode(type_, interleaved(rows, turned) if turned else rows)
        values[name] = apart(decode(type_, rows.shape, content), turned)
        if of_expert := _EXPERT.fullmatch(name):
            layer, number, which = of_expert.groups()
            stack = stacks.setdefault(f"blk.{layer}.ffn_{_EXPERTS[which]}_exps.weight", {})
            stack[int(number)] = type_, rows.shape, content
        else:
            raw[_own_name(name)] = type_, rows.shape, content
    for name, stack in stacks.items():
        every = [stack[number] for number in range(len(stack))]
        type_, shape, _ = every[0]
        raw[name] = type_, (len(every), *shape), b"".join(content for *_, content in every)
    told = {
        "general.architecture": architecture,
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": kv_heads,
        f"{architecture}.attention.key_length": config.get("head_dim"),
        f"{architecture}.attention.value_length": config.get("head_dim"),
        f"{architecture}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{architecture}.expert_count": config.get("num_experts", config.get("num_local_experts")),
        f"{architecture}.expert_used_count": config.get("num_experts_per_tok"),
        f"{architecture}.expert_feed_forward_length": config.get("moe_intermediate_size"),
        f"{architecture}.rope.freq_base": config["rope_parameters"]["rope_theta"],
        **metadata,
    }
    write(path, {key: value for key, value in told.items() if value is not None}, raw)
    return values


def vocabulary(tokenizer: Mapping[str, Any], size: int = 0) -> dict[str, Any]:
    """Of a tokenizer.json of byte-level BPE; `size`: filled up to so many."""
    ids = tokenizer["model"]["vocab"]
    special = {one["content"] for one in tokenizer["added_tokens"] if one["special"]}
    tokens = sorted(ids, key=ids.__getitem__)
    padding = [f"[PAD{id}]" for id in range(len(tokens), size)]
    types = [3 if token in special else 1 for token in tokens] + [5] * len(padding)
    told = tokenizer["model"]["merges"]
    merges = [one if isinstance(one, str) else " ".join(one) for one in told]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + padding,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
    }


def encode(type_: str, rows: Floats) -> bytes:
    """Q4_0 and Q8_0 as llama.cpp rounds them; of the others any bytes, seeded by the shape, with
    scales of the size of weights: they stand for what they stand for."""
    if type_ == "F32":
        return rows.astype("<f4").tobytes()
    if type_ == "F16":
        return rows.astype("<f2").tobytes()
    if type_ == "BF16":
        return (rows.view(np.uint32) >> 16).astype("<u2").tobytes()
    if type_ in ("Q4_0", "Q8_0"):
        return b"".join(_rounded(type_, block) for block in rows.reshape(-1, 32))
    _, weights, size = TYPES[type_]
    rng = np.random.default_rng(rows.size)
    blocks = rng.integers(0, 256, (rows.size // weights, size), np.uint8)
    at = 208 if type_ == "Q6_K" else 0
    scale = 0.2 / (128 * 32 if type_ == "Q6_K" else 63 * 15 if "K" in type_ else 16)
    halves = rng.uniform(-scale, scale, (len(blocks), _HALVES[type_])).astype("<f2")
    blocks[:, at : at + 2 * halves.shape[1]] = halves.view(np.uint8)
    return blocks.tobytes()


def decode(type_: str, shape: tuple[int, ...], content: bytes) -> Floats:
    if type_ == "F32":
        return np.frombuffer(content, "<f4").reshape(shape)
    if type_ == "F16":
        return np.frombuffer(content, "<f2").astype(np.float32).reshape(shape)
    if type_ == "BF16":
        return (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view("<f4").reshape(shape)
    size = TYPES[type_][2]
    blocks = [content[at : at + size] for at in range(0, len(content), size)]
    return np.array([_stands_for(type_, block) for block in blocks], np.float32).reshape(shape)


def interleaved(rows: Floats, heads: int) -> Floats:
    """As llama.cpp's converter permutes queries and keys of a Llama."""
    found = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(found.swapaxes(1, 2)).reshape(rows.shape)


def apart(rows: Floats, heads: int) -> Floats:
    if not heads:
        return rows
    found = rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(found.swapaxes(1, 2)).reshape(rows.shape)


def _rounded(type_: str, block: Floats) -> bytes:
    furthest = block[np.abs(block).argmax()]
    scale = np.float32(furthest / -8 if type_ == "Q4_0" else abs(furthest) / 127)
    numbers = np.rint(block / scale) if scale else np.zeros(32)
    half = np.float16(scale).tobytes()
    if type_ == "Q8_0":
        return half + numbers.astype(np.int8).tobytes()
    nibbles = (np.clip(numbers, -8, 7) + 8).astype(np.uint8)
    return half + bytes(nibbles[:16] | nibbles[16:] << 4)


def _stands_for(type_: str, block: bytes) -> list[float]:
    """ggml-quants.c's dequantize_row_..., in float32."""
    f, half = np.float32, lambda at: np.float32(np.frombuffer(block, "<f2", 1, at)[0])
    d, m = half(0), half(2)
    if type_ == "Q8_0":
        return [d * f(one) for one in np.frombuffer(block, np.int8, 32, 2)]
    if type_ in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        own = 2 * _HALVES[type_]
        fifths = int.from_bytes(block[own : own + 4], "little") if "5" in type_ else 0
        nibbles = block[-16:]
        low = [nibbles[j] & 15 | (fifths >> j & 1) << 4 for j in range(16)]
        high = [nibbles[j] >> 4 | (fifths >> j + 16 & 1) << 4 for j in range(16)]
        if type_.endswith("_1"):
            return [f(q) * d + m for q in low + high]
        return [f(q - (16 if fifths or type_ == "Q5_0" else 8)) * d for q in low + high]
    return _of_six(block) if type_ == "Q6_K" else _of_four_or_five(type_, block, d, m)


def _of_four_or_five(type_: str, block: bytes, d: Any, m: Any) -> list[float]:
    f, scales = np.float32, block[4:16]
    high = block[16:48] if type_ == "Q5_K" else bytes(32)
    low, found = block[-128:], []
    for j in range(8):
        if j < 4:
            scale, minus = scales[j] & 63, scales[j + 4] & 63
        else:
            scale = scales[j + 4] & 15 | scales[j - 4] >> 6 << 4
            minus = scales[j + 4] >> 4 | scales[j] >> 6 << 4
        for at in range(32):
            byte = low[j // 2 * 32 + at]
            q = (byte >> 4 if j % 2 else byte & 15) + (16 if high[at] >> j & 1 else 0)
            found.append(d * f(scale) * f(q) - m * f(minus))
    return found


def _of_six(block: bytes) -> list[float]:
    f, d = np.float32, np.float32(np.frombuffer(block, "<f2", 1, 208)[0])
    scales, found = np.frombuffer(block, np.int8, 16, 192), [np.float32(0)] * 256
    for half in (0, 1):
        low, high = block[64 * half :][:64], block[128 + 32 * half :][:32]
        for at in range(32):
            for part in range(4):
                byte = low[at + 32 * (part % 2)]
                nibble = byte & 15 if part < 2 else byte >> 4
                q = (nibble | (high[at] >> 2 * part & 3) << 4) - 32
                scale = scales[8 * half + at // 16 + 2 * part]
                found[128 * half + 32 * part + at] = d * f(scale) * f(q)
    return found


def _own_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _MODEL:
        return f"{_MODEL[stem]}.{kind}"
    _, _, layer, own = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[own]}.{kind}"


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, np.ndarray):
        items = {"int32": 5, "float32": 6}[value.dtype.name]
        return struct.pack("<IIQ", 9, items, len(value)) + value.tobytes()
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_text(one) for one in value)


def _text(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 32)
