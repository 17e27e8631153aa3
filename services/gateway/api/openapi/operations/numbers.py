"""What is answered with numbers."""

from services.gateway.api.moderation_schema import ModerationRequest
from services.gateway.api.openapi.answers.moderations import Moderations
from services.gateway.api.openapi.answers.pooled import Classes, Embeddings, Ranking, Scores
from services.gateway.api.openapi.operation import Operation
from services.gateway.api.pooled_schema import (
    ClassifyRequest,
    EmbeddingsRequest,
    RerankRequest,
    ScoreRequest,
)

_TAG = "Embeddings, scores, classes, moderations"
_MODEL = {"model": "demo"}

OPERATIONS: dict[str, Operation] = {
    "POST /v1/embeddings": Operation(
        _TAG,
        "Vectors of texts",
        Embeddings,
        EmbeddingsRequest,
        {**_MODEL, "input": ["water", "oil"]},
    ),
    "POST /v1/score": Operation(
        _TAG,
        "How well texts fit each other",
        Scores,
        ScoreRequest,
        {**_MODEL, "text_1": "water", "text_2": ["a pump", "a lamp"]},
    ),
    "POST /v1/rerank": Operation(
        _TAG,
        "Documents by how well they fit a query",
        Ranking,
        RerankRequest,
        {**_MODEL, "query": "water", "documents": ["a pump", "a lamp"]},
    ),
    "POST /v2/rerank": Operation(
        _TAG,
        "The same, by Cohere's newer path",
        Ranking,
        RerankRequest,
        {**_MODEL, "query": "water", "documents": ["a pump", "a lamp"]},
    ),
    "POST /v1/classify": Operation(
        _TAG, "Classes of texts", Classes, ClassifyRequest, {**_MODEL, "input": "water"}
    ),
    "POST /v1/moderations": Operation(
        _TAG,
        "What the operator's rules find in texts",
        Moderations,
        ModerationRequest,
        {"input": ["How do I descale a kettle?"]},
    ),
}
