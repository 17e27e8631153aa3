"""Rules on texts that are here whole: of a request, of passages, of uploads.

Each text is looked at by itself; then those of a conversation that a rule is for are looked at one
behind the other, all of them and each role's, joined with and without a space, so that what is
spread over messages is found.
"""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice
from typing import Any, NamedTuple

from services.common.policy.disguises import disguises
from services.common.policy.fold import View, view
from services.common.policy.jailbreak import weight
from services.common.policy.recognizers import Span
from services.common.policy.rules import Finder, Rules, longest, search, union
from services.common.policy.schema import Place, RuleSpec
from services.common.policy.work import Allowance, Work


@dataclass(frozen=True)
class Subject:
    """One text."""

    param: str  # the field that it is from
    place: Place
    text: str
    role: str = ""  # of input
    spoken: bool = False  # a message's: one behind the other they are a conversation
    json: bool = False  # its escapes are read, and it stays JSON
    fixed: bool = False  # it cannot be changed: what would be redacted in it is refused


@dataclass
class Verdict:
    """What the rules say of all of it."""

    refused: tuple[RuleSpec, str] | None = None  # the first rule, and the field
    routed: RuleSpec | None = None
    edits: dict[int, str] = field(default_factory=dict)  # subjects by their place, as redacted
    hits: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # rule, action, place


class _Piece(NamedTuple):
    """Of a match, in one subject."""

    subject: int
    start: int
    end: int


class _Hit(NamedTuple):
    rule: RuleSpec
    order: int
    subject: int
    label: str = ""
    pieces: tuple[_Piece, ...] = ()  # none: of the text as a whole


@dataclass(frozen=True)
class _Look:
    """Finders that look at a text in one way, with what tells at once that none finds something."""

    finders: tuple[Finder, ...]
    fold: bool

    @cached_property
    def any(self) -> Any:
        return union(self.finders)

    @cached_property
    def most(self) -> int | None:
        return longest(self.finders)

    def finds(self, text: bytes, work: Work) -> bool:
        """Whether there is a candidate of any of them."""
        return search(self.any, self.most, text, 0, work) is not None


class TextRules:
    """The rules for texts, made once for all of them."""

    def __init__(self, rules: Rules) -> None:
        """Raises ValueError for what is too much together."""
        self._order = {rule.name: n for n, rule in enumerate(rules.spec.rules)}
        places: tuple[Place, ...] = ("input", "retrieved", "uploads")
        self._looks = {place: _looks(rules.of(place)) for place in places}
        scopes: dict[frozenset[str] | None, list[Finder]] = {}
        for finder in rules.of("input"):
            scopes.setdefault(_roles(finder.rule), []).append(finder)
        self._scopes = {roles: _looks(finders) for roles, finders in scopes.items()}
        self._disguised = [f for f in rules.finders if f.rule.disguises]
        self._jailbreaks = rules.jailbreaks
        self.routes = any(rule.action == "route" for rule in rules.spec.rules)

    def has(self, *places: Place) -> bool:
        """Whether there is a rule for one of these."""
        by_signs = (place in rule.where for rule in self._jailbreaks for place in places)
        return any(self._looks[place] for place in places) or any(by_signs)

    def check(self, subjects: Sequence[Subject], work: Work | None = None) -> Verdict:
        """Blocking: some ms per MB, and a hundred times that of text made for it. Of a rule that
        changes nothing one match is told in each text. Raises TooMuchError."""
        work = work or Work(Allowance())
        views, size = [], 0
        for subject in subjects:
            size += len(subject.text.encode("utf-8", "replace"))
            work.take(size, subject.param)
            views.append(_Views(subject))
        hits = [
            *self._by_itself(views, work),
            *self._joined(views, work),
            *self._otherwise(views, work),
        ]
        return _verdict(subjects, hits)

    def _by_itself(self, views: Sequence["_Views"], work: Work) -> Iterator[_Hit]:
        for number, of_one in enumerate(views):
            work.param = of_one.subject.param
            for look in self._looks[of_one.subject.place]:
                seen = of_one.view(look.fold)
                if not look.finds(seen.data, work):
                    continue
                for finder in look.finders:
                    if not _is_for(finder.rule, of_one.subject):
                        continue
                    for start, end in _wanted(finder, finder.matches(seen.data, work)):
                        piece = _Piece(number, seen.char(start), seen.end(end))
                        yield _Hit(finder.rule, finder.order, number, finder.label, (piece,))

    def _joined(self, views: Sequence["_Views"], work: Work) -> Iterator[_Hit]:
        told: set[tuple[int, tuple[_Piece, ...]]] = set()
        for roles, looks in self._scopes.items():
            for own in _conversations(views, roles):
                work.param = own[0][1].subject.param
                for look in looks:
                    for between in (b"", b" "):
                        for hit in _Joined(own, look, between).hits(work):
                            if (hit.order, hit.pieces) not in told:
                                told.add((hit.order, hit.pieces))
                                yield hit

    def _otherwise(self, views: Sequence["_Views"], work: Work) -> Iterator[_Hit]:
        for number, one in enumerate(views):
            finders = [f for f in self._disguised if _is_for(f.rule, one.subject)]
            signs = [rule for rule in self._jailbreaks if _is_for(rule, one.subject)]
            if not finders and not signs:
                continue
            work.param = one.subject.param
            readings = [one.view(True).data]
            for reading in disguises(readings[0].decode("utf-8", "replace")):
                readings.append(reading.encode("utf-8", "replace"))
                work.spend(len(readings[-1]))
            for finder in finders:
                if any(finder.next(text, 0, work=work) is not None for text in readings[1:]):
                    yield _Hit(finder.rule, finder.order, number)
            if signs:
                weighs = weight(readings, work)
                for rule in signs:
                    if weighs >= (rule.jailbreak or 0.0):
                        yield _Hit(rule, self._order[rule.name], number)


def _wanted(finder: Finder, spans: Iterator[Span]) -> Iterator[Span]:
    """Where all are redacted, all of them; else the first says it."""
    return spans if finder.rule.action == "redact" else islice(spans, 1)


class _Views:
    """A subject as finders see it, made when it is looked at."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._made: dict[bool, View] = {}

    def view(self, fold: bool) -> View:
        if fold not in self._made:
            self._made[fold] = view(self.subject.text, fold=fold, json=self.subject.json)
        return self._made[fold]


_Numbered = tuple[int, _Views]


def _conversations(
    views: Sequence[_Views], roles: frozenset[str] | None
) -> Iterator[list[_Numbered]]:
    """What is said in these roles, all of it and what each says by itself, as others answer between
    its messages. Those that say nothing do not part the others."""
    by_role: dict[str, list[_Numbered]] = {}
    spoken = []
    for number, one in enumerate(views):
        role = one.subject.role
        if one.subject.spoken and (roles is None or role in roles) and one.view(True).data.strip():
            spoken.append((number, one))
            by_role.setdefault(role, []).append((number, one))
    for own in (spoken, *(by_role.values() if len(by_role) > 1 else ())):
        if len(own) > 1:
            yield own


def _roles(rule: RuleSpec) -> frozenset[str] | None:
    return None if rule.roles is None else frozenset(rule.roles)


def _is_for(rule: RuleSpec, subject: Subject) -> bool:
    if subject.place not in rule.where:
        return False
    return rule.roles is None or subject.place != "input" or subject.role in rule.roles


def _looks(finders: Iterable[Finder]) -> list[_Look]:
    finders = list(finders)
    looks = []
    for fold in (True, False):
        if own := tuple(finder for finder in finders if finder.rule.fold is fold):
            looks.append(_Look(own, fold))
            assert looks[-1].any is not None
    return looks


class _Joined:
    """Several texts, read one behind the other."""

    def __init__(self, own: Sequence[tuple[int, _Views]], look: _Look, between: bytes) -> None:
        self._own = [(number, one.view(look.fold)) for number, one in own]
        self._look = look
        self._text = between.join(seen.data for _, seen in self._own)
        ends = accumulate(len(seen.data) + len(between) for _, seen in self._own)
        self._starts = [0, *ends][:-1]

    def hits(self, work: Work) -> Iterator[_Hit]:
        """Matches that are in more than one of them."""
        if not self._look.finds(self._text, work):
            return
        for finder in self._look.finders:
            parted = (self._pieces(span, work) for span in finder.matches(self._text, work))
            several = (pieces for pieces in parted if len(pieces) > 1)
            for pieces in several if finder.rule.action == "redact" else islice(several, 1):
                rule, subject = finder.rule, pieces[0].subject
                yield _Hit(rule, finder.order, subject, finder.label, pieces)

    def _pieces(self, span: Span, work: Work) -> tuple[_Piece, ...]:
        start, end = span
        found = []
        for at in range(bisect_right(self._starts, start) - 1, len(self._own)):
            number, seen = self._own[at]
            begins = self._starts[at]
            if begins >= end:
                break
            work.spend(0)
            first, last = max(start - begins, 0), min(end - begins, len(seen.data))
            if first < last:
                found.append(_Piece(number, seen.char(first), seen.end(last)))
        return tuple(found)


def _verdict(subjects: Sequence[Subject], hits: Sequence[_Hit]) -> Verdict:
    verdict = Verdict()
    refused: list[tuple[int, int, RuleSpec]] = []
    masks: dict[int, list[tuple[int, int, int, str]]] = {}
    masked_by: dict[int, _Hit] = {}
    for hit in sorted(hits, key=lambda hit: (hit.subject, hit.order)):
        action = hit.rule.action
        fixed = any(subjects[piece.subject].fixed for piece in hit.pieces)
        if action == "refuse" or (action == "redact" and fixed):
            action = "refuse"
            refused.append((hit.subject, hit.order, hit.rule))
        elif action == "route":
            verdict.routed = verdict.routed or hit.rule
        elif action == "redact":
            for number, piece in enumerate(hit.pieces):
                label = "" if number else hit.label
                masked_by.setdefault(piece.subject, hit)
                masks.setdefault(piece.subject, []).append(
                    (piece.start, hit.order, piece.end, label)
                )
        verdict.hits[hit.rule.name, action, subjects[hit.subject].place] += 1
    for number, spans in masks.items():
        subject = subjects[number]
        verdict.edits[number] = _masked(subject.text, spans)
        if subject.json and _is_json(subject.text) and not _is_json(verdict.edits[number]):
            refused.append((number, masked_by[number].order, masked_by[number].rule))
    if refused:
        subject_number, _, rule = min(refused, key=lambda found: found[:2])
        verdict.refused = rule, subjects[subject_number].param
    return verdict


def _masked(text: str, spans: list[tuple[int, int, int, str]]) -> str:
    """Of spans that overlap, the first one's label."""
    out: list[str] = []
    done = 0
    for start, _, end, label in sorted(spans):
        if start >= done:
            out += (text[done:start], label)
        done = max(done, end)
    return "".join([*out, text[done:]])


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
