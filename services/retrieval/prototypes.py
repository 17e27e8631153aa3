"""Rules that match by meaning: what is as near to one of their examples as they say."""

import asyncio
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.common.policy import Policy, RuleSpec
from services.retrieval.embedder import Embedder
from services.retrieval.embedding_model import EmbeddingModel

_VERSIONS = 4  # that are asked for at a time, while a file changes
_ALL = ""  # of the tenants: nobody's


@dataclass(frozen=True)
class Prototype:
    """One rule's."""

    rule: RuleSpec
    vectors: NDArray[np.float32]  # [examples, dimension], of unit length
    at_least: float

    def scores(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Of texts, [texts, dimension]: each one's cosine with the nearest example."""
        nearest: NDArray[np.float32] = (vectors @ self.vectors.T).max(axis=1)
        return nearest


class Prototypes:
    """Those of the policy's versions, embedded when one is asked for the first time."""

    def __init__(self, model: EmbeddingModel, embedder: Embedder) -> None:
        self._model = model
        self._embedder = embedder
        self._made: dict[str, list[Prototype]] = {}  # by digest
        self._making = asyncio.Lock()

    async def of(self, policy: Policy) -> list[Prototype]:
        async with self._making:
            if policy.digest not in self._made:
                made = [await self._make(rule) for rule in policy.rules.by_meaning]
                if len(self._made) == _VERSIONS:
                    del self._made[next(iter(self._made))]
                self._made[policy.digest] = made
            return self._made[policy.digest]

    async def _make(self, rule: RuleSpec) -> Prototype:
        assert rule.like is not None
        examples = [self._model.reader.query(text).ids for text in rule.like.examples]
        vectors = await self._embedder.embed(_ALL, examples)
        return Prototype(rule, vectors, rule.like.at_least)
