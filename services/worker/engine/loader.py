"""Reads a checkpoint's safetensors into a model."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.worker.engine.model_config import ModelConfig, UnsupportedModel
from services.worker.engine.models.llama import Llama
from services.worker.engine.weights import check_weights, unused

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_dtype(wanted: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """`wanted`: a name, or "auto" (see EngineConfig.dtype)."""
    if wanted == "auto":
        wanted = "float32" if device.type == "cpu" else config.checkpoint_dtype
    return DTYPES.get(wanted, torch.float32)


def load_model(
    directory: str | Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Llama:
    """A model with the checkpoint's weights, in evaluation mode, one tensor in flight at a time.

    Raises UnsupportedModel when tensors are missing, unknown or of a wrong shape.
    """
    state: dict[str, Tensor] = {}
    for path in check_weights(directory, config):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    if not unused(name, config):
                        state[name] = file.get_tensor(name).to(device=device, dtype=dtype)
        except (OSError, SafetensorError) as error:
            raise UnsupportedModel(f"{path}: {error}") from error
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = Llama(config)
    model.load_state_dict(state, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval().requires_grad_(False)
