"""Guesses for tests: right and wrong ones, of those whose answers are known."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.worker.engine import Request, Sampling
from services.worker.engine import engine as engine_module
from services.worker.engine.engine import Engine
from services.worker.engine.sequence import Sequence
from services.worker.engine.speculation import guess_rules
from services.worker.engine.speculation.proposer import Wanted
from tests.unit.engine.checkpoints import VOCAB
from tests.unit.engine.driving import Run, make_engine, make_prompts

Next = Callable[[Sequence, int], list[int]]
"""The right tokens behind a sequence's, so many if there are."""


class Oracle:
    """Offers as many as it likes, some of them wrong."""

    def __init__(self, right: Next, vocab: int, draw: Callable[[int], int]) -> None:
        """`draw`: a number below n."""
        self._right, self._vocab, self._draw = right, vocab, draw

    def look_s(self, sequence: Sequence) -> float:
        return 0.0

    def begin_s(self, sequence: Sequence) -> float:
        return 0.0

    def offers(self, sequence: Sequence, most: int) -> int:
        return self._draw(most + 1)

    def depth_s(self, rows: int, context: int) -> float:
        return 0.0

    def propose(self, wanted: Wanted, seconds: float) -> list[list[int]]:
        return [self._guess(sequence, count) for sequence, count in wanted]

    def _guess(self, sequence: Sequence, count: int) -> list[int]:
        guesses = (self._right(sequence, count) + [0] * count)[:count]
        return [(guess + 1) % self._vocab if self._draw(4) == 0 else guess for guess in guesses]


def guess(monkeypatch: pytest.MonkeyPatch, oracle: Oracle) -> None:
    """Engines made from now on that guess take what the oracle offers."""
    monkeypatch.setattr(engine_module, "NgramProposer", lambda *_: oracle)
    monkeypatch.setattr(guess_rules, "MARGIN", 0.0)


def guessing_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[int]], **settings: Any
) -> Engine:
    """`answers`: see `answering`."""
    answering(monkeypatch, answers)
    return make_engine(folder, speculation="ngram", num_speculative_tokens=4, **settings)


def answering(monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[int]]) -> None:
    """Engines made from now on guess `answers`, some of them wrongly: by the request's id, what it
    makes without guesses."""

    def right(sequence: Sequence, count: int) -> list[int]:
        made = len(sequence.tokens) - sequence.num_prompt
        made += sequence.request.generated_prefix
        return answers[sequence.id][made : made + count]

    guess(monkeypatch, Oracle(right, 200, random.Random(3).randrange))


FEW = tuple((token, 14.0) for token in range(40, 46))
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.5},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "logprobs": 3},
    {"temperature": 0, "logprobs": 0, "prompt_logprobs": 1},
    {"temperature": 1.2, "repetition_penalty": 1.4, "logit_bias": FEW, "logprobs": 2},
    {"frequency_penalty": 0.6, "presence_penalty": -0.4, "logit_bias": FEW, "min_p": 0.02},
    {"bad_words": ((41, 42), (43,)), "logit_bias": FEW},
    {"min_tokens": 25, "stop_token_ids": (40, 41, 42, 43, 44, 45), "logit_bias": FEW},
    {"stop_token_ids": tuple(range(0, VOCAB, 9))},
]
"""Ways of sampling."""


NOBODY = Oracle(lambda sequence, count: [], 200, lambda below: 0)
"""Never has a guess."""


def requests_of(kinds: list[dict[str, Any]]) -> list[Request]:
    prompts = make_prompts(len(kinds), longest=50, seed=6)
    return [
        Request(str(i), prompt, Sampling(**{"max_tokens": 40, "seed": i} | kind))
        for i, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]


def told(run: Run) -> dict[str, tuple[Any, ...]]:
    """Of each request: tokens, why it ended, which tokens its logprobs are of, and usage."""
    outputs = [output for step in run.steps for output in step.outputs]
    return {
        name: (
            run.tokens[name],
            last.finish_reason,
            [one.top_ids for o in outputs if o.request_id == name for one in o.logprobs or ()],
            [len(o.prompt_logprobs or ()) for o in outputs if o.request_id == name][:1],
            last.usage and last.usage.completion_tokens,
        )
        for name, last in run.last.items()
    }
