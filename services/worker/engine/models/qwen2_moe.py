"""Qwen2's mixtures of experts (arXiv 2407.10671): a Qwen2 with experts in the place of MLPs, of all
layers or of some, and one among them that is every token's."""

from dataclasses import replace

from services.worker.engine.models import parts
from services.worker.engine.models.config import ExpertsConfig, Fields, ModelConfig, read_decoder
from services.worker.engine.models.layers import Weights
from services.worker.engine.models.llama import Llama


def read(fields: Fields) -> ModelConfig:
    fields.only("use_sliding_window", False, None)
    shared = fields.size("shared_expert_intermediate_size")
    return replace(
        read_decoder(fields),
        qkv_bias=fields.flag("qkv_bias", True),
        experts=replace(experts(fields), shared=shared),
    )


def experts(fields: Fields) -> ExpertsConfig:
    """Qwen3's say them likewise, and by either name how many."""
    count, step = fields.num_layers(), fields.size("decoder_sparse_step", 1)
    dense = fields.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(one) is int for one in dense):
        raise fields.refusal(f"mlp_only_layers {dense!r} is no list of layers")
    layers = {index for index in range(count) if (index + 1) % step == 0} - {*dense}
    normed = fields.flag("norm_topk_prob")
    name = "num_local_experts" if "num_local_experts" in fields.raw else "num_experts"
    return fields.experts(name, "moe_intermediate_size", normed, layers)


class Qwen2Moe(Llama):
    def _mlp(self, weights: Weights, index: int) -> parts.Mlp | parts.Experts:
        told = self._config.experts
        if told is None or index not in told.layers:
            return super()._mlp(weights, index)
        at = f"model.layers.{index}.mlp"
        return parts.experts(self._config, weights, at, ("gate_proj", "up_proj", "down_proj"))
