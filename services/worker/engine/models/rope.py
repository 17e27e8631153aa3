"""Rotary position embeddings: the frequencies of each variant that a config can name.

Sources: RoFormer (arXiv 2104.09864), position interpolation (2306.15595), YaRN (2309.00071),
LongRoPE (2402.13753), and the smoothing that Llama 3.1's checkpoints name "llama3". Imports no
torch.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.worker.engine.models.config import ModelConfig
from services.worker.engine.models.rope_config import ORIGINAL, RopeConfig

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """Position p turns pair i by the angle p * frequencies[i]; cos and sin are times `scale`."""

    frequencies: Floats
    """[pairs of a head that are turned]"""
    scale: float = 1.0

    def tables(self, positions: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """cos and sin, [T, pairs] each, for positions [T]."""
        angles = positions.astype(np.float32)[:, None] * self.frequencies
        scale = np.float32(self.scale)
        cos: Floats = np.cos(angles) * scale
        sin: Floats = np.sin(angles) * scale
        return cos, sin


def angle_tables(model: ModelConfig, served: int) -> list[tuple[Floats, Floats]]:
    """Of each of the model's rotary embeddings cos and sin, for positions of `served` tokens."""
    return [build_rope(config, served).tables(np.arange(served)) for config in model.ropes]


def build_rope(config: RopeConfig, served: int) -> Rope:
    """The frequencies that the config asks for, for sequences of up to `served` tokens."""
    parameters, head_dim = config.parameters, config.dims
    match config.kind:
        case "linear":
            return Rope(_default(parameters, head_dim) / np.float32(parameters["factor"]))
        case "llama3":
            return Rope(_llama3(parameters, head_dim))
        case "yarn":
            return _yarn(parameters, head_dim)
        case "longrope":
            return _longrope(config, served)
        case _:
            return Rope(_default(parameters, head_dim))


def _default(parameters: dict[str, Any], head_dim: int) -> Floats:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (1 / np.float32(parameters["rope_theta"]) ** exponents).astype(np.float32)


def _llama3(parameters: dict[str, Any], head_dim: int) -> Floats:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    frequencies = _default(parameters, head_dim)
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    turns = float(parameters[ORIGINAL]) * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clip(0, 1)
    blended = frequencies * keep + frequencies / float(parameters["factor"]) * (1 - keep)
    result: Floats = blended.astype(np.float32)
    return result


def _longrope(config: RopeConfig, served: int) -> Rope:
    """Each pair is slowed by a factor of its own, of one list or, for long sequences, the other."""
    parameters = config.parameters
    name = "long_factor" if config.is_long(served) else "short_factor"
    factors: Floats = np.array(parameters[name], np.float32)
    scale, original = parameters.get("attention_factor"), parameters[ORIGINAL]
    if scale is None:
        factor = parameters.get("factor") or config.context / original
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return Rope(_default(parameters, config.dims) / factors, float(scale))


def _yarn(parameters: dict[str, Any], head_dim: int) -> Rope:
    """Dimensions that turn often within the original context are kept, slow ones interpolated."""
    theta, factor = float(parameters["rope_theta"]), float(parameters["factor"])
    original = float(parameters[ORIGINAL])

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(parameters.get("beta_fast") or 32)
    high = dimension_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / max(high - low, 0.001)
    interpolate = ramp.clip(0, 1)
    frequencies = _default(parameters, head_dim)
    blended = frequencies * (1 - interpolate) + frequencies / factor * interpolate
    return Rope(blended.astype(np.float32), _yarn_scale(parameters, factor))


def _yarn_scale(parameters: dict[str, Any], factor: float) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    over, under = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return magnitude(over) / magnitude(under) if over and under else magnitude(1.0)
