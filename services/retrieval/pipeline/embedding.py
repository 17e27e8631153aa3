"""Embed: vectors of a caller's texts."""

from protos import retrieval_pb2 as pb
from services.common.errors import PenstockError, invalid
from services.common.policy import Subject
from services.common.telemetry.spans import Span
from services.retrieval import requests
from services.retrieval.pipeline.judging import checked, policy_of
from services.retrieval.pipeline.parts import Parts


async def embed(parts: Parts, request: pb.EmbedRequest, span: Span) -> pb.EmbedReply:
    """A text longer than the model's window is refused, never embedded in part."""
    requests.check_embed(request)
    reader = parts.model.reader
    tenant, policy, given = (
        request.caller.tenant,
        policy_of(parts, request.policy),
        [*request.texts],
    )
    for i, one in enumerate(given):
        if reader.hopeless(one):  # what is refused anyway costs the policy nothing
            raise _too_long(i, reader.max_tokens)
    if policy.texts.has("input"):
        subjects = [Subject(f"texts[{i}]", "input", t, "user") for i, t in enumerate(given)]
        given = await checked(parts, policy, tenant, subjects, span)
    texts = await parts.texts.run(tenant, lambda: [reader.text(t) for t in given])
    for i, text in enumerate(texts):
        if text.cut:
            raise _too_long(i, reader.max_tokens)
    tokens = sum(len(text.ids) for text in texts)
    span.set_attributes({"texts": len(texts), "tokens": tokens})
    vectors = await parts.embedder.embed(tenant, [text.ids for text in texts])
    return pb.EmbedReply(
        model=parts.model.name, vectors=[pb.Vector(values=v) for v in vectors], tokens=tokens
    )


def _too_long(number: int, window: int) -> PenstockError:
    return invalid(
        f"texts[{number}] is longer than the model's window of {window} tokens",
        f"texts[{number}]",
        reason="context_length_exceeded",
        stage="retrieval",
    )
