"""What the content policy says of texts: of a document, of passages, and Judge itself."""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from protos import retrieval_pb2 as pb
from services.common.errors import PenstockError, invalid, unavailable
from services.common.policy import Policy, Subject
from services.common.policy.metrics import VERDICTS
from services.common.telemetry.spans import Span
from services.retrieval import requests
from services.retrieval.pipeline.parts import Parts

_CHECKED_CHARS = 500_000  # of a document, by the policy at once


async def judge(parts: Parts, request: pb.JudgeRequest, span: Span) -> pb.JudgeReply:
    """Of input alone, by the rules for it."""
    requests.check_judge(request)
    tenant, reader = request.caller.tenant, parts.model.reader
    prototypes = await parts.prototypes.of(policy_of(parts, request.policy))
    texts = await parts.questions.run(
        tenant, lambda: [reader.query(one.text).ids for one in request.texts]
    )
    vectors = await parts.embedder.embed(tenant, texts)
    matches = []
    for prototype in prototypes:
        rule = prototype.rule
        if "input" not in rule.where:
            continue
        for number, score in enumerate(prototype.scores(vectors)):
            is_for = rule.roles is None or request.texts[number].role in rule.roles
            if is_for and score >= prototype.at_least:
                matches.append(pb.JudgeReply.Match(rule=rule.name, text=number, score=score))
    span.set_attributes({"texts": len(texts), "matches": len(matches)})
    return pb.JudgeReply(matches=matches)


def policy_of(parts: Parts, digest: str) -> Policy:
    """The version that the caller judges by; where it names none, this replica's. Raises
    UNAVAILABLE ("other_policy") if it is not known here."""
    found = parts.policy.of(digest) if digest else parts.policy.current
    if found is None:
        why = "retrieval has another version of the content policy"
        raise unavailable(why, stage="retrieval", reason="other_policy")
    return found


async def checked(
    parts: Parts, policy: Policy, tenant: str, subjects: list[Subject], span: Span
) -> list[str]:
    """The texts as the policy lets them be. Raises INVALID_ARGUMENT that names rule and field."""
    verdict = await parts.texts.run(tenant, lambda: parts.policy.check(policy, subjects))
    for (rule, action, place), times in verdict.hits.items():
        VERDICTS.labels(rule, action, place).inc(times)
        span.set_attribute("policy", f"{action}: {rule}")
    if verdict.refused is not None:
        raise _refusal(verdict.refused[0].name, verdict.refused[1])
    if verdict.routed is not None:  # another model's numbers say something else
        raise _refusal(verdict.routed.name, "model")
    return [verdict.edits.get(n, subject.text) for n, subject in enumerate(subjects)]


async def check_passages(
    parts: Parts, policy: Policy, tenant: str, reply: pb.SearchReply, span: Span
) -> None:
    """Title and text of each passage as the policy lets them be."""
    fields = [(passage, name) for passage in reply.passages for name in ("title", "text")]
    subjects = [
        Subject(f"data[{number // 2}]", "retrieved", getattr(passage, name))
        for number, (passage, name) in enumerate(fields)
    ]
    told = await checked(parts, policy, tenant, subjects, span)
    for number, ((passage, name), text) in enumerate(zip(fields, told, strict=True)):
        if text != getattr(passage, name):
            setattr(passage, name, text)
            if reply.stretches:  # one that an earlier version kept has none
                reply.stretches[number // 2].Clear()  # its characters stand elsewhere now


async def check_document(
    parts: Parts,
    policy: Policy,
    tenant: str,
    title: str,
    sections: Sequence[pb.Section],
    span: Span,
) -> tuple[str, Sequence[pb.Section]]:
    """As the policy lets them be. A long document is looked at piece by piece: each has what the
    policy may spend, and others have their turn in between."""
    (title,) = await checked(parts, policy, tenant, [Subject("title", "uploads", title)], span)
    told: list[pb.Section] = []
    for some in _runs(sections):
        fields = [[*section.headings, section.text] for section in some]
        subjects = [Subject("file", "uploads", text) for texts in fields for text in texts]
        left = iter(await checked(parts, policy, tenant, subjects, span))
        for section, texts in zip(some, fields, strict=True):
            *headings, text = islice(left, len(texts))
            row, page = section.row, section.page
            told.append(pb.Section(headings=headings, text=text, page=page, row=row))
    return title, told


def _runs(sections: Sequence[pb.Section]) -> Iterator[list[pb.Section]]:
    """Of so much text at most that the policy looks at it in one go, or of one."""
    some, size = list[pb.Section](), 0
    for section in sections:
        size += len(section.text)
        if some and size > _CHECKED_CHARS:
            yield some
            some, size = [], len(section.text)
        some.append(section)
    if some:
        yield some


async def may_refuse(parts: Parts, policy: Policy) -> bool:
    """Whether an upload may be refused for what it means."""
    rules = (prototype.rule for prototype in await parts.prototypes.of(policy))
    return any("uploads" in rule.where and rule.action == "refuse" for rule in rules)


async def looks_at_meaning(parts: Parts, policy: Policy) -> bool:
    """Whether any rule is about what an upload means."""
    return any("uploads" in one.rule.where for one in await parts.prototypes.of(policy))


async def check_meaning(parts: Parts, policy: Policy, vectors: np.ndarray, span: Span) -> None:
    """The same of what an upload's chunks mean."""
    for prototype in await parts.prototypes.of(policy):
        rule = prototype.rule
        if "uploads" in rule.where and prototype.scores(vectors).max() >= prototype.at_least:
            VERDICTS.labels(rule.name, rule.action, "uploads").inc()
            span.set_attribute("policy", f"{rule.action}: {rule.name}")
            if rule.action == "refuse":
                raise _refusal(rule.name, "text")


def _refusal(rule: str, param: str) -> PenstockError:
    message = f"refused by the content policy, rule {rule!r}"
    return invalid(message, param, reason="content_policy", stage="retrieval")
