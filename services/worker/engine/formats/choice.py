"""Which format of few bits each matrix of a model is held in, by what its tensors are and what is
asked for. No torch."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from kernels.cpu.matrix import NARROW, NIBBLES_STEP, Held, grouped, in_e4m3, quantized
from services.worker.engine.formats.stored import Rounding, Stored
from services.worker.engine.models.config import ModelConfig
from services.worker.engine.models.parts import is_router
from services.worker.engine.parallel.shard import Shard

_HEADS = {"lm_head", "score"}
_ROUNDED: dict[Held, Rounding] = {
    "int8": quantized, "int4": grouped, "fp8": in_e4m3, "w8a8": quantized,
}  # fmt: skip


class Choice:
    def __init__(self, quantization: str) -> None:
        """As `EngineConfig.quantization`."""
        self._matrices: Held = next((one for one in _ROUNDED if one == quantization), "")
        self._tables: Held = "int8" if self._matrices else ""
        """Of embeddings and heads, which decide the token."""

    def of_table(self, stored: Stored) -> Held:
        return _chosen([stored], self._tables, of_rows=False)

    def of_matrix(self, layers: Collection[str], parts: Sequence[Stored]) -> Held:
        """Of linear layers that are one matrix."""
        is_head = not _HEADS.isdisjoint(layers)
        asked = self._tables if is_head else self._matrices
        if any(map(is_router, layers)):
            asked = ""
        return _chosen(parts, asked, of_rows=not is_head)


def _chosen(parts: Sequence[Stored], asked: Held, of_rows: bool) -> Held:
    """What all of them are held in, unless fewer bits are asked for. `of_rows`: what meets it may
    be rounded, too."""
    first, *others = (stored.held for stored in parts)
    in_all: list[Held] = [one for one in first if all(one in other for other in others)]
    if not of_rows and "w8a8" in in_all:
        in_all.remove("w8a8")
    known = [*in_all, asked]
    return min(known, key=lambda one: (_bits(one), one not in in_all, one != asked))


def _bits(held: Held) -> int:
    """Of a number, scales aside."""
    return NARROW[held].bits if held else 16


def spans(parts: Iterable[Stored], first: int, last: int) -> Iterator[tuple[Stored, int, int]]:
    """Of tensors one below the other, those that have rows [first, last), and which of their own
    these are."""
    above = 0
    for stored in parts:
        own = max(0, first - above), min(stored.shape[0], last - above)
        if own[0] < own[1]:
            yield stored, *own
        above += stored.shape[0]


def narrow_rows(stored: Stored, held: Held, first: int, last: int) -> tuple[NDArray[Any], ...]:
    """Rows [first, last) in a format, rounded if it does not hold them: see `Library.pack`."""
    if held in stored.held:
        return stored.narrow(first, last, held)
    return stored.rounded(_ROUNDED[held], first, last)


def told(taken: Iterable[tuple[Stored, str]]) -> list[str]:
    """What becomes of tensors whose values are not kept to the bit, those that nobody rounded
    before aside, in words. `taken`: with a format's name, or that of what rows are."""
    changed = Counter(
        (one.kind, to)
        for one, to in taken
        if one.is_quantized and (to not in NARROW or to not in one.held)
    )
    return [
        f"{count} matrices of {kind} are "
        + (f"rounded again, to {to}" if to in _ROUNDED else f"widened to {to}")
        for (kind, to), count in sorted(changed.items())
    ]


def widths(model: ModelConfig) -> Iterator[tuple[str, int]]:
    """Of what its matrices take, by name; 0: it has no such."""
    yield "hidden_size", model.hidden_size
    yield "num_attention_heads * head_dim", model.num_heads * model.head_dim
    yield "intermediate_size", model.intermediate_size
    if model.experts is not None:
        yield "features within an expert", model.experts.inner
        yield "shared_expert_intermediate_size", model.experts.shared


def check_on_gpu(quantization: str, shard: Shard) -> None:
    """Raises ValueError where Triton's kernels cannot have a rank's part of the model so."""
    whose = f", of each of {shard.ranks} ranks," if shard.ranks > 1 else ""
    for name, size in widths(shard.config):
        if quantization == "int4" and size % NIBBLES_STEP:
            raise ValueError(
                f"quantization 'int4': {name} {size}{whose} is no multiple of {NIBBLES_STEP}"
            )
