"""What most families are built of, with its tensors named as in most checkpoints."""

from dataclasses import dataclass

from kernels.heads import QkNorm, Scores
from kernels.mixture import Mixture, Shared
from services.worker.engine.models.config import ModelConfig
from services.worker.engine.models.layers import Matrix, Ops, Rows, Weights


@dataclass(frozen=True, slots=True)
class Attention:
    index: int
    """Of its layer."""
    qkv: Matrix
    out: Matrix
    norm: QkNorm | None
    scores: Scores
    rope: int
    width: int
    """Of all heads together."""

    def heads(self, ops: Ops, x: Rows) -> Rows:
        """All but the way `out`: [T, width]."""
        queries = ops.rotary(ops.linear(x, self.qkv), self.index, self.rope, self.norm)
        return ops.attention(queries, self.index, self.width, self.scores)


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: Matrix
    down: Matrix

    def of(self, ops: Ops, x: Rows) -> Rows:
        return ops.linear(ops.silu_mul(ops.linear(x, self.gate_up)), self.down)


@dataclass(frozen=True, slots=True)
class Experts:
    """In the place of an MLP."""

    mixture: Mixture[Matrix]

    def of(self, ops: Ops, x: Rows) -> Rows:
        return ops.experts(x, self.mixture)


def attention(
    config: ModelConfig, weights: Weights, index: int, *, fused: bool = False, plus: float = 0.0
) -> Attention:
    """`fused`: queries, keys and values are one tensor. `plus`: of the weights of norms."""
    at, layer = f"model.layers.{index}.self_attn", config.layers[index]
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = {f"{at}.q_proj": queries} | {f"{at}.{name}_proj": keys for name in "kv"}
    if fused:
        qkv = {f"{at}.qkv_proj": sum(qkv.values())}
    found = weights.matrix(qkv, config.hidden_size, config.qkv_bias)
    out = weights.matrix({f"{at}.o_proj": config.hidden_size}, queries, config.out_bias)
    norm = None
    if config.qk_norm:
        of_head = config.head_dim if config.qk_norm == "head" else 0
        norm = QkNorm(
            weights.vector(f"{at}.q_norm", of_head or queries, plus),
            weights.vector(f"{at}.k_norm", of_head or keys, plus),
            config.rms_norm_epsilon,
        )
    window = layer.window if layer.window < config.context else 0  # one that covers all is none
    scores = Scores(config.attention_scale, config.score_cap, window)
    return Attention(index, found, out, norm, scores, layer.rope, queries)


def mlp(config: ModelConfig, weights: Weights, index: int, *, fused: bool = False) -> Mlp:
    """`fused`: gate and up are one tensor."""
    at, inner = f"model.layers.{index}.mlp", config.intermediate_size
    gate_up = {f"{at}.gate_up_proj": 2 * inner}
    if not fused:
        gate_up = {f"{at}.gate_proj": inner, f"{at}.up_proj": inner}
    return Mlp(
        weights.matrix(gate_up, config.hidden_size, config.mlp_bias),
        weights.matrix({f"{at}.down_proj": config.hidden_size}, inner, config.mlp_bias),
    )


ROUTERS = (".mlp.gate", ".block_sparse_moe.gate", ".shared_expert_gate")
"""What names of routers end with."""


def is_router(name: str) -> bool:
    """Whether the linear of this name chooses experts, or the share of one: it is never rounded,
    since next to nothing is saved and others would be chosen."""
    return name.endswith(ROUTERS)


def experts(config: ModelConfig, weights: Weights, at: str, names: tuple[str, str, str]) -> Experts:
    """`at`: where their tensors lie; `names`: of an expert's gate, up and down."""
    told, hidden = config.experts, config.hidden_size
    assert told is not None
    gate, up, down = names
    every = [f"{at}.experts.{number}" for number in range(told.count)]
    return Experts(
        Mixture(
            weights.matrix({f"{at}.gate": told.count}, hidden),
            weights.matrix(
                {f"{one}.{name}": told.inner for one in every for name in (gate, up)}, hidden
            ),
            weights.matrix({f"{one}.{down}": hidden for one in every}, told.inner),
            told.count,
            told.chosen,
            told.normed,
            _shared(config, weights, at, told.shared) if told.shared else None,
        )
    )


def _shared(config: ModelConfig, weights: Weights, at: str, inner: int) -> Shared[Matrix]:
    hidden, of_it = config.hidden_size, f"{at}.shared_expert"
    return Shared(
        weights.matrix({f"{of_it}_gate": 1}, hidden),
        weights.matrix({f"{of_it}.{name}_proj": inner for name in ("gate", "up")}, hidden),
        weights.matrix({f"{of_it}.down_proj": hidden}, inner),
    )


def head(config: ModelConfig, weights: Weights) -> Matrix | None:
    """What makes logits of a token's state: of tokens or of classes."""
    if config.head == "classes":
        return weights.matrix({"score": config.num_classes}, config.hidden_size)
    if config.head == "none":
        return None
    name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return weights.matrix({name: config.vocab_size}, config.hidden_size)
