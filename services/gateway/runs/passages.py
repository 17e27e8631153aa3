"""What a prompt's vector stores have on its question."""

from protos.common_pb2 import Caller, Passage
from protos.retrieval_pb2 import SearchRequest
from services.common.errors import PenstockError
from services.gateway import metrics
from services.gateway.identity.principal import Principal
from services.gateway.parts import Gateway
from services.gateway.runs.prompt import Prompt
from services.gateway.runs.records import Journal
from services.gateway.stores.retrieval_client import is_outage


async def retrieve(
    gateway: Gateway,
    principal: Principal,
    caller: Caller,
    prompt: Prompt,
    warnings: list[str],
    journal: Journal,
) -> None:
    """Adds passages to the prompt, or says in the warnings why there are none. Raises
    PERMISSION_DENIED where he may not use the embedding model."""
    found: list[Passage] = []
    with gateway.telemetry.span("retrieve", stores=len(prompt.stores)) as searching:
        request = SearchRequest(
            caller=caller,
            collections=prompt.stores,
            query=prompt.question,
            limit=prompt.max_passages,
        )
        try:
            model = await gateway.retrieval.model(gateway.settings.retrieval.timeout_s)
            principal.authorize_embedding(model)
            reply = await gateway.retrieval.search_for_chat(request, searching, journal.below)
            found.extend(reply.passages)
        except PenstockError as error:
            if not is_outage(error):
                raise
            cause = error.reason or error.code.name.lower()
            metrics.retrieval_skipped.labels(error.code.name.lower()).inc()
            journal.decide("retrieval", "skipped", cause=cause, message=error.message)
            warnings.append(f"answered without the vector stores: {error.message}")
            return
        searching.set_attribute("passages", len(found))
    best = found[0].score if found else 0.0
    journal.decide("retrieval", "searched", passages=len(found), best_score=best)
    prompt.request.chat.passages.extend(found)
