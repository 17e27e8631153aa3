"""A rule's own test cases: whether it matches what it should, in every place that it is for."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from services.common.policy.check import Subject
from services.common.policy.policy import Policy
from services.common.policy.rules import Rules
from services.common.policy.schema import ANSWER, Place, RuleSpec
from services.common.policy.stream import Filter

Embed = Callable[[Sequence[str]], Sequence[Sequence[float]]]
"""Texts to vectors of length 1."""


@dataclass(frozen=True)
class Case:
    """One text that was tried."""

    rule: str
    text: str
    place: Place
    wanted: bool  # that it matches
    matched: bool

    @property
    def passed(self) -> bool:
        return self.wanted == self.matched


def trial(rules: Rules, embed: Embed | None = None) -> Iterator[Case]:
    """Every case of every rule; those of `like` need `embed`. Each rule is asked alone."""
    for rule in rules.spec.rules:
        cases = [(text, True) for text in rule.tests.match]
        cases += [(text, False) for text in rule.tests.passes]
        matches = _matcher(rules, rule, embed) if cases else None
        for text, wanted in cases:
            assert matches is not None
            for place in rule.where:
                yield Case(rule.name, text, place, wanted, matches(text, place))


def _matcher(rules: Rules, rule: RuleSpec, embed: Embed | None) -> Callable[[str, Place], bool]:
    if rule.like is not None:
        if embed is None:
            raise ValueError(f"rule {rule.name!r} is tried with an embedding model")
        return _by_meaning(rule, embed)
    alone = rules.spec.model_copy(update={"rules": [rule]})
    finders = tuple(finder for finder in rules.finders if finder.rule is rule)
    policy = Policy.of(Rules(alone, "", finders))

    def matches(text: str, place: Place) -> bool:
        if place in ANSWER:
            made = policy.output if place == "output" else policy.tool_arguments
            assert made is not None
            answer = Filter(made)
            for char in text:
                answer.push(char)
            answer.flush()
            return bool(answer.hits)
        role = rule.roles[0] if rule.roles else "user"
        return bool(policy.texts.check([Subject("text", place, text, role)]).hits)

    return matches


def _by_meaning(rule: RuleSpec, embed: Embed) -> Callable[[str, Place], bool]:
    like = rule.like
    assert like is not None
    prototypes = embed(like.examples)

    def matches(text: str, _: Place) -> bool:
        (vector,) = embed([text])
        best = max(sum(a * b for a, b in zip(vector, one, strict=True)) for one in prototypes)
        return best >= like.at_least

    return matches
