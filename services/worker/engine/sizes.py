"""What a model takes and gives room for, by the settings: types, KV blocks, lengths."""

import logging
from collections.abc import Sequence
from typing import Literal

from services.worker.engine.config import EngineConfig
from services.worker.engine.kv.cache import block_bytes, block_shape
from services.worker.engine.kv.groups import (
    KvGroup,
    block_layers,
    keeping_all,
    kv_groups,
    most_tokens,
    whole,
)
from services.worker.engine.models.config import ModelConfig
from services.worker.engine.outputs import ModelInfo
from services.worker.engine.process.host_memory import usable_memory

log = logging.getLogger(__name__)

Dtype = Literal["float32", "bfloat16"]


def choose_dtype(wanted: str, config: ModelConfig, device: str, has_dot: bool) -> Dtype:
    """`wanted`: a name, or "auto" (see EngineConfig.dtype)."""
    if wanted == "auto":
        narrow = device != "cpu" or has_dot
        wanted = config.checkpoint_dtype if narrow else "float32"
    return "bfloat16" if wanted == "bfloat16" else "float32"


def groups_of(config: EngineConfig, model: ModelConfig) -> tuple[KvGroup, ...]:
    return whole(model) if config.keeps_all else kv_groups(model)


def num_blocks(config: EngineConfig, model: ModelConfig, dtype: Dtype) -> int:
    """KV blocks, as many as the settings make room for. Raises ValueError if that is none, or more
    than the memory: the kernel gives pages as they are written, and would end some process then.
    `model`: of ranks the part that one of them has."""
    size = kv_bytes_per_block(config, model, dtype)
    found = config.num_blocks or config.kv_cache_bytes // size
    if found < 1:
        raise ValueError(f"kv_cache_bytes {config.kv_cache_bytes} is less than one block ({size})")
    takes = found * size * (config.ranks_beside or config.tensor_parallel)
    if config.device == "cpu" and takes > (usable := usable_memory()):
        asked = "num_blocks" if config.num_blocks else "kv_cache_bytes"
        raise ValueError(
            f"{asked} {getattr(config, asked)} needs {mib(takes)} for KV blocks, and the "
            f"engine may use {mib(usable)} of memory at most"
        )
    return found


def kv_bytes_per_block(config: EngineConfig, model: ModelConfig, dtype: Dtype) -> int:
    """`dtype`: in which the model computes."""
    layers = block_layers(groups_of(config, model))
    return block_bytes(model, config.block_size, stored_as(config, dtype), layers)


def stored_as(config: EngineConfig, dtype: Dtype) -> str:
    """Keys and values: one of TOKEN_BYTES. `dtype`: in which the model computes."""
    return dtype if config.kv_format == "auto" else config.kv_format


def max_model_len(config: EngineConfig, model: ModelConfig, blocks: int) -> int:
    """Tokens of prompt and output. Raises ValueError if more was asked for than there is."""
    at_once = config.max_batched_tokens * (1 + config.overlaps)
    groups = groups_of(config, model)
    if config.draft_model is not None:
        groups = keeping_all(groups)
    room = most_tokens(groups, blocks, config.block_size, at_once, model.context)
    if config.max_model_len is None:
        return room
    if config.max_model_len > model.context:
        raise ValueError(
            f"max_model_len {config.max_model_len} exceeds the model's context {model.context}"
        )
    if config.max_model_len > room:
        raise ValueError(
            f"max_model_len {config.max_model_len} exceeds the {room} tokens that {blocks} KV "
            "blocks hold"
        )
    return config.max_model_len


def describe(
    config: EngineConfig,
    model: ModelConfig,
    *,
    dtype: Dtype,
    kernels: str,
    kv_order: Literal["rows", "panels"],
    threads: int,
    num_parameters: int,
    parameter_bytes: int,
    weights: str,
    huge_bytes: int,
    workspace_bytes: int | None,
) -> ModelInfo:
    """Raises ValueError on settings that do not fit."""
    blocks = num_blocks(config, model, dtype)
    context = max_model_len(config, model, blocks)
    groups = groups_of(config, model)
    far = any(rope.is_long(context) for rope in model.ropes)
    if far:
        log.info(
            "max_model_len %d is beyond what the model was first trained for: all positions are "
            "turned by longrope's long_factor (docs/models.md)",
            context,
        )
    return ModelInfo(
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_model_len=context,
        eos_token_ids=model.eos_token_ids,
        dtype=dtype,
        device=config.device,
        kernels=kernels,
        threads=threads,
        num_parameters=num_parameters,
        parameter_bytes=parameter_bytes,
        weights=weights,
        huge_bytes=huge_bytes,
        workspace_bytes=workspace_bytes,
        num_blocks=blocks,
        block_size=config.block_size,
        kv_bytes_per_block=kv_bytes_per_block(config, model, dtype),
        kv_shape_per_block=block_shape(model, config.block_size, block_layers(groups)),
        kv_format=_format(stored_as(config, dtype), kv_order, groups, far),
        hidden_size=model.hidden_size,
        num_logits={"tokens": model.vocab_size, "classes": model.num_classes}.get(model.head, 0),
        generates=model.head == "tokens",
        max_adapters=config.max_adapters,
        kv_groups=groups,
    )


def _format(stored: str, order: str, groups: Sequence[KvGroup], far: bool) -> str:
    """As ModelInfo.kv_format. Of several groups, or a window, other blocks are handed over."""
    grouped = len(groups) > 1 or groups[0].window
    return f"{stored} {order}{' in groups' if grouped else ''}{' turned for long contexts' * far}"


def mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
