"""Reads a checkpoint's safetensors into a model."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.worker.engine.model_config import ModelConfig, UnsupportedModel
from services.worker.engine.models.llama import Llama

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_dtype(wanted: str, config: ModelConfig) -> torch.dtype:
    """`wanted`: "auto" or a name. auto turns float16 into float32, which holds all its values."""
    return DTYPES.get(config.checkpoint_dtype if wanted == "auto" else wanted, torch.float32)


def load_model(
    directory: str | Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Llama:
    """A model with the checkpoint's weights, in evaluation mode, one tensor in flight at a time.

    Raises UnsupportedModel when tensors are missing, unknown or of a wrong shape.
    """
    folder = Path(directory)
    with torch.device("meta"):
        model = Llama(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    state: dict[str, Tensor] = {}
    for name, tensor in _tensors(folder):
        # Old checkpoints carry the frequencies, which follow from the config.
        tied = config.tie_word_embeddings and name == "lm_head.weight"
        if tied or name.endswith("rotary_emb.inv_freq"):
            continue
        if name not in shapes:
            raise UnsupportedModel(f"{folder}: tensor {name} has no place in the model")
        if tensor.shape != shapes[name]:
            raise UnsupportedModel(
                f"{folder}: tensor {name} is {list(tensor.shape)}, "
                f"config.json makes it {list(shapes[name])}"
            )
        state[name] = tensor.to(device=device, dtype=dtype)
    if config.tie_word_embeddings and "model.embed_tokens.weight" in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    missing = sorted(shapes.keys() - state.keys())
    if missing:
        raise UnsupportedModel(f"{folder}: {len(missing)} tensors are missing, first {missing[0]}")
    model.load_state_dict(state, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval().requires_grad_(False)


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in _files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UnsupportedModel(f"{path}: {error}") from error


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [folder / name for name in sorted(names)]
    single = folder / "model.safetensors"
    if not single.exists():
        raise UnsupportedModel(f"{folder}: neither model.safetensors nor its index.json is there")
    return [single]
