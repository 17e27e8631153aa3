"""What the policy's rules say of texts, without anything being done about them: each is judged by
itself, as a user's message would be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from protos.common_pb2 import Usage
from protos.retrieval_pb2 import JudgedText, JudgeRequest
from services.common.errors import invalid
from services.common.policy import Policy, RuleSpec, Subject
from services.common.telemetry.spans import Span
from services.common.telemetry.telemetry import decision
from services.gateway.api.moderation_schema import POLICY
from services.gateway.identity.principal import Principal
from services.gateway.metering.estimate import of_texts
from services.gateway.metering.prices import Cost
from services.gateway.parts import Gateway
from services.gateway.runs.front import Asked
from services.gateway.runs.records import Journal

CATEGORIES = (
    "harassment",
    "harassment/threatening",
    "hate",
    "hate/threatening",
    "illicit",
    "illicit/violent",
    "self-harm",
    "self-harm/instructions",
    "self-harm/intent",
    "sexual",
    "sexual/minors",
    "violence",
    "violence/graphic",
)
"""Those that OpenAI's clients read of every answer."""
_AT_ONCE = 16  # texts that retrieval is asked about
Scores = dict[str, float]


@dataclass
class Judged:
    """Of each text, by category, how sure a rule is that found something."""

    version: str
    known: Sequence[str]  # categories that there are rules of
    scores: list[Scores] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    cost: Cost | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


async def moderate(
    gateway: Gateway, asked: Asked, principal: Principal, journal: Journal, texts: Sequence[str]
) -> Judged:
    """Raises INVALID_ARGUMENT where no rule is for what users say, or one of them cannot look at
    all of it; UNAVAILABLE where a rule of meaning has nobody to ask."""
    journal.model = journal.served = POLICY
    policy = gateway.policy.current
    rules = [rule for rule in policy.rules.spec.rules if _is_for_users(rule)]
    if not rules:
        why = "No rule of the policy is for what users say: nothing can be judged."
        raise invalid(why, "", reason="no_rules", stage="gateway")
    of_rules = {rule.name: rule.category or rule.name for rule in rules}
    judged = Judged(policy.version, list(dict.fromkeys(of_rules.values())))
    tokens = of_texts(texts)
    metered = journal.metered = await gateway.meter.admit(
        principal, asked.request_id, asked.route, POLICY, (tokens, 0)
    )
    judged.headers = metered.headers
    metered.usage = lambda: judged.usage

    with gateway.telemetry.span("judge", texts=len(texts)) as span:
        found = await _by_text(gateway, principal.tenant, policy, texts)
        if any(rule.like is not None for rule in rules):
            await _by_meaning(gateway, asked, principal, policy, texts, found, span, journal)
    for names in found:
        told: Scores = {}
        for name, score in names.items():
            if (category := of_rules.get(name)) is not None:
                told[category] = max(score, told.get(category, 0.0))
        judged.scores.append(told)
    _note(journal, policy, found)
    journal.usage = judged.usage = Usage(prompt_tokens=tokens)
    await gateway.meter.settle(metered)
    judged.cost = metered.cost
    return judged


def _is_for_users(rule: RuleSpec) -> bool:
    return "input" in rule.where and (rule.roles is None or "user" in rule.roles)


async def _by_text(
    gateway: Gateway, tenant: str, policy: Policy, texts: Sequence[str]
) -> list[Scores]:
    """Of each text the rules that found something in it, by name."""
    subjects = [Subject(f"input[{n}]", "input", text, "user") for n, text in enumerate(texts)]
    verdicts = await gateway.threads.run(
        tenant, partial(gateway.policy.check_each, policy, subjects)
    )
    return [{rule: 1.0 for rule, _, _ in verdict.hits} for verdict in verdicts]


async def _by_meaning(
    gateway: Gateway,
    asked: Asked,
    principal: Principal,
    policy: Policy,
    texts: Sequence[str],
    found: list[Scores],
    span: Span,
    journal: Journal,
) -> None:
    """Likewise, with the cosine."""
    said = [index for index, text in enumerate(texts) if text.strip()]
    for first in range(0, len(said), _AT_ONCE):
        some = said[first : first + _AT_ONCE]
        request = JudgeRequest(
            caller=principal.caller(asked.request_id),
            texts=[JudgedText(text=texts[index], role="user") for index in some],
            policy=policy.digest,
        )
        reply = await gateway.retrieval.judge(request, span, journal.below)
        for match in reply.matches:
            found[some[match.text]][match.rule] = match.score


def _note(journal: Journal, policy: Policy, found: Sequence[Scores]) -> None:
    counts: dict[str, Any] = {}
    for names in found:
        for name in names:
            counts[name] = counts.get(name, 0) + 1
    flagged = sum(map(bool, found))
    told = {"version": policy.version, "texts": len(found), "flagged": flagged, **counts}
    journal.decisions.append(decision("gateway", "policy", "judged", told))
