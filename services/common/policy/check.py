"""Rules on texts that are here whole: of a request, of passages, of uploads.

Each text is looked at by itself; then those of a conversation that a rule is for are looked at one
behind the other, joined with and without a space, so that what is spread over messages is found.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from services.common.policy.disguises import disguises
from services.common.policy.fold import View, view
from services.common.policy.jailbreak import weight
from services.common.policy.rules import Finder, Rules, union
from services.common.policy.schema import Place, RuleSpec


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

    def has(self, *places: Place) -> bool:
        """Whether there is a rule for one of these."""
        by_signs = (place in rule.where for rule in self._jailbreaks for place in places)
        return any(self._looks[place] for place in places) or any(by_signs)

    def check(self, subjects: Sequence[Subject]) -> Verdict:
        """Blocking: some ms per MB."""
        views = [_Views(subject) for subject in subjects]
        hits = [
            *self._by_itself(views),
            *self._joined(views),
            *self._otherwise(views),
        ]
        return _verdict(subjects, hits)

    def _by_itself(self, views: Sequence["_Views"]) -> Iterator[_Hit]:
        for number, of_one in enumerate(views):
            for look in self._looks[of_one.subject.place]:
                seen = of_one.view(look.fold)
                if look.any.search(seen.data) is None:
                    continue
                for finder in look.finders:
                    if not _is_for(finder.rule, of_one.subject):
                        continue
                    for start, end in finder.matches(seen.data):
                        piece = _Piece(number, seen.char(start), seen.end(end))
                        yield _Hit(finder.rule, finder.order, number, finder.label, (piece,))

    def _joined(self, views: Sequence["_Views"]) -> Iterator[_Hit]:
        for roles, looks in self._scopes.items():
            own = [
                number
                for number, one in enumerate(views)
                if one.subject.spoken and (roles is None or one.subject.role in roles)
            ]
            if len(own) < 2:
                continue
            for look in looks:
                for between in (b"", b" "):
                    yield from _across(views, own, look, between)

    def _otherwise(self, views: Sequence["_Views"]) -> Iterator[_Hit]:
        for number, one in enumerate(views):
            finders = [f for f in self._disguised if _is_for(f.rule, one.subject)]
            signs = [rule for rule in self._jailbreaks if _is_for(rule, one.subject)]
            if not finders and not signs:
                continue
            plain = one.view(True).data.decode("utf-8", "replace")
            others = list(disguises(plain))
            coded = [reading.encode("utf-8", "replace") for reading in others]
            for finder in finders:
                if any(finder.next(text, 0) is not None for text in coded):
                    yield _Hit(finder.rule, finder.order, number)
            if signs:
                weighs = weight([plain, *others])
                for rule in signs:
                    if weighs >= (rule.jailbreak or 0.0):
                        yield _Hit(rule, self._order[rule.name], number)


class _Views:
    """A subject as finders see it, made when it is looked at."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._made: dict[bool, View] = {}

    def view(self, fold: bool) -> View:
        if fold not in self._made:
            self._made[fold] = view(self.subject.text, fold=fold, json=self.subject.json)
        return self._made[fold]


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


def _across(
    views: Sequence[_Views], own: Sequence[int], look: _Look, between: bytes
) -> Iterator[_Hit]:
    """Matches that are in more than one of these texts."""
    starts, parts, at = [], [], 0
    for number in own:
        starts.append(at)
        parts.append(views[number].view(look.fold).data)
        at += len(parts[-1]) + len(between)
    text = between.join(parts)
    if look.any.search(text) is None:
        return
    for finder in look.finders:
        for start, end in finder.matches(text):
            pieces = []
            for number, begins, part in zip(own, starts, parts, strict=True):
                first, last = max(start, begins) - begins, min(end, begins + len(part)) - begins
                if first < last:
                    seen = views[number].view(look.fold)
                    pieces.append(_Piece(number, seen.char(first), seen.end(last)))
            if len(pieces) > 1:
                rule, subject = finder.rule, pieces[0].subject
                yield _Hit(rule, finder.order, subject, finder.label, tuple(pieces))


def _verdict(subjects: Sequence[Subject], hits: Sequence[_Hit]) -> Verdict:
    verdict = Verdict()
    refused: list[tuple[int, int, RuleSpec]] = []
    masks: dict[int, list[tuple[int, int, int, str]]] = {}
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
                masks.setdefault(piece.subject, []).append(
                    (piece.start, hit.order, piece.end, label)
                )
        verdict.hits[hit.rule.name, action, subjects[hit.subject].place] += 1
    for number, spans in masks.items():
        subject = subjects[number]
        verdict.edits[number] = _masked(subject.text, spans)
        if subject.json and _is_json(subject.text) and not _is_json(verdict.edits[number]):
            first = next(h for h in hits if any(p.subject == number for p in h.pieces))
            refused.append((number, first.order, first.rule))
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
    except ValueError:
        return False
    return True
