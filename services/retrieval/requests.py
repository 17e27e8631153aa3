"""What a request must be before any work is done for it: each refusal names its field."""

from math import inf

from protos import retrieval_pb2 as pb
from services.common.errors import PenstockError, invalid

MAX_TEXTS = 2048
MAX_JUDGED = 64
MAX_COLLECTIONS = 100
MAX_LIMIT = 50
MAX_ID_CHARS = 256
MAX_TITLE_CHARS = 512
MIN_CHUNK_TOKENS = 16
_MAX_KEY_CHARS = 1024


def check_embed(request: pb.EmbedRequest) -> None:
    _tenant(request.caller.tenant)
    if not 1 <= len(request.texts) <= MAX_TEXTS:
        raise _refuse(f"takes 1 to {MAX_TEXTS} texts, got {len(request.texts)}", "texts")
    for i, text in enumerate(request.texts):
        if not text.strip():
            raise _refuse("must not be empty", f"texts[{i}]")


def check_judge(request: pb.JudgeRequest) -> None:
    _tenant(request.caller.tenant)
    if not 1 <= len(request.texts) <= MAX_JUDGED:
        raise _refuse(f"takes 1 to {MAX_JUDGED} texts, got {len(request.texts)}", "texts")
    for i, one in enumerate(request.texts):
        if not one.text.strip():
            raise _refuse("must not be empty", f"texts[{i}]")


def check_search(request: pb.SearchRequest) -> None:
    _tenant(request.caller.tenant)
    if not 1 <= len(request.collections) <= MAX_COLLECTIONS:
        raise _refuse(
            f"takes 1 to {MAX_COLLECTIONS} ids, got {len(request.collections)}", "collections"
        )
    for i, collection in enumerate(request.collections):
        _id(collection, f"collections[{i}]")
    if not request.query.strip():
        raise _refuse("must not be empty", "query")
    if not 1 <= request.limit <= MAX_LIMIT:
        raise _refuse(f"must be 1 to {MAX_LIMIT}, got {request.limit}", "limit")
    if not 0 <= request.score_threshold <= 1:
        raise _refuse(f"must be 0 to 1, got {request.score_threshold:g}", "score_threshold")
    if request.HasField("filter"):
        _filter(request.filter, "filter")
    for name in ("embedding_weight", "text_weight", "late_weight"):
        weight = getattr(request.ranking, name)
        if not (0 <= weight < inf):
            raise _refuse(f"must not be negative, got {weight:g}", f"ranking.{name}")


def check_index(request: pb.IndexRequest, window: int) -> None:
    """`window`: tokens that the embedding model takes of a chunk."""
    _tenant(request.caller.tenant)
    _id(request.collection, "collection")
    _id(request.source_id, "source_id")
    if len(request.title) > MAX_TITLE_CHARS:
        raise _refuse(f"is longer than {MAX_TITLE_CHARS} characters", "title")
    _id(request.blob, "blob", _MAX_KEY_CHARS)
    if (cut := request.chunking).max_tokens:
        if not MIN_CHUNK_TOKENS <= cut.max_tokens <= window:
            raise _refuse(
                f"must be {MIN_CHUNK_TOKENS} to {window}, got {cut.max_tokens}",
                "chunking.max_tokens",
            )
        if cut.overlap_tokens > cut.max_tokens // 2:
            raise _refuse("is more than half of max_tokens", "chunking.overlap_tokens")


def check_read(request: pb.ReadRequest) -> None:
    _tenant(request.caller.tenant)
    if len(request.title) > MAX_TITLE_CHARS:
        raise _refuse(f"is longer than {MAX_TITLE_CHARS} characters", "title")
    _id(request.blob, "blob", _MAX_KEY_CHARS)


def check_remove(request: pb.RemoveRequest) -> None:
    _tenant(request.caller.tenant)
    _id(request.collection, "collection")
    if request.source_id:
        _id(request.source_id, "source_id")


def check_set_attributes(request: pb.SetAttributesRequest) -> None:
    _tenant(request.caller.tenant)
    _id(request.collection, "collection")
    _id(request.source_id, "source_id")


def _filter(where: pb.Filter, param: str) -> None:
    """The depth is bounded by the message itself, the breadth by its bytes."""
    kind = where.WhichOneof("kind")
    if kind == "compound":
        if not where.compound.filters:
            raise _refuse("must hold one filter at least", f"{param}.compound.filters")
        for i, one in enumerate(where.compound.filters):
            _filter(one, f"{param}.compound.filters[{i}]")
    elif kind == "comparison":
        values, operator = where.comparison.values, where.comparison.operator
        many = operator in (pb.Filter.IN, pb.Filter.NIN)
        if not values or (len(values) > 1 and not many):
            raise _refuse(f"has {len(values)} values", f"{param}.comparison.values")
        bounds = (pb.Filter.GT, pb.Filter.GTE, pb.Filter.LT, pb.Filter.LTE)
        if operator in bounds and values[0].WhichOneof("kind") != "number":
            raise _refuse("is compared with numbers alone", f"{param}.comparison.values")
    else:
        raise _refuse("is neither a comparison nor a compound", param)


def _tenant(tenant: str) -> None:
    if not tenant:
        raise _refuse("must name the authenticated tenant", "caller.tenant")


def _id(value: str, param: str, most: int = MAX_ID_CHARS) -> None:
    if not 1 <= len(value) <= most:
        raise _refuse(f"must have 1 to {most} characters, has {len(value)}", param)


def _refuse(message: str, param: str) -> PenstockError:
    return invalid(f"{param} {message}", param, stage="retrieval")
