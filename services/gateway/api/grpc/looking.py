"""What is asked for of a tenant's own, in one message, and told in one."""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from google.protobuf.json_format import ParseDict

from protos.gateway_pb2 import (
    PublicGetRecordRequest,
    PublicRecord,
    PublicSearchStoreReply,
    PublicSearchStoreRequest,
)
from services.common.errors import invalid
from services.gateway.api.grpc.calls import (
    Context,
    Enter,
    admitted,
    answered,
    cost_of,
    tell_headers,
)
from services.gateway.api.grpc.fields import ranked
from services.gateway.api.grpc.inbox import Inbox
from services.gateway.api.grpc.plain import fields_of
from services.gateway.api.resources.store_search import SearchStore
from services.gateway.api.schema import validated
from services.gateway.identity.principal import Principal
from services.gateway.ids import REQUEST, not_found
from services.gateway.intake import Intake, Place
from services.gateway.parts import Gateway
from services.gateway.runs.records import Journal
from services.gateway.stores.retrieval.searching import search


class Look(NamedTuple):
    """One of the calls."""

    request: Any
    look: Callable[..., Awaitable[Any]]
    reply: Any
    enter: Enter


def looking(
    gateway: Gateway, inbox: Inbox, route: str, one: Look
) -> Callable[[object, Context], Awaitable[Any]]:
    """Its handler."""

    async def handler(_: object, context: Context) -> Any:
        async def answer(id: str, metadata: dict[str, str]) -> Any:
            async with admitted(gateway, metadata, route, one.enter) as (principal, place):
                request = inbox.parse(one.request, await inbox.take(place, context))
                return await one.look(gateway, context, id, principal, request, place)

        return await answered(route, context, answer)

    return handler


async def search_store(
    gateway: Gateway,
    context: Context,
    id: str,
    principal: Principal,
    request: PublicSearchStoreRequest,
    place: Place,
) -> PublicSearchStoreReply:
    if request.query and request.queries:
        raise invalid("A query or queries, not both.", "queries", stage="gateway")
    fields = ranked(fields_of(request, "vector_store_id", "query", "queries"))
    fields["query"] = list(request.queries) or request.query
    asked = validated(SearchStore, fields).search(request.vector_store_id)
    found = await search(gateway, id, "SearchStore", principal, asked)
    await tell_headers(context, found.headers)
    return PublicSearchStoreReply(
        passages=found.passages,
        warning=found.warning,
        age_s=found.age_s,
        search_query=asked.queries,
        tokens=found.tokens,
        reranked=found.reranking.by,
        not_reranked=found.reranking.failed,
        cost=cost_of(found.cost) if found.cost else None,
    )


async def get_record(
    gateway: Gateway,
    context: Context,
    id: str,
    principal: Principal,
    request: PublicGetRecordRequest,
    place: Place,
) -> PublicRecord:
    wanted = REQUEST.checked(request.request_id)
    journal = await gateway.records.look_up(wanted, principal.tenant)
    if journal is None:
        raise not_found("request", wanted)
    return _told(journal)


def _told(journal: Journal) -> PublicRecord:
    """What REST tells, with the cost as it is everywhere here."""
    told = journal.as_json()
    for name in ("object", "cost", "currency"):
        del told[name]
    record = ParseDict(told, PublicRecord())
    if journal.cost is not None:
        record.cost.CopyFrom(cost_of(journal.cost))
    return record


LOOKING = {
    "SearchStore": Look(
        PublicSearchStoreRequest, search_store, PublicSearchStoreReply, Intake.slot
    ),
    "GetRecord": Look(PublicGetRecordRequest, get_record, PublicRecord, Intake.visit),
}
