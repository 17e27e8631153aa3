"""Read, and how Index begins: a document's text, as the policy lets it be."""

from collections.abc import AsyncIterator, Awaitable, Callable

from protos import retrieval_pb2 as pb
from services.common.blobs import NoBlobError
from services.common.errors import PenstockError, invalid
from services.common.policy import Policy
from services.common.telemetry.spans import Span
from services.retrieval import requests
from services.retrieval.documents.chunkers import Loaded
from services.retrieval.pipeline.judging import check_document, policy_of
from services.retrieval.pipeline.parts import Parts

_PIECE_CHARS = 64 * 1024  # some 200 kB at most
_BETWEEN = "\n\n"  # sections

Tell = Callable[[pb.ReadPiece], Awaitable[object]]


async def read(parts: Parts, request: pb.ReadRequest, span: Span, tell: Tell) -> None:
    """Tells it in pieces; one at least."""
    requests.check_read(request)
    tenant, place = request.caller.tenant, (request.blob, request.title)
    check_owner(parts, tenant, request.blob)
    policy = policy_of(parts, request.policy)
    _, loaded = await load(parts, tenant, *place, policy, span)
    text = _BETWEEN.join(section.text for section in loaded.sections)
    span.set_attribute("chars", len(text))
    for at in range(0, max(1, len(text)), _PIECE_CHARS):
        await tell(pb.ReadPiece(at=at, text=text[at : at + _PIECE_CHARS]))


async def load(
    parts: Parts, tenant: str, blob: str, title: str, policy: Policy, span: Span
) -> tuple[str, Loaded]:
    """Its title and its text. Raises INVALID_ARGUMENT for what cannot be read, or may not."""
    with parts.telemetry.span("load", span) as step:
        try:
            size = await parts.blobs.size(blob)
        except NoBlobError:
            raise _no_blob() from None
        step.set_attribute("bytes", size)
        loaded = await parts.chunkers.load(tenant, title, size, blob_of(parts, blob))
        if policy.texts.has("uploads"):
            title, sections = await check_document(
                parts, policy, tenant, title, loaded.sections, step
            )
            loaded = loaded._replace(sections=sections)
    return title, loaded


def check_owner(parts: Parts, tenant: str, blob: str) -> None:
    """Raises INVALID_ARGUMENT for another tenant's."""
    if not blob.startswith(parts.blobs.key(tenant, "")):
        raise _no_blob()


async def blob_of(parts: Parts, key: str) -> AsyncIterator[bytes]:
    try:
        async for piece in parts.blobs.read(key):
            yield piece
    except NoBlobError:
        raise _no_blob() from None


def _no_blob() -> PenstockError:
    return invalid("the file is gone", "file", reason="invalid_file", stage="retrieval")
