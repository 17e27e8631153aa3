"""Reads adapters as the peft library saves them: adapter_config.json, adapter_model.safetensors."""

import json
import math
import re
import stat
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from services.common.checkpoints.sampled import sampled
from services.worker.engine.adapters.adapter import (
    Adapter,
    Floats,
    Lora,
    UnsupportedAdapter,
    is_adapted,
)
from services.worker.engine.formats.safetensors import check_whole, in_full, tensors_of
from services.worker.engine.formats.stored import FLOATS, Plain
from services.worker.engine.models.config import UnsupportedModel
from services.worker.engine.models.registry import read_config
from services.worker.engine.weights.weights import Shape, shapes

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
_MOST_CONFIG = 2**20
_MOST_ALPHA = 1e6
_UNBUILT: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "use_qalora": (False,),
    "modules_to_save": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "layer_replication": ([],),
    "alora_invocation_tokens": ([],),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "megatron_config": (),
}
"""Values with which these change nothing, besides none at all; others are refused."""
_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")
"""Of A and B, before training: those that leave the model's own weights as they are."""


def digest(folder: Path) -> str:
    """Tells adapters apart, as checkpoints are told apart: 16 hex digits. Raises OSError."""
    found = blake2b((folder / CONFIG).read_bytes(), digest_size=8)
    found.update(sampled(folder / WEIGHTS))
    return found.hexdigest()


def read(folder: str | Path, model: str | Path, max_rank: int) -> Adapter:
    """The adapter, for the checkpoint in folder `model`. Raises UnsupportedAdapter, and
    UnsupportedModel where that one is at fault."""
    folder, path = Path(folder), Path(folder) / WEIGHTS
    base = read_config(model)
    wanted = {
        name.removesuffix(".weight"): shape
        for name, shape in shapes(base).items()
        if is_adapted(name.removesuffix(".weight"))
    }
    config = _config(folder)
    rank, scale = _rank_and_scale(config, folder, max_rank)
    try:
        id = digest(folder)
        check_whole(path)
        with path.open("rb", buffering=0) as file:
            found = _matrices(tensors_of(file), wanted, base.num_layers, path)
            modules = {name: _lora(name, *pair, rank, scale, path) for name, pair in found.items()}
        # Which was read before its digest was taken: that of a pipe would have no end.
        if digest(folder) != id or _config(folder) != config:
            raise UnsupportedAdapter(f"{folder}: the adapter was changed while it was read")
    except FileNotFoundError as error:
        raise _missing(folder, WEIGHTS) from error
    except (OSError, UnsupportedModel) as error:
        raise UnsupportedAdapter(str(error)) from error
    if not modules:
        raise UnsupportedAdapter(f"{path}: it has no tensors of an adapter")
    return Adapter(id, modules)


def _config(folder: Path) -> dict[str, Any]:
    """Checked for what is not built."""
    path = folder / CONFIG
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a device's or a pipe's text has no end
            raise UnsupportedAdapter("it is no regular file")
        if found.st_size > _MOST_CONFIG:
            raise UnsupportedAdapter(f"it has more than {_MOST_CONFIG} bytes")
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _missing(folder, CONFIG) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedAdapter(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UnsupportedAdapter(f"{path} is no JSON object")
    if config.get("peft_type") != "LORA":
        raise UnsupportedAdapter(f"{path}: peft_type {_shown(config.get('peft_type'))} is not LORA")
    for name, harmless in _UNBUILT.items():
        value = config.get(name)
        if value is not None and not any(value == one for one in harmless):
            raise UnsupportedAdapter(f"{path}: {name} {_shown(value)} is not supported")
    begun = config.get("init_lora_weights", True)
    if not any(begun is one or (isinstance(one, str) and begun == one) for one in _BEGINNINGS):
        raise UnsupportedAdapter(
            f"{path}: init_lora_weights {_shown(begun)} changes the model's own weights, which is "
            "not supported: save the adapter as plain LoRA"
        )
    return config


def _missing(folder: Path, name: str) -> UnsupportedAdapter:
    return UnsupportedAdapter(f"{folder}: {name} is missing: no adapter of peft")


def _rank_and_scale(config: Mapping[str, Any], folder: Path, max_rank: int) -> tuple[int, float]:
    path = folder / CONFIG
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise UnsupportedAdapter(f"{path}: r must be a positive integer, is {_shown(rank)}")
    if rank > max_rank:
        raise UnsupportedAdapter(f"{path}: r {rank} is more than max_adapter_rank {max_rank}")
    if (
        isinstance(alpha, bool)
        or not isinstance(alpha, int | float)
        or not abs(alpha) < _MOST_ALPHA
    ):
        raise UnsupportedAdapter(f"{path}: lora_alpha must be a number, is {_shown(alpha)}")
    rslora = config.get("use_rslora", False)
    if type(rslora) not in (bool, type(None)):
        raise UnsupportedAdapter(f"{path}: use_rslora must be true or false")
    return rank, float(alpha) / (math.sqrt(rank) if rslora else rank)


def _matrices(
    tensors: Iterable[tuple[str, Any]], wanted: Mapping[str, Shape], layers: int, path: Path
) -> dict[str, tuple[Plain, Plain]]:
    """A and B by the module's name in the model, which has so many `layers`."""
    halves: dict[tuple[str, str], Plain] = {}
    names = {name.removeprefix("model."): name for name in wanted}
    for name, stored in tensors:
        found = _TENSOR.fullmatch(name)
        module = found and names.get(in_full(found[1]).removeprefix("model."))
        if not found or not module:
            if (layer := _LAYER.search(name)) and int(layer[1]) >= layers:
                raise UnsupportedAdapter(
                    f"{path}: tensor {name[:200]} is of layer {layer[1]}, and the model has "
                    f"{layers}, the first of which is 0: the adapter is of another model"
                )
            raise UnsupportedAdapter(
                f"{path}: tensor {name[:200]} is not supported: adapters change the queries', "
                "keys', values', output's, gate's, up's and down's projections of this model's "
                "layers"
            )
        if stored.dtype not in FLOATS:
            raise UnsupportedAdapter(f"{path}: tensor {name} is {stored.dtype}")
        if (module, found[2]) in halves:
            raise UnsupportedAdapter(f"{path}: tensor {name} is there twice")
        halves[module, found[2]] = stored
    whole: dict[str, tuple[Plain, Plain]] = {}
    for module, half in halves:
        other = halves.get((module, "B" if half == "A" else "A"))
        if other is None:
            raise UnsupportedAdapter(f"{path}: {module} has lora_{half} alone")
        a, b = halves[module, "A"], halves[module, "B"]
        (n, k), rank = wanted[module], next(iter(a.shape), 0)
        if a.shape != (rank, k) or b.shape != (n, rank):
            raise UnsupportedAdapter(
                f"{path}: {module} is changed by {list(b.shape)} times {list(a.shape)}, and is "
                f"{[n, k]} in the model"
            )
        whole[module] = a, b
    return whole


def _lora(module: str, a: Plain, b: Plain, rank: int, scale: float, path: Path) -> Lora:
    if a.shape[0] != rank:
        raise UnsupportedAdapter(
            f"{path}: {module} has rank {a.shape[0]}, and {CONFIG} says r {rank}"
        )
    down = a.float32()
    up: Floats = np.ascontiguousarray(b.float32().T * np.float32(scale))
    if not (np.isfinite(down).all() and np.isfinite(up).all()):
        raise UnsupportedAdapter(f"{path}: {module} has numbers that are not finite")
    return Lora(np.ascontiguousarray(down), up)


def _shown(value: object) -> str:
    return f"{value!r:.100}"
