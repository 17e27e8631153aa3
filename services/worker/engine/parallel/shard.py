"""What one of several ranks has of a model (M. Shoeybi et al., arXiv 1909.08053).

Linears of one input (queries, keys, values; gate and up, each expert's too) are cut by what they
give, so heads and inner features are whole on some rank; those behind them (`o_proj`, `down_proj`)
by what they take, and what the ranks give is summed. Embedding and head are cut by the vocabulary.
Of fewer key-value heads than ranks several ranks have the same. Vectors, routers, and what makes
logits of classes, each rank has whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from services.worker.engine.adapters import Adapter, Lora
from services.worker.engine.formats.stored import Stored
from services.worker.engine.models.config import ModelConfig
from services.worker.engine.parallel.part import Part

After = Literal["", "sum", "gather"]
"""What is done with what each rank's part of a linear gives."""
_SUMMED = ("o_proj", "down_proj", "w2")
_OF_VOCABULARY = ("embed_tokens", "lm_head")


def check_cut(model: ModelConfig, ranks: int) -> None:
    """Raises ValueError where the model cannot be cut so."""
    heads, kv_heads, experts = model.num_heads, model.num_kv_heads, model.experts
    of_all = experts is not None and len(experts.layers) == model.num_layers
    for name, size in (
        ("num_attention_heads", heads),
        ("intermediate_size", 0 if of_all else model.intermediate_size),
        ("experts' inner features", experts.inner if experts else 0),
        ("shared expert's inner features", experts.shared if experts else 0),
    ):
        if size % ranks:
            raise ValueError(f"tensor_parallel {ranks} does not divide the model's {name} {size}")
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(
            f"tensor_parallel {ranks}: the model's num_key_value_heads {kv_heads} are neither "
            "divided among so many ranks nor are these divided among them"
        )
    if not Shard(model, ranks - 1, ranks).vocabulary:
        raise ValueError(
            f"tensor_parallel {ranks}: of the model's vocab_size {model.vocab_size} nothing is "
            "left for the last rank"
        )


@dataclass(frozen=True, slots=True)
class Shard:
    model: ModelConfig
    """The whole one."""
    rank: int = 0
    ranks: int = 1

    @property
    def config(self) -> ModelConfig:
        """With the rank's own sizes; its vocabulary is the whole one's."""
        experts = self.model.experts
        return replace(
            self.model,
            num_heads=self.model.num_heads // self.ranks,
            num_kv_heads=len(self.kv_heads),
            intermediate_size=self.model.intermediate_size // self.ranks,
            experts=experts
            and replace(
                experts, inner=experts.inner // self.ranks, shared=experts.shared // self.ranks
            ),
        )

    @property
    def copies(self) -> int:
        """Ranks that have the same key-value heads."""
        return max(1, self.ranks // self.model.num_kv_heads)

    @property
    def kv_heads(self) -> range:
        count = max(1, self.model.num_kv_heads // self.ranks)
        first = self.rank // self.copies * count
        return range(first, first + count)

    @property
    def vocabulary(self) -> range:
        """Its tokens; the last ranks may have fewer."""
        size, width = self.model.vocab_size, self.vocabulary_width
        return range(min(size, self.rank * width), min(size, (self.rank + 1) * width))

    @property
    def vocabulary_width(self) -> int:
        """Tokens of the first rank."""
        return -(-self.model.vocab_size // self.ranks)

    def after(self, layer: str) -> After:
        """`layer`: a linear's name."""
        module = layer.rpartition(".")[2]
        if self.ranks == 1:
            return ""
        return "sum" if module in _SUMMED else "gather" if module in _OF_VOCABULARY else ""

    def has(self, name: str) -> bool:
        """Biases of what is summed are the first rank's."""
        *_, module, kind = name.split(".")
        return self.rank == 0 or kind != "bias" or module not in _SUMMED

    def parts(self, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        """What it has of a model's tensors."""
        return {name: self.part(name, stored) for name, stored in tensors.items() if self.has(name)}

    def part(self, name: str, stored: Stored) -> Stored:
        """Its part of the tensor `name`."""
        if self.ranks == 1:
            return stored
        *_, module, kind = name.split(".")
        if module in _SUMMED and kind == "weight":
            return Part(stored, [range(stored.shape[0])], self._inputs(name))
        rows = self._outputs(name)
        return Part(stored, rows) if rows else stored

    def adapter(self, adapter: Adapter) -> Adapter:
        """Its part of one of the whole model."""
        modules = {name: self._lora(name, lora) for name, lora in adapter.modules.items()}
        return Adapter(adapter.id, modules)

    def _lora(self, name: str, lora: Lora) -> Lora:
        tensor = f"{name}.weight"
        if name.endswith(_SUMMED):
            columns = self._inputs(tensor)
            down = lora.down[:, columns.start : columns.stop]
            return Lora(np.ascontiguousarray(down), lora.up)
        parts = [lora.up[:, part.start : part.stop] for part in self._outputs(tensor)]
        return Lora(lora.down, np.ascontiguousarray(np.concatenate(parts, axis=1)))

    def _inputs(self, name: str) -> range:
        """Of what the linear of a tensor takes that is summed."""
        return self._queries if ".o_proj." in name else self._inner(name)

    def _outputs(self, name: str) -> list[range]:
        """Of a tensor's rows, one part behind the other; none: all."""
        model, queries, keys, inner = self.model, self._queries, self._keys, self._inner(name)
        of_all = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        behind = [_moved(keys, of_all[0]), _moved(keys, sum(of_all))]
        parts = {
            "q_proj": [queries],
            "k_proj": [keys],
            "v_proj": [keys],
            "qkv_proj": [queries, *behind],
            "gate_proj": [inner],
            "up_proj": [inner],
            **{"w1": [inner], "w3": [inner]},  # of Mixtral's experts
            "gate_up_proj": [inner, _moved(inner, model.intermediate_size)],
            "embed_tokens": [self.vocabulary],
            "lm_head": [self.vocabulary],
        }
        if model.qk_norm == "all":
            parts |= {"q_norm": [queries], "k_norm": [keys]}
        return parts.get(name.split(".")[-2], [])

    @property
    def _queries(self) -> range:
        size = self.model.num_heads // self.ranks * self.model.head_dim
        return range(self.rank * size, (self.rank + 1) * size)

    @property
    def _keys(self) -> range:
        heads, dim = self.kv_heads, self.model.head_dim
        return range(heads.start * dim, heads.stop * dim)

    def _inner(self, name: str) -> range:
        """Of the features within the MLP, or the expert, that has the tensor."""
        whole, experts = self.model.intermediate_size, self.model.experts
        if experts is not None and ".experts." in name:
            whole = experts.inner
        elif experts is not None and ".shared_expert." in name:
            whole = experts.shared
        size = whole // self.ranks
        return range(self.rank * size, (self.rank + 1) * size)


def _moved(part: range, by: int) -> range:
    return range(part.start + by, part.stop + by)
