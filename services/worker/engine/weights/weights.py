"""Which tensors a model is read from. Milliseconds whatever its size, and no torch."""

from collections.abc import Mapping

from services.worker.engine.models.config import ModelConfig
from services.worker.engine.models.registry import build_model

Shape = tuple[int, ...]


def unused(name: str, config: ModelConfig) -> bool:
    """Whether the checkpoint's tensor follows from others, or from nothing that is computed: a tied
    head, one of a model that makes no tokens, or the frequencies that old checkpoints carry."""
    no_head = config.tie_word_embeddings or config.head != "tokens"
    return (no_head and name.startswith("lm_head.")) or name.endswith("rotary_emb.inv_freq")


def shapes(config: ModelConfig) -> dict[str, Shape]:
    """Of every tensor that the model is read from, by name."""
    wanted = _Wanted()
    build_model(config, wanted)
    return wanted.shapes


class _Wanted:
    """Gives a model nothing, and remembers what it asked for."""

    def __init__(self) -> None:
        self.shapes: dict[str, Shape] = {}

    def table(self, name: str, rows: int, width: int) -> None:
        self.shapes[f"{name}.weight"] = (rows, width)

    def vector(self, name: str, size: int, plus: float = 0.0) -> None:
        self.shapes[f"{name}.weight"] = (size,)

    def matrix(self, layers: Mapping[str, int], width: int, bias: bool = False) -> None:
        for name, size in layers.items():
            self.shapes[f"{name}.weight"] = (size, width)
            if bias:
                self.shapes[f"{name}.bias"] = (size,)
