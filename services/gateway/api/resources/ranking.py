"""How the passages of a search are ranked."""

from typing import Annotated, ClassVar

from pydantic import Field

from services.gateway.api.schema import Body


class RankingOptions(Body):
    NEUTRAL: ClassVar = {"ranker": ("none", "auto", "default-2024-11-15"), "hybrid_search": ()}

    score_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
