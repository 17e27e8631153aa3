"""Rules that match by meaning, asked of retrieval, which has the embedding model.

It takes some ten milliseconds, so it runs beside the request: the answer's first text waits for it,
which takes longer itself. Only where a rule would route the request does the request wait, too.
"""

import asyncio
from collections.abc import Container, Sequence

from protos.common_pb2 import Caller
from protos.retrieval_pb2 import JudgedText, JudgeReply, JudgeRequest
from services.common.errors import PenstockError, invalid
from services.common.policy import Policy, RuleSpec
from services.common.policy.metrics import VERDICTS
from services.common.telemetry.spans import Span
from services.common.telemetry.telemetry import decision
from services.common.text.content import text_of
from services.gateway.runs.prompt import Prompt
from services.gateway.runs.records import Journal
from services.gateway.stores.retrieval.client import RetrievalClient, is_outage

Text = tuple[str, str]
"""The field that it is from, and what it says."""

_ROLES = ("user", "system", "developer", "tool")
_LATEST = 4  # messages of a conversation
_AT_ONCE = 16  # texts that are asked about: well within what a judgement may take
_MOST = 4096  # texts of a request


class Judgement:
    """Of one request."""

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        journal: Journal,
        given: Sequence[Text] = (),
    ) -> None:
        """Of prompts, or of texts `given` for numbers, with the fields that they are from."""
        self._rules = [rule for rule in policy.rules.by_meaning if "input" in rule.where]
        self._policy = policy
        self._journal = journal
        roles = {role for rule in self._rules for role in rule.roles or _ROLES}
        self._texts: list[tuple[str, JudgedText]] = []
        for prompt in prompts if self._rules else ():
            self._texts += _of_prompt(prompt, roles)
        if "user" in roles:
            self._texts += [(param, JudgedText(text=text, role="user")) for param, text in given]
        self._texts = [(param, one) for param, one in self._texts if one.text.strip()]
        self._of_numbers = bool(given)
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
        if len(self._texts) > _MOST:
            why = f"rules of meaning are asked about {_MOST} texts of a request, and no more"
            raise invalid(why, self._texts[_MOST][0], reason="policy_too_much", stage="gateway")
        matches: list[JudgeReply.Match] = []
        try:
            for first in range(0, len(self._texts), _AT_ONCE):
                texts = [one for _, one in self._texts[first : first + _AT_ONCE]]
                request = JudgeRequest(caller=caller, texts=texts, policy=self._policy.digest)
                reply = await retrieval.judge(request, span, self._journal.below)
                matches += [_moved(match, first) for match in reply.matches]
        except PenstockError as error:
            if not is_outage(error):
                raise
            self._away(error)
        self._take(matches)

    def _away(self, error: PenstockError) -> None:
        told = {rule.name: rule.like.away for rule in self._rules if rule.like is not None}
        self._journal.decide(
            "policy", "not asked", version=self._policy.version, why=error.message, **told
        )
        for rule in self._rules:
            if rule.like is not None and rule.like.away == "refuse":
                VERDICTS.labels(rule.name, "refuse", "input").inc()
                raise _refusal(rule, self._texts[0][0])

    def _take(self, matches: Sequence[JudgeReply.Match]) -> None:
        known = {rule.name: rule for rule in self._rules}
        found = [match for match in matches if match.rule in known]
        found.sort(key=lambda match: match.text)
        if not found:
            return
        actions, told = set(), {}
        for match in found:
            rule = known[match.rule]
            VERDICTS.labels(rule.name, rule.action, "input").inc()
            actions.add(rule.action)
            told[rule.name] = f"{rule.action}, in input, {match.score:.2f}"
        done = next(a for a in ("refuse", "route", "flag") if a in actions)
        reasons = {"version": self._policy.version, **told}
        self._journal.decisions.append(decision("gateway", "policy", done, reasons))
        for match in found:
            rule = known[match.rule]
            if rule.action == "refuse":
                raise _refusal(rule, self._texts[match.text][0])
            if rule.action == "route" and self._of_numbers:  # another model's say something else
                raise _refusal(rule, "model")
            self._routed = self._routed or rule.model


def _moved(match: JudgeReply.Match, by: int) -> JudgeReply.Match:
    return JudgeReply.Match(rule=match.rule, text=match.text + by, score=match.score)


def _of_prompt(prompt: Prompt, roles: Container[str]) -> list[tuple[str, JudgedText]]:
    """Token ids are not among them: what they say is the tokenizer's to tell."""
    if prompt.request.text:
        one = JudgedText(text=prompt.request.text, role="user")
        return [(prompt.param or "prompt", one)] if "user" in roles else []
    of_chat = [
        (f"messages[{index}].content", JudgedText(text=text_of(message), role=message.role))
        for index, message in enumerate(prompt.request.chat.messages)
        if message.role in roles
    ]
    return of_chat[-_LATEST:]


def _refusal(rule: RuleSpec, param: str) -> PenstockError:
    message = f"refused by the content policy, rule {rule.name!r}"
    return invalid(message, param, reason="content_policy", stage="gateway")
