"""POST /v1/moderations: what the policy says of texts."""

from typing import Any

from services.gateway.api.moderation_schema import POLICY, ModerationRequest
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.openai_format import priced
from services.gateway.api.rest.pooled import asked_of
from services.gateway.api.schema import parse, read_aside
from services.gateway.identity.principal import Principal
from services.gateway.intake import Place
from services.gateway.parts import Gateway
from services.gateway.runs.moderation import CATEGORIES, Judged, Scores, moderate
from services.gateway.runs.recorded import recorded
from services.gateway.runs.records import Journal


async def create_moderation(gateway: Gateway, exchange: Exchange) -> None:
    asked = asked_of(exchange)

    async def work(principal: Principal, place: Place, journal: Journal) -> None:
        exchange.place = place
        content = await exchange.json_body()
        texts = await read_aside(len(content), lambda: parse(ModerationRequest, content).texts())
        exchange.watch_client()
        judged = await moderate(gateway, asked, principal, journal, texts)
        exchange.headers_out.update(judged.headers)
        await exchange.reply_json(_told(exchange.request_id, judged))

    await recorded(gateway, asked, work, exchange.principal)


def _told(request_id: str, judged: Judged) -> dict[str, Any]:
    names = list(dict.fromkeys((*CATEGORIES, *judged.known)))
    types = {name: ["text"] if name in judged.known else [] for name in names}
    return {
        "id": "modr-" + request_id.removeprefix("req_"),
        "model": POLICY,
        "results": [_result(scores, names, types) for scores in judged.scores],
        "penstock": {
            "request_id": request_id,
            "policy": judged.version,
            "judged": judged.known,
            **priced(judged.cost),
        },
    }


def _result(scores: Scores, names: list[str], types: dict[str, list[str]]) -> dict[str, Any]:
    return {
        "flagged": bool(scores),
        "categories": {name: name in scores for name in names},
        "category_scores": {name: scores.get(name, 0.0) for name in names},
        "category_applied_input_types": types,
    }
