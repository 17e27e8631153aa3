"""The models of the comparison: Llama checkpoints of seeded random weights, in bf16.

Their text makes no sense, and costs what sense would cost. Besides the tokenizer, which all servers
want to see, nothing is made up: requests are token ids and end by their length.
"""

import itertools
import json
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VOCABULARY = 32_000
SEED = 1234


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_weights(self) -> int:
        """Of the linears of one layer."""
        kv = self.kv_heads * self.head_dim
        return self.hidden * (2 * self.hidden + 2 * kv + 3 * self.intermediate)

    @property
    def output_weights(self) -> int:
        """Of the product that gives the logits."""
        return self.hidden * VOCABULARY

    @property
    def bytes(self) -> int:
        """Of the checkpoint in bf16: linears, embeddings, output, norms."""
        norms = self.hidden * (2 * self.layers + 1)
        return 2 * (self.layers * self.layer_weights + 2 * self.output_weights + norms)

    @property
    def kv_bytes_per_token(self) -> int:
        """In bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


SHAPES = {
    "S": Shape(hidden=768, layers=12, heads=12, kv_heads=4, intermediate=2048),
    "M": Shape(hidden=2048, layers=22, heads=32, kv_heads=4, intermediate=5632),
    "M4": Shape(hidden=2048, layers=4, heads=32, kv_heads=4, intermediate=5632),
}


def write(name: str, folder: Path) -> Path:
    """`folder/NAME-bf16`, made if it is not there whole."""
    home = folder / f"{name}-bf16"
    if not (home / "model.safetensors").exists():
        print(f"writing the checkpoint {home}", flush=True)
        home.mkdir(parents=True, exist_ok=True)
        _write_config(SHAPES[name], home)
        _write_tokenizer(home)
        _write_weights(SHAPES[name], home)
    return home


def _write_config(shape: Shape, home: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    (home / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _write_weights(shape: Shape, home: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)

    def made(rows: int, columns: int) -> torch.Tensor:
        weights = torch.empty(rows, columns).normal_(0.0, 0.02, generator=generator)
        return weights.to(torch.bfloat16)

    tensors = {name: made(*size) for name, size in _matrices(shape)}
    for name in _norms(shape):
        tensors[name] = torch.ones(shape.hidden, dtype=torch.bfloat16)
    unfinished = home / "unfinished"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.rename(home / "model.safetensors")


def _matrices(shape: Shape) -> Iterator[tuple[str, tuple[int, int]]]:
    hidden, kv = shape.hidden, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (VOCABULARY, hidden)
    for layer in range(shape.layers):
        for name, size in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (shape.intermediate, hidden),
            "mlp.up_proj": (shape.intermediate, hidden),
            "mlp.down_proj": (hidden, shape.intermediate),
        }.items():
            yield f"model.layers.{layer}.{name}.weight", size
    yield "lm_head.weight", (VOCABULARY, hidden)


def _norms(shape: Shape) -> Iterator[str]:
    for layer in range(shape.layers):
        yield f"model.layers.{layer}.input_layernorm.weight"
        yield f"model.layers.{layer}.post_attention_layernorm.weight"
    yield "model.norm.weight"


def _write_tokenizer(home: Path) -> None:
    """A byte-level BPE of all bytes, all pairs and many triples of letters: none has to be trained,
    and nearly every id is whole text, which servers send at once."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<unk>", "<s>", "</s>", "<pad>"]
    letters = string.ascii_letters + string.digits + string.punctuation
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = list(itertools.product(letters, letters))
    triples = itertools.product(["".join(pair) for pair in pairs], letters)
    room = VOCABULARY - len(tokens) - len(pairs)
    merges: list[tuple[str, str]] = [*pairs, *itertools.islice(triples, room)]
    tokens += [left + right for left, right in merges]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(home / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
    }
    (home / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
