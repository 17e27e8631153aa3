"""A search of one vector store."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from services.gateway.api.generation_schema import as_list
from services.gateway.api.resources.attributes import Filters
from services.gateway.api.resources.ranking import RankingOptions
from services.gateway.api.schema import Body
from services.gateway.faults import spelt
from services.gateway.runs.rewriting.rule import plain
from services.gateway.stores.retrieval.searching import Search

MAX_QUERIES = 8  # in one search

_Question = Annotated[str, spelt(r"\S", "more than white space")]
_Queries = Annotated[list[_Question], Field(min_length=1, max_length=MAX_QUERIES)]


class SearchStore(Body):
    query: Annotated[
        _Queries, BeforeValidator(as_list, json_schema_input_type=_Question | _Queries)
    ]
    filters: Filters | None = None
    max_num_results: Annotated[int, Field(ge=1, le=50)] | None = None
    ranking_options: RankingOptions | None = None
    rewrite_query: bool | None = Field(
        None, description="searches without what stands before the question for courtesy"
    )

    def search(self, store: str) -> Search:
        options = self.ranking_options
        return Search(
            store,
            [plain(query) for query in self.query] if self.rewrite_query else self.query,
            self.max_num_results or 10,
            (options.score_threshold if options else None) or 0.0,
            self.filters.told() if self.filters is not None else None,
            options.told() if options else None,
        )
