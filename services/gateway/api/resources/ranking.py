"""How the passages of a search are ranked."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from protos.retrieval_pb2 import Ranking
from services.gateway.api.schema import Body, refuse

_Weight = Annotated[float, Field(ge=0, le=1000)]


class HybridSearch(Body):
    """How much each counts, in proportion."""

    embedding_weight: _Weight
    text_weight: _Weight
    late_weight: _Weight = Field(
        0, description="of late interaction: what the question's tokens find in the best of these"
    )

    @model_validator(mode="after")
    def _something_counts(self) -> Self:
        if not self.embedding_weight + self.text_weight:
            raise ValueError("one of embedding_weight and text_weight must be above 0")
        return self


class RankingOptions(Body):
    ranker: Literal["none", "auto", "default-2024-11-15"] | None = Field(
        None, description="none: by the embedding alone"
    )
    score_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    hybrid_search: HybridSearch | None = None

    @model_validator(mode="after")
    def _weights_of_several(self) -> Self:
        if self.ranker == "none" and self.hybrid_search is not None:
            raise refuse("hybrid_search", "the ranker 'none' ranks by the embedding alone")
        return self

    def told(self) -> Ranking:
        weights = self.hybrid_search
        return Ranking(
            ranker=Ranking.NONE if self.ranker == "none" else Ranking.AUTO,
            embedding_weight=weights.embedding_weight if weights else 0,
            text_weight=weights.text_weight if weights else 0,
            late_weight=weights.late_weight if weights else 0,
        )
