"""What the index asks of a vector store, whichever it is: points, conditions, calls.

Two stores answer: `edge.py`, inside this installation, and `server.py`, a Qdrant server. All calls
block. This module is imported by the embedded store's process: it stays small.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

# Every point has these two vectors, under these names.
DENSE = "dense"  # the embedding model's, compared by cosine
SPARSE = "sparse"  # of BM25, whose IDF is computed when it is asked for

# What conditions are mostly about.
SCOPE = "scope"  # what a search looks in, see scopes.py
TENANT = "tenant"
MARKS = "marks"  # of its attributes, see attributes.py
KEYWORDS = ("collection", "source_id", "digest", MARKS)
INTEGERS = ("revision",)

TOKENS = "tokens"  # of the payload, for late interaction: packed (token_vectors.py), or empty

Value = str | int


class StoreUnusableError(Exception):
    """As this service is set up, it cannot use the store. The text is the operator's, and says what
    to change; `reason` is a word for programs.
    """

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text, reason)
        self.text = text
        self.reason = reason

    def __str__(self) -> str:
        return self.text


class StoreAwayError(Exception):
    """The store cannot be reached; a later call may find it."""


class StoreFailedError(Exception):
    """The store is there and could not do what it was asked; the text says why."""


class Sparse(NamedTuple):
    indices: list[int]  # ascending, none twice
    values: list[float]


@dataclass(frozen=True, slots=True)
class Point:
    id: str  # a UUID
    dense: np.ndarray  # float32 [dimension]
    sparse: Sparse
    payload: dict[str, Any]


class Hit(NamedTuple):
    """A passage found, and why it stands where it does."""

    payload: dict[str, Any]
    score: float  # what it is ranked by
    dense: float  # cosine with the question
    sparse: float  # by BM25; 0: not among the best by words
    late: float | None = None  # by its tokens; None: not looked at, or it has none


# -- conditions on a point's payload; a key may be a path, "attributes.number.x" ------------------


@dataclass(frozen=True, slots=True)
class Is:
    """Its value is one of these; of none, no point's is."""

    key: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Within:
    """Its value is a number between these bounds."""

    key: str
    gt: float | None = None
    gte: float | None = None
    lt: float | None = None
    lte: float | None = None


@dataclass(frozen=True, slots=True)
class Missing:
    """It has no such value."""

    key: str


@dataclass(frozen=True, slots=True)
class Not:
    condition: "Condition"


@dataclass(frozen=True, slots=True)
class Every:
    conditions: tuple["Condition", ...]


@dataclass(frozen=True, slots=True)
class Either:
    conditions: tuple["Condition", ...]  # at least one


Condition = Is | Within | Missing | Not | Every | Either


# -------------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    embedding: float = 1.0
    text: float = 0.3  # 0: words are not looked for
    late: float = 1.0


BOTH = Weights()


@dataclass(frozen=True, slots=True)
class Question:
    """What a search looks for, in one way or in both."""

    where: Condition
    corpus: Condition  # the points whose words BM25's IDF is computed from
    limit: int  # of each way
    dense: np.ndarray | None = None  # float32 [dimension], of unit length
    sparse: Sparse | None = None
    weights: Weights = BOTH
    closely: int = 0  # of so many of the best the tokens are told, too


class Found(NamedTuple):
    """Best first."""

    hits: list[Hit]
    earlier: Sequence[Hit] = ()  # by BM25 alone, of documents that another model embedded
    incomplete: bool = False  # some of those cannot be read


def best_of(ways: Iterable[Sequence[Hit]], limit: int) -> list[Hit]:
    """Of several lists with scores of a kind."""
    return sorted((hit for way in ways for hit in way), key=lambda hit: -hit.score)[:limit]


class Points(Protocol):
    """What models embedded: those that this service has, and earlier ones, of which it was not
    indexed anew yet. `model`: whose points are asked for, by its fingerprint; empty: of the first.

    Every method raises StoreUnusableError, StoreAwayError or StoreFailedError.
    """

    @property
    def kind(self) -> str: ...  # "embedded" or "server"

    @property
    def threads(self) -> int: ...  # that may call at a time

    def open(self) -> None:
        """Makes what is missing."""

    def search(self, question: Question, model: str = "") -> Found: ...

    def put(self, points: Sequence[Point], model: str = "") -> None:
        """Those of the same ids are replaced. What has returned outlives the process."""

    def change(self, where: Condition, payload: Mapping[str, Any]) -> None:
        """Sets these fields of all points that it selects, whole, and leaves the others."""

    def delete(self, ids: Sequence[str]) -> None: ...

    def ids(self, where: Condition, limit: int) -> list[str]: ...

    def payloads(
        self, where: Condition, limit: int, keys: Sequence[str], model: str = ""
    ) -> list[dict[str, Any]]:
        """Of this model's points, in no order."""

    def count(self, where: Condition, model: str = "") -> int:
        """Of this model's points."""

    def close(self) -> None: ...
