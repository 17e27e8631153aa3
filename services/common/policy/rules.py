"""Rules, compiled: what a policy file says, ready to be asked. Safe to use from several threads."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from services.common.policy.fold import folded
from services.common.policy.pattern import compiled, shape
from services.common.policy.recognizers import BEFORE, RECOGNIZERS, Check, Span
from services.common.policy.schema import ANSWER, Delivery, Place, PolicySpec, RuleSpec, read
from services.common.policy.work import Work

MAX_HELD = 2048  # characters of the longest match of a rule for answers
MAX_PIECES = 4096  # of a pattern with its repetitions written out
MAX_PIECES_TOGETHER = (
    24_576  # of all patterns, once for each place; RE2's time grows with its square
)
_UNION_MEMORY = 64 * 2**20
_PIECE = 256 * 1024  # bytes of a text that are searched at once, where a match has a longest


@dataclass(frozen=True)
class Finder:
    """One pattern of a rule."""

    rule: RuleSpec
    order: int  # of the rule in its file
    source: str
    beginnings: str
    size: int
    regexp: Any
    most: int | None  # characters of its longest match
    check: Check | None
    label: str  # that stands in for a match

    @cached_property
    def ends_in(self) -> Any:
        """Finds the longest end of a text in which a match may be under way."""
        return compiled(f"(?:{self.beginnings})\\z")

    def matches(self, text: bytes, work: Work) -> Iterator[Span]:
        """Without overlap, from the left, of each place the longest; behind a candidate that the
        check does not take, the search goes on where the check says. Raises TooMuchError."""
        start = 0
        while (found := self.next(text, start, work=work)) is not None:
            yield found
            start = found[1]

    def next(
        self, text: bytes, start: int, before: int | None = None, work: Work | None = None
    ) -> Span | None:
        """The first match behind `start`, or none; `before`: candidates that begin there are not
        looked at yet."""
        while (span := search(self.regexp, self.most, text, start, work)) is not None:
            at, end = span
            if before is not None and at >= before:
                return None
            if self.check is None:
                return span
            if work is not None:
                work.spend(end - at)
            found = self.check(text[at:end], text[max(0, at - BEFORE) : at])
            if isinstance(found, tuple):
                return at + found[0], at + found[1]
            start = at + found
        return None


def search(
    regexp: Any, most: int | None, text: bytes, start: int, work: Work | None
) -> Span | None:
    """RE2's first match, leftmost and longest; `most`: characters that one has at most. Raises
    TooMuchError.

    Piece by piece where there is a longest match, so that the clock is looked at between: what
    begins in a piece ends before what is searched with it does.
    """
    margin = 0 if most is None else 4 * (most + 2)
    while work is not None and most is not None and len(text) - start > _PIECE + margin:
        found = regexp.search(text, start, start + _PIECE + margin)
        if found is not None and found.start() < start + _PIECE:
            work.spend(found.end() - start)
            return found.span()  # type: ignore[no-any-return]
        work.spend(_PIECE)
        start += _PIECE
    found = regexp.search(text, start)
    if work is not None:
        work.spend((len(text) if found is None or most is None else found.end()) - start)
    return None if found is None else found.span()


@dataclass(frozen=True)
class Rules:
    """One version of a policy."""

    spec: PolicySpec
    digest: str
    finders: tuple[Finder, ...]

    @property
    def version(self) -> str:
        """As it is told in records, logs and metrics."""
        return f"{self.spec.version}@{self.digest}" if self.spec.version else self.digest

    @property
    def delivery(self) -> Delivery:
        return self.spec.delivery

    def of(self, place: Place) -> list[Finder]:
        """The finders for one place, in the rules' order."""
        return [finder for finder in self.finders if place in finder.rule.where]

    @cached_property
    def by_meaning(self) -> tuple[RuleSpec, ...]:
        """Those for the classifier."""
        return tuple(rule for rule in self.spec.rules if rule.like is not None)

    @cached_property
    def jailbreaks(self) -> tuple[RuleSpec, ...]:
        return tuple(rule for rule in self.spec.rules if rule.jailbreak is not None)


NO_RULES = Rules(PolicySpec(), "", ())


def load_rules(content: bytes) -> Rules:
    """Raises ValueError that names the rule at fault. Blocking: milliseconds a rule."""
    spec = read(content)
    finders: list[Finder] = []
    for order, rule in enumerate(spec.rules):
        try:
            finders += _finders(rule, order)
        except ValueError as error:
            raise ValueError(f"rule {rule.name!r}: {error}") from None
    if sum(finder.size * len(finder.rule.where) for finder in finders) > MAX_PIECES_TOGETHER:
        raise ValueError("the rules' patterns are too large together: fewer, or less repetition")
    digest = hashlib.blake2b(content, digest_size=6).hexdigest()
    return Rules(spec, digest, tuple(finders))


def longest(finders: Sequence[Finder]) -> int | None:
    """Characters of the longest match of any of them; None: one has no longest."""
    mosts = [finder.most for finder in finders]
    return None if None in mosts else max(most for most in mosts if most is not None)


def union(finders: Sequence[Finder], *, ends: bool = False) -> Any:
    """One pattern that matches where any of them does; `ends`: as `Finder.ends_in`. Raises
    ValueError for what is too much together."""
    if not finders:
        return None
    sources = [f"(?:{f.beginnings if ends else f.source})" for f in finders]
    return compiled(f"(?:{'|'.join(sources)})" + "\\z" * ends, _UNION_MEMORY)


def _finders(rule: RuleSpec, order: int) -> Iterator[Finder]:
    if rule.pattern is not None:
        if rule.fold and (changed := next((c for c in rule.pattern if folded(c) != c), None)):
            raise ValueError(
                f"pattern: texts are folded, and then have {folded(changed)!r} in place of "
                f"{changed!r}: write it so, or say `fold: false`"
            )
        yield _finder(rule, order, rule.pattern, None, rule.replacement or f"[{rule.name.upper()}]")
    for kind in rule.pii or ():
        known = RECOGNIZERS[kind]
        label = rule.replacement if rule.replacement is not None else f"[{kind.upper()}]"
        yield _finder(rule, order, known.pattern, known.check, label)


def _finder(rule: RuleSpec, order: int, pattern: str, check: Check | None, label: str) -> Finder:
    compiled(pattern)  # says itself what is wrong with it
    try:
        known = shape(pattern)
    except (ValueError, IndexError) as error:
        raise ValueError(f"pattern: {error}") from None
    if known.size > MAX_PIECES:
        raise ValueError("pattern: it is too large: less repetition")
    if not known.least:
        raise ValueError("pattern: it matches the empty text, so everything")
    finder = Finder(
        rule,
        order,
        known.source,
        known.beginnings,
        known.size,
        compiled(known.source),
        known.most,
        check,
        label,
    )
    if answered := [place for place in rule.where if place in ANSWER]:
        if known.most is None:
            raise ValueError(
                f"pattern: a rule for {answered[0]} needs a longest match, which a stream holds "
                "back: write {0,100} in place of *, {1,100} in place of +"
            )
        if known.most > MAX_HELD:
            raise ValueError(f"pattern: over {MAX_HELD} characters of a stream would be held back")
        assert finder.ends_in is not None
    return finder
