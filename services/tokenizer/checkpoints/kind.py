"""What a checkpoint is for, as its files say: tokens, classes, embeddings, scores of pairs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.checkpoints.sentence_modules import NO_MODULES, Modules

_CLASSES = "ForSequenceClassification"
_TOKENS = "ForCausalLM"


@dataclass(frozen=True)
class Kind:
    generates: bool = True
    labels: tuple[str, ...] = ()  # of its classes, where it tells classes
    modules: Modules = NO_MODULES

    @property
    def score_of(self) -> tuple[int, ...]:
        """It reads pairs: of which logits (tokens, or classes) a pair's score is made; of two the
        second is taken off the first. Empty: it scores by the embeddings of both."""
        if self.labels:
            return (0,) if len(self.labels) == 1 else ()
        if self.modules.relevant is None:
            return ()
        found = self.modules.relevant, self.modules.irrelevant
        return tuple(id for id in found if id is not None)


PLAIN = Kind()


def kind_of(config: Mapping[str, Any], modules: Modules) -> Kind:
    """`config`: config.json's."""
    architecture = next(iter(config.get("architectures") or [""]))
    if architecture.endswith(_CLASSES):
        return Kind(False, _labels(config), modules)
    # Of one whose config names none nothing but tokens can be expected.
    return Kind(not architecture or architecture.endswith(_TOKENS), (), modules)


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """In the order of the classes; as transformers names those without a name."""
    named = config.get("id2label") or {}
    count = len(named) or config.get("num_labels") or 2
    return tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(count))
