"""Answers of embeddings, scores and classes."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from services.gateway.api.openapi.answers.common import Priced


class InputUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Counted(TypedDict):
    model: str
    usage: InputUsage
    penstock: NotRequired[Priced]


class Embedding(TypedDict):
    """`embedding`: numbers, or their bytes (float32, little-endian) in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Counted):
    object: Literal["list"]
    data: list[Embedding]


class Score(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class Scores(Counted):
    id: str
    object: Literal["list"]
    created: int
    data: list[Score]


class Classified(TypedDict):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(Counted):
    id: str
    object: Literal["list"]
    created: int
    data: list[Classified]


class RankedText(TypedDict):
    text: str


class Ranked(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[RankedText]


class ApiVersion(TypedDict):
    version: str


class InputTokens(TypedDict):
    input_tokens: int


class RankingMeta(TypedDict):
    api_version: ApiVersion
    tokens: InputTokens


class Ranking(Counted):
    """Best first."""

    id: str
    results: list[Ranked]
    meta: RankingMeta
