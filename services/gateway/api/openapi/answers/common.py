"""What many answers have."""

from typing import Any, Generic, Literal, NotRequired, TypeVar

from typing_extensions import TypedDict

T = TypeVar("T")


class Failure(TypedDict):
    message: str
    type: str
    param: str | None  # the field at fault
    code: str  # a stable word for programs
    stage: str  # the service that failed


class Error(TypedDict):
    error: Failure


class ListOf(TypedDict, Generic[T]):
    """All there are."""

    object: Literal["list"]
    data: list[T]


class PageOf(TypedDict, Generic[T]):
    """`after` the last one's id begins the next page."""

    object: Literal["list"]
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Priced(TypedDict):
    """Where the model has a price."""

    cost: NotRequired[float]
    currency: NotRequired[str]


class Plan(TypedDict):
    """How the context window was spent, in tokens."""

    window: int
    system: int
    history: int
    passages: int
    user: int
    template: int
    reserved_output: int
    passages_used: int
    passages_dropped: int
    messages_dropped: int


class Range(TypedDict):
    """From 1 on, both included."""

    first: int
    last: int


class Place(TypedDict):
    """`pages`: or slides, where the document has some; `rows`: of a table."""

    pages: NotRequired[Range]
    rows: NotRequired[Range]


class UsedPassage(Place):
    """`index`: as the answer cites it."""

    index: int
    file_id: str | None
    filename: str
    title: str
    score: float


class HowSearched(TypedDict):
    """`query`: what the stores were searched for; `rewritten`: by what, if not as it was asked;
    `age_s`: since the search was made, if for an earlier request; `stale`: it cannot be made now;
    `reranked`: the model that ranked the passages anew, `not_reranked`: why the one named did not.
    """

    query: str
    tokens: int
    rewritten: NotRequired[Literal["rule", "model"]]
    age_s: NotRequired[float]
    stale: NotRequired[Literal[True]]
    reranked: NotRequired[str]
    not_reranked: NotRequired[str]


class Quotation(TypedDict):
    """`index`: of its first character in the text; `passages`: that it is attributed to."""

    index: int
    length: int
    passages: list[int]


class Citations(TypedDict):
    """`cited`: marks that name a passage, and `unknown`: the numbers of those that name none;
    `quoted`: quotations with a mark, and `unfounded`: those of them that are not in the passage."""

    cited: int
    unknown: list[int]
    quoted: int
    unfounded: list[Quotation]


class Penstock(Priced):
    """`warning`: something that was asked for is left out."""

    request_id: str
    plan: NotRequired[Plan]
    passages: NotRequired[list[UsedPassage]]
    search: NotRequired[HowSearched]
    citations: NotRequired[Citations]
    warning: NotRequired[str]


class Citation(TypedDict):
    """`index`: the character of its mark in the text."""

    type: Literal["file_citation"]
    index: int
    file_id: str | None
    filename: str


class Candidate(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class Logprob(Candidate):
    top_logprobs: list[Candidate]


class Span(TypedDict):
    service: str
    name: str
    start_ms: float
    duration_ms: float
    id: str
    parent: str | None
    attributes: dict[str, Any]


class Decision(TypedDict):
    stage: str
    subject: str
    choice: str
    reasons: dict[str, str]


class RequestFailure(TypedDict):
    stage: str
    code: str
    message: str


class RequestRecord(TypedDict):
    """A request's way: what took how long, and why each decision fell as it did."""

    id: str
    object: Literal["request"]
    created: int
    route: str
    model: str | None
    metadata: dict[str, str]
    status: str
    duration_ms: float
    time_to_first_token_ms: float | None
    tokens: int
    cost: float | None
    currency: str | None
    spans: list[Span]
    decisions: list[Decision]
    error: NotRequired[RequestFailure]


class Model(TypedDict):
    """`sampling`: the checkpoint's own, where a request does not say. `parent`: of an adapter the
    model that it belongs to."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_window: NotRequired[int]  # tokens
    sampling: NotRequired[dict[str, float]]
    parent: NotRequired[str]


class Health(TypedDict):
    status: Literal["ok"]


class Readiness(TypedDict):
    status: Literal["ok", "degraded", "unavailable"]
    missing: list[str]


class Version(TypedDict):
    version: str
