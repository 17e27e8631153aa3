"""What a chat's stores are searched for."""

from collections.abc import Iterable
from typing import NamedTuple

from protos.common_pb2 import Message
from services.common.errors import PenstockError
from services.common.text.content import text_of
from services.gateway import metrics
from services.gateway.identity.principal import Principal
from services.gateway.metering.meter import Metered
from services.gateway.parts import Gateway
from services.gateway.runs.prompt import Prompt
from services.gateway.runs.records import Journal
from services.gateway.runs.rewriting.by_model import by_model
from services.gateway.runs.rewriting.rule import Rewritten, Turn, rewrite


class Query(NamedTuple):
    text: str
    by: str = ""  # rule, model; empty: as it was asked


async def whole_question(
    gateway: Gateway, principal: Principal, prompt: Prompt, metered: Metered, journal: Journal
) -> Query:
    """The prompt's question, made whole by the turns before it where it leans on them."""
    own = gateway.settings.retrieval
    turns = turns_of(prompt.request.chat.messages)
    if own.rewriting == "off" or not turns:
        return Query(prompt.question)
    ruled = rewrite(turns, prompt.question)
    query = Query(ruled.query, "rule" if ruled.added else "")
    told: dict[str, str] = {}
    if own.rewriting_model and ruled.why != "whole":
        query, told = await _asked(gateway, principal, metered, turns, prompt, ruled, journal)
    metrics.rewritten.labels(query.by or "left").inc()
    if gateway.settings.log_prompts:
        told["query"] = query.text
    journal.decide("query", query.by or "left", why=ruled.why, words_added=ruled.added, **told)
    return query


async def _asked(
    gateway: Gateway,
    principal: Principal,
    metered: Metered,
    turns: list[Turn],
    prompt: Prompt,
    ruled: Rewritten,
    journal: Journal,
) -> tuple[Query, dict[str, str]]:
    """By the model that is named for it, or else the rule; and what the record is told of it."""
    with gateway.telemetry.span(
        "rewrite", model=gateway.settings.retrieval.rewriting_model
    ) as span:
        try:
            text = await by_model(
                gateway, principal, metered, turns, prompt.question, span, journal
            )
            return Query(text, "model"), {}
        except PenstockError as error:
            failed = error.reason or error.code.name.lower()
        except TimeoutError:
            failed = "timeout"
        except ValueError:
            failed = "no_question"
        span.set_attribute("error", failed)
    return Query(ruled.query, "rule" if ruled.added else ""), {"model": failed}


def turns_of(messages: Iterable[Message]) -> list[Turn]:
    """Before the last question; what came of tools and of the system is none of them."""
    turns: list[Turn] = []
    for message in messages:
        if message.role == "user":
            turns.append(Turn(text_of(message)))
        elif message.role == "assistant" and turns:
            last = turns[-1]
            turns[-1] = last._replace(answer=f"{last.answer} {text_of(message)}".strip())
    return turns[:-1]
