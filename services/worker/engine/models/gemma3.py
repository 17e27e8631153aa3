"""Gemma 3's text model (arXiv 2503.19786): a Gemma 2 that norms queries and keys instead of capping
their scores; five layers of six have a window, and a rotary embedding of their own."""

from services.worker.engine.models.config import Fields, ModelConfig
from services.worker.engine.models.gemma2 import HEAD_DIM, read_gemma
from services.worker.engine.models.rope_config import RopeConfig


def read(fields: Fields) -> ModelConfig:
    fields.only("attn_logit_softcapping", None)
    window = fields.optional_size("sliding_window", 4096)
    pattern = fields.size("sliding_window_pattern", fields.size("_sliding_window_pattern", 6))
    return read_gemma(
        fields,
        ropes=_ropes(fields),
        layers=fields.layers(window, lambda index: (index + 1) % pattern != 0, of_sliding=1),
        qk_norm="head",
        logit_cap=fields.optional("final_logit_softcapping", 0.0),
    )


def _ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """Of layers that see all, and of the others."""
    raw, dim = fields.raw, fields.head_dim(HEAD_DIM)
    theta, local = raw.get("rope_theta", 1e6), raw.get("rope_local_base_freq", 1e4)
    return (
        fields.rope(dim, "full_attention", rope_theta=theta),
        fields.rope(dim, "sliding_attention", rope_theta=local, rope_scaling=None),
    )
