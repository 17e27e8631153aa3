"""What all requests through a tokenizer share, and what each of them begins with."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from protos.tokenizer_pb2 import PromptRequest
from services.common.fairness.fair_threads import FairThreads
from services.common.peers import Peers
from services.common.policy import PolicyFile
from services.common.telemetry.spans import Span
from services.common.telemetry.telemetry import Telemetry
from services.tokenizer.checkpoints.catalog import Catalog
from services.tokenizer.checkpoints.models import ServedModel
from services.tokenizer.warming.warming import Warming

T = TypeVar("T")


@dataclass(frozen=True)
class Pipeline:
    """What all requests share."""

    catalog: Catalog
    policy: PolicyFile
    routers: Peers
    router_patience_s: float
    pooled_at_once: int  # inputs of one request
    choices_at_once: int
    max_pooled_tokens: int  # of all its inputs
    telemetry: Telemetry
    threads: FairThreads
    warming: Warming


async def model_of(
    pipeline: Pipeline, request: PromptRequest, replaced: Collection[str], span: Span
) -> ServedModel:
    """The checkpoint that the request is for; of one that is gone on with, that of its beginning.
    Raises PenstockError."""
    if request.HasField("resume"):
        model = await pipeline.catalog.exactly(request.model, request.resume.checkpoint)
    else:
        model = await pipeline.catalog.find(request.model, replaced)
    for name, value in told_of(model).items():
        span.set_attribute(name, value)
    return model


def told_of(model: ServedModel) -> dict[str, str]:
    return {"model": model.name, "checkpoint": model.checkpoint}


async def threaded(
    pipeline: Pipeline, tenant: str, span: Span, name: str, work: Callable[[], T]
) -> T:
    """Waiting for a thread included."""
    with pipeline.telemetry.span(name, span):
        return await pipeline.threads.run(tenant, work)
