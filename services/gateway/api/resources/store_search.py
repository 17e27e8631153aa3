"""A search of one vector store."""

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from services.gateway.api.generation_schema import as_list
from services.gateway.api.resources.attributes import Filters
from services.gateway.api.resources.ranking import RankingOptions
from services.gateway.api.schema import Body
from services.gateway.stores.searching import Search

MAX_QUERIES = 8  # in one search

_Question = Annotated[str, Field(pattern=r"\S")]
_Queries = Annotated[list[_Question], Field(min_length=1, max_length=MAX_QUERIES)]


class SearchStore(Body):
    NEUTRAL: ClassVar = {"rewrite_query": (False,)}

    query: Annotated[
        _Queries, BeforeValidator(as_list, json_schema_input_type=_Question | _Queries)
    ]
    filters: Filters | None = None
    max_num_results: Annotated[int, Field(ge=1, le=50)] | None = None
    ranking_options: RankingOptions | None = None

    def search(self, store: str) -> Search:
        options = self.ranking_options
        return Search(
            store,
            self.query,
            self.max_num_results or 10,
            (options.score_threshold if options else None) or 0.0,
            self.filters.told() if self.filters is not None else None,
            options.told() if options else None,
        )
