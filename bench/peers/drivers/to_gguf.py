"""A Llama checkpoint as a GGUF file, by llama.cpp's Python:

    to_gguf CHECKPOINT FILE bf16|f16|q8_0|q4_0


llama.cpp's own converter refuses a tokenizer that it does not know by its hash, as ours.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LINEARS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
KINDS = {
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}


class Checkpoint:
    """A safetensors file of bf16 tensors, as the 16 bits of each number."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._index = json.loads(file.read(length))
        self._bytes = np.memmap(path, np.uint8, "r", 8 + length)

    def bits(self, name: str) -> np.ndarray:
        entry = self._index[name]
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        first, end = entry["data_offsets"]
        return self._bytes[first:end].view(np.uint16).reshape(entry["shape"])

    def floats(self, name: str) -> np.ndarray:
        return (self.bits(name).astype(np.uint32) << 16).view(np.float32)


def main(folder: Path, path: Path, kind: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    checkpoint = Checkpoint(folder / "model.safetensors")
    tensor_type, file_type = KINDS[kind]
    out = gguf.GGUFWriter(path, "llama")
    out.add_file_type(file_type)
    out.add_vocab_size(config["vocab_size"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_rope_dimension_count(config["head_dim"])
    out.add_rope_freq_base(config["rope_theta"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    add_tokenizer(out, json.loads((folder / "tokenizer.json").read_text()))

    def add_matrix(name: str, source: str, heads: int = 0) -> None:
        bits = checkpoint.bits(source)
        if heads:
            bits = halves_interleaved(bits, heads)
        if kind == "bf16":
            rows = np.ascontiguousarray(bits).view(np.uint8)
        else:
            wide = (bits.astype(np.uint32) << 16).view(np.float32)
            rows = gguf.quants.quantize(wide, tensor_type)
        out.add_tensor(name, rows, raw_dtype=tensor_type)

    add_matrix("token_embd.weight", "model.embed_tokens.weight")
    for layer in range(config["num_hidden_layers"]):
        for source, name in LINEARS.items():
            heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name)
            add_matrix(
                f"blk.{layer}.{name}.weight",
                f"model.layers.{layer}.{source}.weight",
                config[heads] if heads else 0,
            )
        for source, name in NORMS.items():
            norm = checkpoint.floats(f"model.layers.{layer}.{source}.weight")
            out.add_tensor(f"blk.{layer}.{name}.weight", norm)
    out.add_tensor("output_norm.weight", checkpoint.floats("model.norm.weight"))
    add_matrix("output.weight", "lm_head.weight")
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def halves_interleaved(bits: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp turns neighbouring numbers of a head, checkpoints have them half a head apart."""
    rows, columns = bits.shape
    return bits.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(bits.shape)


def add_tokenizer(out: gguf.GGUFWriter, tokenizer: dict[str, Any]) -> None:
    ids = tokenizer["model"]["vocab"]
    special = {entry["content"] for entry in tokenizer["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(tokens)
    out.add_token_types([control if token in special else normal for token in tokens])
    merges = tokenizer["model"]["merges"]
    out.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    out.add_bos_token_id(ids["<s>"])
    out.add_eos_token_id(ids["</s>"])
    out.add_pad_token_id(ids["<pad>"])
    out.add_add_bos_token(False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
