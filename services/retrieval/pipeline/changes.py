"""Remove and SetAttributes: what is taken out of a store, or said anew of a document there."""

from protos import retrieval_pb2 as pb
from services.common.telemetry.spans import Span
from services.retrieval import requests
from services.retrieval.pipeline.parts import Parts


async def remove(parts: Parts, request: pb.RemoveRequest, span: Span) -> pb.RemoveReply:
    requests.check_remove(request)
    with parts.telemetry.span("store", span, kind=parts.calls.kind) as step:
        chunks = await parts.store.remove(
            request.caller.tenant, request.collection, request.source_id, request.revision
        )
        step.set_attribute("chunks", chunks)
    return pb.RemoveReply(chunks=chunks)


async def set_attributes(
    parts: Parts, request: pb.SetAttributesRequest, span: Span
) -> pb.SetAttributesReply:
    requests.check_set_attributes(request)
    with parts.telemetry.span("store", span, kind=parts.calls.kind):
        await parts.store.set_attributes(
            request.caller.tenant, request.collection, request.source_id, request.attributes
        )
    return pb.SetAttributesReply()
