"""`python -m bench.conversations`: how often a chat's last question finds its passage as it was
asked, and with what the rule takes from the turns before (decision 0056), on the set beside this
file.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

from services.gateway.runs.rewriting.rule import Rewritten, Turn, rewrite
from services.retrieval.embedding_model import EmbeddingModel

SET = Path(__file__).with_suffix(".yaml")


class Conversation(NamedTuple):
    kind: str
    turns: Sequence[Turn]
    question: str
    finds: str

    def rewritten(self) -> Rewritten:
        return rewrite(self.turns, self.question)


def passages() -> dict[str, str]:
    found: dict[str, str] = yaml.safe_load(SET.read_text())["passages"]
    return found


def conversations() -> Iterator[Conversation]:
    for one in yaml.safe_load(SET.read_text())["conversations"]:
        turns = [Turn(*turn) for turn in one["turns"]]
        yield Conversation(one["kind"], turns, one["question"], one["finds"])


def ranks(model: EmbeddingModel, queries: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """Where each query's passage stands, from 1 on, by the model's vectors alone."""
    texts = passages()
    keys = list(texts)
    known = model.encode([model.reader.passage("", texts[key]).ids for key in keys])
    asked = model.encode([model.reader.query(query).ids for query in queries])
    scores = asked @ known.T
    own = scores[np.arange(len(queries)), [keys.index(key) for key in wanted]]
    return [int(rank) for rank in 1 + (scores > own[:, None]).sum(1)]


def measured() -> Mapping[str, Mapping[str, Sequence[int]]]:
    """Ranks by kind, and then by how it was asked: "asked", "rewritten"."""
    model, them = EmbeddingModel.load(), list(conversations())
    wanted = [one.finds for one in them]
    found = {
        "asked": ranks(model, [one.question for one in them], wanted),
        "rewritten": ranks(model, [one.rewritten().query for one in them], wanted),
    }
    by_kind: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for how, of_all in found.items():
        for one, rank in zip(them, of_all, strict=True):
            by_kind[one.kind][how].append(rank)
            by_kind["all"][how].append(rank)
    return by_kind


def main() -> None:
    for kind, found in measured().items():
        print(f"{kind} ({len(found['asked'])})")
        for how, of_all in found.items():
            first, three = (sum(rank <= at for rank in of_all) for at in (1, 3))
            print(f"  {how:10} first {first:3}  among three {three:3}")


if __name__ == "__main__":
    main()
