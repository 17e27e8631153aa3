"""What of OpenAI's and Anthropic's APIs Penstock does not offer: clients that call it are told so
by its name, and what does instead, where there is something (docs/api.md, decision 0073)."""

import re
from typing import NamedTuple

import grpc

from services.common.errors import PenstockError
from services.gateway.api.rest.http import Exchange
from services.gateway.parts import Gateway

_TENANTS = "tenants, keys, limits and budgets are of the admin API"
_AGENTS = "an agent runs at its client, with Responses or Messages"


class Missing(NamedTuple):
    """A part of an API: of OpenAI's, if not said otherwise."""

    what: str
    instead: str = ""


NOT_OFFERED = {
    "/v1/agents": Missing("agents", _AGENTS),
    "/v1/assistants": Missing("assistants", "Responses with a conversation do"),
    "/v1/audio": Missing("audio"),
    "/v1/chatkit": Missing("ChatKit"),
    "/v1/complete": Missing("Anthropic's text completions", "POST /v1/messages does"),
    "/v1/containers": Missing("containers"),
    "/v1/content_provenance_checks": Missing("checks of content's provenance"),
    "/v1/decisions": Missing("decisions"),
    "/v1/deployments": Missing("Anthropic's deployments"),
    "/v1/edits": Missing("edits", "a chat does"),
    "/v1/environments": Missing("Anthropic's environments"),
    "/v1/evals": Missing("evals"),
    "/v1/fine_tuning": Missing("fine-tuning", "models are files that the operator serves"),
    "/v1/images": Missing("images"),
    "/v1/live": Missing("live sessions"),
    "/v1/memory_stores": Missing("Anthropic's memory stores"),
    "/v1/messages/batches": Missing("Anthropic's message batches", "POST /v1/batches does"),
    "/v1/organization": Missing("administration of organizations", _TENANTS),
    "/v1/organizations": Missing("Anthropic's administration of organizations", _TENANTS),
    "/v1/projects": Missing("administration of projects", _TENANTS),
    "/v1/realtime": Missing("realtime sessions"),
    "/v1/responses/compact": Missing(
        "compaction of a response's input", "'truncation': \"auto\" leaves the oldest turns out"
    ),
    "/v1/safety": Missing("safety cases"),
    "/v1/sessions": Missing("Anthropic's sessions", _AGENTS),
    "/v1/skills": Missing("skills"),
    "/v1/threads": Missing("threads of assistants", "Responses with a conversation do"),
    "/v1/tunnels": Missing("Anthropic's tunnels"),
    "/v1/user_profiles": Missing("Anthropic's user profiles"),
    "/v1/vaults": Missing("vaults"),
    "/v1/videos": Missing("videos"),
    "/v1/webhook_endpoints": Missing("webhooks"),
    "/v1/webhook_event_types": Missing("webhooks"),
}
"""By the beginning of their paths."""
SHADOWED = frozenset({"/v1/responses/compact"})
"""Paths that would be taken for another one's id."""
_BEGINNING = re.compile(r"/v1/(?:(?:responses|messages)/)?[^/]+")


async def no_such_path(gateway: Gateway, exchange: Exchange) -> None:
    """Raises NOT_FOUND: "not_offered" of what is known, else "unknown_url". No client tries a 404
    again, as it would a 501."""
    begins = _BEGINNING.match(exchange.target)
    missing = NOT_OFFERED.get(begins[0]) if begins else None
    url = f"{exchange.method} {exchange.target[:200]}"
    if missing is None:
        raise _not_found(f"Unknown request URL: {url}.", "unknown_url")
    told = f"Not offered here: {missing.what} ({url})"
    told += f"; {missing.instead}." if missing.instead else "."
    raise _not_found(told, "not_offered")


def _not_found(message: str, reason: str) -> PenstockError:
    return PenstockError(grpc.StatusCode.NOT_FOUND, message, stage="gateway", reason=reason)
