"""Rules that match by meaning, asked of retrieval, which has the embedding model.

It takes some ten milliseconds, so it runs beside the request: the answer's first text waits for it,
which takes longer itself. Only where a rule would route the request does the request wait, too.
"""

import asyncio
from collections.abc import Sequence

from protos.common_pb2 import Caller
from protos.retrieval_pb2 import JudgedText, JudgeReply, JudgeRequest
from services.common.content import text_of
from services.common.errors import PenstockError, invalid
from services.common.policy import Policy, RuleSpec
from services.common.policy.metrics import VERDICTS
from services.common.spans import Span
from services.common.telemetry import decision
from services.gateway.runs.prompt import Prompt
from services.gateway.runs.records import Journal
from services.gateway.stores.retrieval_client import RetrievalClient, is_outage

_ROLES = ("system", "developer", "user", "tool")
_LATEST = 4  # messages of a conversation
_MOST = 64  # texts of a request: retrieval's own bound


class Judgement:
    """Of one request."""

    def __init__(self, policy: Policy, prompts: Sequence[Prompt], journal: Journal) -> None:
        self._rules = [rule for rule in policy.rules.by_meaning if "input" in rule.where]
        self._version = policy.version
        self._journal = journal
        self._texts = _texts(self._rules, prompts) if self._rules else []
        self._asked: asyncio.Task[None] | None = None
        self._routed: str | None = None

    def begin(self, retrieval: RetrievalClient, caller: Caller, span: Span) -> None:
        if self._texts:
            asking = self._ask(retrieval, caller, span)
            self._asked = asyncio.create_task(asking, name="judgement")

    def cancel(self) -> None:
        if self._asked is not None:
            self._asked.cancel()

    async def route(self) -> str | None:
        """The model to which a rule sends the request, before that goes anywhere."""
        if any(rule.action == "route" for rule in self._rules):
            await self.settled()
        return self._routed

    async def settled(self) -> None:
        """Raises INVALID_ARGUMENT that names the rule and the field of what is refused."""
        if self._asked is not None:
            await asyncio.shield(self._asked)

    async def _ask(self, retrieval: RetrievalClient, caller: Caller, span: Span) -> None:
        texts = [one for _, one in self._texts]
        request = JudgeRequest(caller=caller, texts=texts)
        try:
            reply = await retrieval.judge(request, span, self._journal.below)
        except PenstockError as error:
            if not is_outage(error):
                raise
            return self._away(error)
        self._take(reply)

    def _away(self, error: PenstockError) -> None:
        told = {rule.name: rule.like.away for rule in self._rules if rule.like is not None}
        self._journal.decide(
            "policy", "not asked", version=self._version, why=error.message, **told
        )
        for rule in self._rules:
            if rule.like is not None and rule.like.away == "refuse":
                VERDICTS.labels(rule.name, "refuse", "input").inc()
                raise _refusal(rule, self._texts[0][0])

    def _take(self, reply: JudgeReply) -> None:
        known = {rule.name: rule for rule in self._rules}
        matches = [match for match in reply.matches if match.rule in known]
        found = sorted(matches, key=lambda match: match.text)
        if not found:
            return
        actions, told = set(), {}
        for match in found:
            rule = known[match.rule]
            VERDICTS.labels(rule.name, rule.action, "input").inc()
            actions.add(rule.action)
            told[rule.name] = f"{rule.action}, in input, {match.score:.2f}"
        done = next(a for a in ("refuse", "route", "flag") if a in actions)
        reasons = {"version": self._version, **told}
        self._journal.decisions.append(decision("gateway", "policy", done, reasons))
        for match in found:
            rule = known[match.rule]
            if rule.action == "refuse":
                raise _refusal(rule, self._texts[match.text][0])
            self._routed = self._routed or rule.model


def _texts(rules: Sequence[RuleSpec], prompts: Sequence[Prompt]) -> list[tuple[str, JudgedText]]:
    """With the fields that they are from. Prompts of token ids are not among them: what they say is
    the tokenizer's to tell."""
    roles = {
        role for rule in rules for role in rule.roles or ("user", "system", "developer", "tool")
    }
    found: list[tuple[str, JudgedText]] = []
    for prompt in prompts:
        if prompt.request.text and "user" in roles:
            one = JudgedText(text=prompt.request.text, role="user")
            found.append((prompt.param or "prompt", one))
        of_chat = [
            (f"messages[{index}].content", JudgedText(text=text_of(message), role=message.role))
            for index, message in enumerate(prompt.request.chat.messages)
            if message.role in roles
        ]
        found += of_chat[-_LATEST:]
    return [(param, one) for param, one in found if one.text.strip()][:_MOST]


def _refusal(rule: RuleSpec, param: str) -> PenstockError:
    message = f"refused by the content policy, rule {rule.name!r}"
    return invalid(message, param, reason="content_policy", stage="gateway")
