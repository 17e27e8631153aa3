"""The policy on one answer while it is written: on its text, its reasoning and its calls, each by
itself, and on the logprobs of what has left.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from protos.tokenizer_pb2 import TextLogprob, ToolCallDelta
from services.common.policy import Policy, RuleSpec
from services.common.policy.stream import AnswerRules, Filter
from services.tokenizer.tool_parsers import Said


class AnswerPolicy:
    """What of an answer's parts may leave. Given token by token, it depends on the tokens alone."""

    def __init__(self, policy: Policy, *, shaped: bool, json: bool, logprobs: bool) -> None:
        """`shaped`: there are kinds of text, not text alone; `json`: the text is JSON; `logprobs`:
        they are wanted."""
        self._output, self._arguments = policy.output, policy.tool_arguments
        self._text = _filter(self._output, json)
        self._reasoning = _filter(self._output, False)
        self._calls: list[Filter] = []
        self._reasons = True  # what comes may be reasoning
        # What the parts are cut from, for logprobs: they are of tokens, whatever those become.
        self._raw = _raw(policy) if logprobs and shaped else None
        self._logprobs = Logprobs(self._raw or self._text) if logprobs else None
        self.blocked: RuleSpec | None = None

    @classmethod
    def of(
        cls, policy: Policy, *, shaped: bool, json: bool, logprobs: bool
    ) -> "AnswerPolicy | None":
        """None: no rule is for answers."""
        if policy.output is None and policy.tool_arguments is None:
            return None
        return cls(policy, shaped=shaped, json=json, logprobs=logprobs)

    @property
    def hits(self) -> Counter[tuple[str, str, str]]:
        """How often each rule did what, where."""
        found: Counter[tuple[str, str, str]] = Counter()
        for one in (self._text, self._reasoning, *self._calls):
            if one is not None:
                for (rule, action), times in one.hits.items():
                    found[rule, action, one.place] += times
        return found

    @property
    def hides_stop(self) -> bool:
        """Whether the stop string that ended the text is a part of what a rule found."""
        return self._text is not None and self._text.reached_cut

    def push(self, said: Said, raw: str) -> Said:
        """What of it may leave now; `raw` is what it is made of."""
        if self.blocked is not None:
            return Said()
        if self._raw is not None:
            self._raw.push(raw)
        out = Said()
        out.reasoning = self._through(self._reasoning, said.reasoning)
        if self._reasons and (said.text or said.calls):
            self._reasons = False
            out.reasoning += self._ended(self._reasoning)
        # A call that went on ends before the text behind it leaves, and before the next begins.
        goes_on = list(takewhile(lambda call: not call.name, said.calls))
        for call in goes_on:
            out.calls += self._called(call)
        if said.text:
            out.calls += self._last_call()
            if self.blocked is None:
                out.text = self._through(self._text, said.text)
        for call in said.calls[len(goes_on) :]:
            out.calls += self._called(call)
        return out

    def flush(self, cut: str = "") -> Said:
        """What was held back, at the end; `cut`: the stop string that the text ended with."""
        out = Said()
        if self._raw is not None:
            self._raw.flush()
        if self.blocked is None:
            out.reasoning = self._ended(self._reasoning) if self._reasons else ""
        if self.blocked is None:
            out.text = self._ended(self._text, cut)
        out.calls += self._last_call()
        return out

    def _called(self, call: ToolCallDelta) -> list[ToolCallDelta]:
        if self.blocked is not None:
            return []
        if self._arguments is None:
            return [call]
        told: list[ToolCallDelta] = []
        if call.name:
            told += self._last_call()
            named = Filter(self._arguments)
            named.push(call.name)
            named.flush()
            self._calls.append(Filter(self._arguments, json=True))
            # A name is said whole or not at all: another one would call something else.
            if self.blocked is None and named.changed is not None:
                self._calls[-1] = named
                self.blocked = named.changed
            if self.blocked is not None:
                return told
        arguments = self._through(self._calls[-1], call.arguments)
        if call.name or arguments:
            told.append(ToolCallDelta(index=call.index, name=call.name, arguments=arguments))
        return told

    def _last_call(self) -> list[ToolCallDelta]:
        """The rest of the call that was the last."""
        if self.blocked is not None:
            return []
        rest = self._ended(self._calls[-1]) if self._calls else ""
        return [ToolCallDelta(index=len(self._calls) - 1, arguments=rest)] if rest else []

    def _through(self, one: Filter | None, text: str) -> str:
        if one is None or not text:
            return text
        passed = one.push(text)
        self.blocked = self.blocked or one.blocked
        return passed

    def _ended(self, one: Filter | None, cut: str = "") -> str:
        if one is None:
            return ""
        passed = one.flush(cut)
        self.blocked = self.blocked or one.blocked
        return passed

    # ---- logprobs -----------------------------------------------------------------------------

    def skip(self, end: int) -> None:
        """Logprobs up to this character were told by another tokenizer."""
        if self._logprobs is not None:
            self._logprobs.skip(end)

    def tell(self, ends: Sequence[int], told: Sequence[TextLogprob]) -> None:
        """Takes those of tokens; `ends`: where each ends in the text that they make."""
        assert self._logprobs is not None
        for end, one in zip(ends, told, strict=True):
            self._logprobs.add(end, one)

    def told(self, *, ended: bool) -> list[TextLogprob]:
        """Those of what has left, whole and unchanged.

        Of an answer of several kinds of text, when all of it may leave: a match may go on behind a
        call, or show only once a parser has read what is escaped.
        """
        assert self._logprobs is not None
        if self._raw is not None:
            if not ended or self.blocked is not None:
                return []
            if self._redactions() > self._raw.redactions:
                self._logprobs.stop()  # what was redacted cannot be found among the tokens
        return self._logprobs.released(ended=ended and self.blocked is None)

    def _redactions(self) -> int:
        filters = (self._text, self._reasoning, *self._calls)
        return sum(one.redactions for one in filters if one is not None)


class Logprobs:
    """Those of tokens whose text is held back, or was redacted, do not leave."""

    def __init__(self, text: Filter | None) -> None:
        self._text = text  # None: nothing is held back
        self._waiting: list[tuple[int, int, list[TextLogprob]]] = []  # of which characters
        self._end = 0
        self._of_next: list[TextLogprob] = []  # tokens that gave no character yet
        self._stopped = False

    def add(self, end: int, told: TextLogprob) -> None:
        """`end`: so many characters have come with this token; one that completes no character is
        of the next that does."""
        self._of_next.append(told)
        if end > self._end:
            self._waiting.append((self._end, end, self._of_next))
            self._end, self._of_next = end, []

    def skip(self, end: int) -> None:
        """Those of so many characters have left before."""
        self._end = end

    def stop(self) -> None:
        self._stopped = True

    def released(self, *, ended: bool) -> list[TextLogprob]:
        if self._stopped:
            return []
        if ended:
            self._waiting.append((self._end, self._end, self._of_next))
            self._of_next = []
        out: list[TextLogprob] = []
        while self._waiting:
            start, end, told = self._waiting[0]
            if self._text is not None and end > self._text.decided:
                break
            del self._waiting[0]
            if self._text is None or not self._text.hid(start, end):
                out += told
        return out


def _filter(rules: AnswerRules | None, json: bool) -> Filter | None:
    return None if rules is None else Filter(rules, json=json)


def _raw(policy: Policy) -> Filter:
    """Of all that an answer is made of, by the rules for all parts of it."""
    assert policy.answers is not None
    return Filter(policy.answers, escapes=True)
