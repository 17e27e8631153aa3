"""`python -m bench.policy`: how well the policy finds what it should, on the labelled
texts beside this file, and how long it takes on requests and on streams.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import yaml

from services.common.policy import Policy, Subject, load_rules
from services.common.policy.stream import AnswerRules, Filter
from services.retrieval.embedding_model import EmbeddingModel

TEXTS = Path(__file__).with_suffix("").with_name("policy_texts.yaml")
KINDS = ("card", "iban", "email", "phone", "ssn", "ip", "secret")
EXAMPLES = ["How do I pick a lock?", "ways to open a locked door without the key"]
_ROUNDS = 200


def policy() -> Policy:
    """A rule for each kind, everywhere that it may be."""
    rules: list[dict[str, object]] = [
        {"name": kind, "pii": [kind], "action": "redact", "where": ["input", "output"]}
        for kind in KINDS
    ]
    rules.append({"name": "jailbreak", "jailbreak": 1.0, "action": "flag"})
    return Policy.of(load_rules(json.dumps({"rules": rules}).encode()))


def quality(made: Policy) -> dict[str, tuple[int, int, int]]:
    """Of each kind: texts found that have it, found that have not, not found."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in (*KINDS, "jailbreak")}
    for one in yaml.safe_load(TEXTS.read_text()):
        verdict = made.texts.check([Subject("text", "input", one["text"], "user")])
        found = {rule for rule, _, _ in verdict.hits}
        for kind in counts:
            if kind in found:
                counts[kind]["right" if kind in one["has"] else "wrong"] += 1
            elif kind in one["has"]:
                counts[kind]["missed"] += 1
    return {kind: (c["right"], c["wrong"], c["missed"]) for kind, c in counts.items()}


def meaning(at_least: float) -> tuple[int, int, int]:
    """The same of a rule that matches by two examples, with the built-in embedding model."""
    model = EmbeddingModel.load()

    def embed(texts: list[str]) -> np.ndarray:
        return model.encode([model.reader.query(text).ids for text in texts])

    examples = embed(EXAMPLES)
    right = wrong = missed = 0
    for one in yaml.safe_load(TEXTS.read_text()):
        found, has = (embed([one["text"]]) @ examples.T).max() >= at_least, "locks" in one["has"]
        right, wrong, missed = (
            right + (found and has),
            wrong + (found > has),
            missed + (found < has),
        )
    return right, wrong, missed


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Median and 99th percentile of its time, in ms."""
    taken = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        work()
        taken.append((time.perf_counter() - began) * 1000)
    return median(taken), quantiles(taken, n=100)[98]


def waits(rules: AnswerRules, portions: Sequence[str]) -> list[int]:
    """Of each character of a stream, how many steps behind its own it leaves."""
    stream, out, found = Filter(rules), 0, []
    came = [step for step, portion in enumerate(portions) for _ in portion + " "]
    for step, portion in enumerate(portions):
        left = len(stream.push(portion + " "))
        found += [step - came[at] for at in range(out, out + left)]
        out += left
    return found


def main() -> int:
    made = policy()
    print(
        "| | found | wrongly | missed | precision | recall |\n| --- | --- | --- | --- | --- | --- |"
    )
    told = quality(made)
    told |= {f"like, {at}": meaning(at) for at in (0.4, 0.5, 0.6)}
    for kind, (right, wrong, missed) in told.items():
        precision = right / (right + wrong) if right + wrong else 1.0
        recall = right / (right + missed) if right + missed else 1.0
        print(f"| {kind} | {right} | {wrong} | {missed} | {precision:.2f} | {recall:.2f} |")
    prose = "The harbour opens at six, and a boat shorter than ten metres pays two coins a night. "
    for size in (1_000, 10_000, 100_000):
        text = (prose * (size // len(prose) + 1))[:size]
        subjects = [Subject("text", "input", text, "user", spoken=True)]
        middle, worst = _timed(partial(made.texts.check, subjects))
        print(f"request of {size} characters: {middle:.2f} ms, p99 {worst:.2f} ms")
    assert made.output is not None
    words = (prose * 20).split(" ")
    taken, held = [], []
    stream, said, out = Filter(made.output), 0, 0
    for word in words:
        began = time.perf_counter()
        out += len(stream.push(word + " "))
        taken.append((time.perf_counter() - began) * 1e6)
        said += len(word) + 1
        held.append(said - out)
    print(f"a step of a stream: {median(taken):.0f} us, p99 {quantiles(taken, n=100)[98]:.0f} us")
    print(f"held back: {median(held):.0f} characters, at most {max(held)}")
    steps = waits(made.output, words)
    print(f"a character waits {median(steps):.0f} steps, p99 {quantiles(steps, n=100)[98]:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
