"""The model that is planned for: a checkpoint's config.json, or one that is known by name."""

from pathlib import Path
from typing import Any

from services.common.checkpoints.checkpoint import folder_of, is_gguf
from services.worker.engine.models.config import (
    ExpertsConfig,
    LayerConfig,
    ModelConfig,
    UnsupportedModel,
)
from services.worker.engine.models.registry import read_config


def _decoder(
    architecture: str,
    layers: int,
    hidden: int,
    inner: int,
    heads: tuple[int, int],
    vocab: int,
    context: int,
    *,
    dim: int = 128,
    **more: Any,
) -> ModelConfig:
    """`heads`: of queries, and of keys and values. Of what turns them a plan needs nothing."""
    return ModelConfig(
        architecture=f"{architecture}ForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=dim,
        context=context,
        rms_norm_epsilon=1e-5,
        ropes=(),
        layers=(LayerConfig(),) * layers,
        attention_scale=dim**-0.5,
        tie_word_embeddings=more.pop("tied", False),
        checkpoint_dtype="bfloat16",
        eos_token_ids=(),
        **more,
    )


def _experts(layers: int, count: int, chosen: int, inner: int) -> ExpertsConfig:
    return ExpertsConfig(count, chosen, inner, True, frozenset(range(layers)))


_LONG = 131_072
NAMED = {
    "llama-2-7b": _decoder("Llama", 32, 4096, 11_008, (32, 32), 32_000, 4096),
    "llama-2-70b": _decoder("Llama", 80, 8192, 28_672, (64, 8), 32_000, 4096),
    "llama-3.2-1b": _decoder("Llama", 16, 2048, 8192, (32, 8), 128_256, _LONG, dim=64, tied=True),
    "llama-3.1-8b": _decoder("Llama", 32, 4096, 14_336, (32, 8), 128_256, _LONG),
    "llama-3.1-70b": _decoder("Llama", 80, 8192, 28_672, (64, 8), 128_256, _LONG),
    "llama-3.1-405b": _decoder("Llama", 126, 16_384, 53_248, (128, 8), 128_256, _LONG),
    "mistral-7b": _decoder("Mistral", 32, 4096, 14_336, (32, 8), 32_768, 32_768),
    "mixtral-8x7b": _decoder(
        "Mixtral", 32, 4096, 14_336, (32, 8), 32_000, 32_768, experts=_experts(32, 8, 2, 14_336)
    ),
    "mixtral-8x22b": _decoder(
        "Mixtral", 56, 6144, 16_384, (48, 8), 32_768, 65_536, experts=_experts(56, 8, 2, 16_384)
    ),
    "qwen3-30b-a3b": _decoder(
        *("Qwen3Moe", 48, 2048, 6144, (32, 4), 151_936, 40_960),
        qk_norm="head",
        experts=_experts(48, 128, 8, 768),
    ),
    "qwen3-235b-a22b": _decoder(
        *("Qwen3Moe", 94, 4096, 12_288, (64, 4), 151_936, 40_960),
        qk_norm="head",
        experts=_experts(94, 128, 8, 1536),
    ),
    "qwen2.5-7b": _decoder("Qwen2", 28, 3584, 18_944, (28, 4), 152_064, 32_768, qkv_bias=True),
    "qwen2.5-72b": _decoder("Qwen2", 80, 8192, 29_568, (64, 8), 152_064, 32_768, qkv_bias=True),
    "qwen3-8b": _decoder("Qwen3", 36, 4096, 12_288, (32, 8), 151_936, 40_960, qk_norm="head"),
    "qwen3-32b": _decoder("Qwen3", 64, 5120, 25_600, (64, 8), 151_936, 40_960, qk_norm="head"),
}
"""Shapes as their makers published them."""


def shape_of(model: str) -> ModelConfig:
    """Raises ValueError where it is neither a readable folder or GGUF file nor a name."""
    if model in NAMED:
        return NAMED[model]
    folder = Path(model).expanduser()
    if not (folder.is_dir() or is_gguf(model)):
        raise ValueError(
            f"MODEL: {model!r} is neither a folder with a config.json, nor a GGUF file, nor one of "
            f"{', '.join(NAMED)}"
        )
    try:
        return read_config(folder_of(model))
    except FileNotFoundError as error:
        raise ValueError(f"MODEL: {error}") from None
    except UnsupportedModel as error:
        raise ValueError(f"MODEL: {error}") from None
