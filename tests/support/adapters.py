"""Adapters of low rank, as the peft library saves them, of random numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from services.worker.engine.adapters import is_adapted

Q_AND_V = ("q_proj", "v_proj")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_FUSED = ("qkv_proj", "gate_up_proj")


def make(
    folder: Path,
    model: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    targets: tuple[str, ...] = ALL,
    strength: float = 0.3,
    extra: dict[str, "np.ndarray[Any, Any]"] | None = None,
    **config: Any,
) -> Path:
    """For the checkpoint in folder `model`; of its linears the `targets`. `strength`: of the
    numbers. Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for name, (n, k) in sorted(linears(model).items()):
        if name.rsplit(".", 1)[1] in (*targets, *_FUSED):
            at = f"base_model.model.{name}"
            a, b = rng.normal(size=(rank, k)), rng.normal(size=(n, rank))
            tensors[f"{at}.lora_A.weight"] = (a * strength).astype(np.float32)
            tensors[f"{at}.lora_B.weight"] = (b * strength).astype(np.float32)
    save_file(tensors | (extra or {}), folder / "adapter_model.safetensors")
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.1,
        "target_modules": list(targets),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(told | config))
    return folder


def linears(model: Path) -> dict[str, tuple[int, int]]:
    """[outputs, inputs] of those that adapters may change."""
    with safe_open(model / "model.safetensors", "numpy") as file:
        return {
            name.removesuffix(".weight"): tuple(file.get_slice(name).get_shape())
            for name in file.keys()  # noqa: SIM118 - it is no dict
            if is_adapted(name.removesuffix(".weight"))
        }


def merge(model: Path, adapter: Path, to: Path, scale: float) -> Path:
    """A copy of a checkpoint in float32 with W + scale B A for W; returns `to`."""
    to.mkdir(parents=True)
    for file in model.glob("*.json"):
        (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(model / "model.safetensors")
    deltas = load_file(adapter / "adapter_model.safetensors")
    for name in linears(model):
        at = f"base_model.model.{name}"
        if f"{at}.lora_A.weight" in deltas:
            a, b = (deltas[f"{at}.lora_{half}.weight"] for half in "AB")
            weights = tensors[f"{name}.weight"].astype(np.float64)
            tensors[f"{name}.weight"] = (weights + scale * (b.astype(np.float64) @ a)).astype("f4")
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to
