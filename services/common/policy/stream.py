"""Rules on a text while it is written: nothing of a match leaves, and all else leaves at once.

Held back is the longest end of the text in which a match may still be under way (pattern.py); all
before that is decided, whatever comes. So what leaves depends on the text alone, not on the
portions in which it comes: it is, at any time, a beginning of what the whole text gives.

    refuse   the text ends where the first match begins
    redact   a label stands in for a match; of matches that overlap, one label, of the first
    flag     nothing is changed, and nothing held back

Each rule looks at the text as it was written, whatever others redact.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

from services.common.policy.fold import View, view
from services.common.policy.recognizers import BEFORE
from services.common.policy.rules import Finder, Rules, union
from services.common.policy.schema import Place, RuleSpec


@dataclass(frozen=True)
class _Group:
    """Finders that look at a text in one way."""

    finders: tuple[Finder, ...]
    fold: bool

    @cached_property
    def any(self) -> Any:
        return union(self.finders)

    @cached_property
    def any_ends_in(self) -> Any:
        return union(self.finders, ends=True)


@dataclass(frozen=True)
class AnswerRules:
    """The rules for one place of answers, made once for all streams."""

    place: Place
    holding: tuple[_Group, ...]
    flagging: tuple[_Group, ...]

    @classmethod
    def of(cls, rules: Rules, *places: Place) -> "AnswerRules | None":
        """None: there is no rule for them. Raises ValueError for what is too much together."""
        finders = [f for f in rules.finders if any(place in f.rule.where for place in places)]
        if not finders:
            return None
        parts: list[tuple[_Group, ...]] = []
        for flags in (False, True):
            groups = []
            for fold in (True, False):
                of_group = [
                    f for f in finders if f.rule.fold is fold and (f.rule.action == "flag") is flags
                ]
                if of_group:
                    group = _Group(tuple(of_group), fold)
                    assert group.any is not None
                    assert group.any_ends_in is not None
                    groups.append(group)
            parts.append(tuple(groups))
        return cls(places[0], *parts)


class _Match(NamedTuple):
    """In characters of the whole text."""

    start: int
    order: int
    end: int
    finder: Finder


@dataclass
class _Seen:
    """What a group has behind it."""

    group: _Group
    before: bytes = b""  # what it saw last of the text that has left
    ahead: dict[int, int] = field(default_factory=dict)  # where finders go on, if not there


class Filter:
    """One text's. Plain calls; some 20 µs each, with a rule of everything."""

    def __init__(self, rules: AnswerRules, *, json: bool = False, escapes: bool = False) -> None:
        """`json`: the text is JSON, and a redaction that would break it is a refusal; `escapes`:
        those of JSON are read, as in a text that is."""
        self._holding = _Passage(rules.holding, json, json or escapes)
        self._flagging = _Passage(rules.flagging, json, json or escapes)
        self.place = rules.place

    @property
    def blocked(self) -> RuleSpec | None:
        """The rule that ended the text."""
        return self._holding.blocked

    @property
    def changed(self) -> RuleSpec | None:
        """The first rule that ended it or redacted something."""
        return self._holding.redacted or self._holding.blocked

    @property
    def hits(self) -> Counter[tuple[str, str]]:
        """How often each rule did what: (name, action)."""
        return self._holding.hits + self._flagging.hits

    @property
    def redactions(self) -> int:
        return self._holding.redactions

    def push(self, text: str) -> str:
        """What may leave now."""
        self._flagging.push(text, False)
        return self._holding.push(text, False)

    def flush(self, cut: str = "") -> str:
        """The rest, at the end. `cut`: what the text went on with, which is not told: a match that
        goes on in it is one."""
        self._flagging.push("", True, cut)
        return self._holding.push("", True, cut)

    @property
    def reached_cut(self) -> bool:
        """Whether a match went on in what was cut: to tell that would tell of the match."""
        return self._holding.reached_cut

    @property
    def decided(self) -> int:
        """Characters of the text as it was written that are not held back."""
        return self._holding.left

    def hid(self, start: int, end: int) -> bool:
        """Whether some of these characters, decided ones, have not left."""
        hidden = self._holding.hidden
        after = bisect_left(hidden, end, key=lambda span: span[0])
        return after > 0 and start < hidden[after - 1][1]


class _Passage:
    """Through one set of rules."""

    def __init__(self, groups: Sequence[_Group], json: bool, escapes: bool) -> None:
        self._escapes = escapes
        self._seen = [_Seen(group) for group in groups]
        self._json = _State.OUTSIDE if json else None  # where the text that has left ends
        self._text = ""  # that has not left
        self._matches: list[_Match] = []  # which have not left, or not whole
        self._masked = 0  # up to where a match is that a label stands in for
        self.left = 0  # where `_text` begins
        self.hidden: list[tuple[int, int]] = []  # apart, in order
        self.redactions = 0
        self.reached_cut = False
        self.blocked: RuleSpec | None = None
        self.redacted: RuleSpec | None = None  # the first that did
        self.hits: Counter[tuple[str, str]] = Counter()

    def push(self, text: str, ended: bool, cut: str = "") -> str:
        if self.blocked is not None:
            return ""
        if not self._seen:
            self.left += len(text)
            return text
        self._text += text
        told = len(self._text)
        self._text += cut
        limit = len(self._text)
        views = []
        for seen in self._seen:
            found = view(
                self._text,
                fold=seen.group.fold,
                before=seen.before,
                json=self._escapes,
                ended=ended,
            )
            views.append(found)
            limit = min(limit, found.whole, self._look(seen, found, ended))
        limit, end = min(limit, told), self.left + told
        if cut:
            self.reached_cut = any(one.start < end < one.end for one in self._matches)
        out = self._release(limit, ended and not cut)
        if self.blocked is not None:
            return out
        for seen, seen_as in zip(self._seen, views, strict=True):
            seen.before = seen_as.last(limit, BEFORE)
            seen.ahead = {n: at for n, at in seen.ahead.items() if at > self.left + limit}
        self._text = self._text[limit:]
        self.left += limit
        return out

    def _look(self, seen: _Seen, text: View, ended: bool) -> int:
        """Takes the matches that are decided; returns where the first begins that may be under way,
        in characters of `_text`."""
        if not seen.ahead and seen.group.any.search(text.data, text.before) is None:
            if ended:
                return text.size
            return text.char(seen.group.any_ends_in.search(text.data, text.before).start())
        limit = len(text.data)
        for number, finder in enumerate(seen.group.finders):
            at = text.before
            if number in seen.ahead:
                at = text.byte(seen.ahead[number] - self.left)
            while True:
                open_at = len(text.data)
                if not ended:
                    open_at = finder.ends_in.search(text.data, at).start()
                found = finder.next(text.data, at, None if ended else open_at)
                if found is None:
                    break
                start, end = text.char(found[0]), text.end(found[1])
                self._matches.append(
                    _Match(self.left + start, finder.order, self.left + end, finder)
                )
                seen.ahead[number] = self.left + end
                at = text.byte(end)
            limit = min(limit, open_at)
        return text.size if ended else text.char(limit)

    def _release(self, limit: int, ended: bool) -> str:
        """The first `limit` characters of `_text`, which are decided."""
        end = self.left + limit
        out: list[str] = []
        at = max(self.left, min(self._masked, end))
        self._matches.sort(key=lambda match: match[:3])
        while self._matches and (self._matches[0].start < end or ended):
            match = self._matches.pop(0)
            rule = match.finder.rule
            broken = rule.action == "redact" and not self._within_string(match)
            if rule.action == "refuse" or broken:
                out.append(self._slice(at, match.start))
                self._block(rule, match.start)
                return "".join(out)
            self.hits[rule.name, rule.action] += 1
            if rule.action == "flag":
                continue
            self.redacted = self.redacted or rule
            if match.start >= self._masked:
                out += (self._slice(at, match.start), match.finder.label)
            self._masked = max(self._masked, match.end)
            self._hide(match.start, match.end)
            at = max(at, min(self._masked, end))
        out.append(self._slice(at, end))
        if self._json is not None:
            self._json = _after(self._json, self._slice(self.left, end))
        return "".join(out)

    def _hide(self, start: int, end: int) -> None:
        self.redactions += 1
        if self.hidden and start <= self.hidden[-1][1]:
            first, last = self.hidden.pop()
            start, end = first, max(last, end)
        self.hidden.append((start, end))

    def _slice(self, start: int, end: int) -> str:
        return self._text[max(0, start - self.left) : max(0, end - self.left)]

    def _within_string(self, match: _Match) -> bool:
        """Whether a label in its place leaves JSON as it was; true where the text is none."""
        if self._json is None:
            return True
        at = _after(self._json, self._slice(self.left, match.start))
        for char in self._slice(match.start, match.end):
            if at is not _State.STRING and at is not _State.ESCAPE:
                return False
            at = _after(at, char)
        return at is _State.STRING

    def _block(self, rule: RuleSpec, at: int) -> None:
        self.blocked = rule
        self.hits[rule.name, "refuse"] += 1
        self._text, self.left = "", at


class _State(Enum):
    """Where in JSON a place is."""

    OUTSIDE = 0
    STRING = 1
    ESCAPE = 2  # in a string, behind a backslash


def _after(state: _State, text: str) -> _State:
    for char in text:
        if state is _State.ESCAPE:
            state = _State.STRING
        elif char == '"':
            state = _State.OUTSIDE if state is _State.STRING else _State.STRING
        elif char == "\\" and state is _State.STRING:
            state = _State.ESCAPE
    return state
