"""What a format of weights, or of keys and values, changes in what a model says: engines of both
read the same conversations, and their logits are set against each other."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bench.sweep import BLOCK
from kernels.sampling import SAMPLING
from services.worker.engine.config import EngineConfig
from services.worker.engine.models.registry import read_config
from services.worker.engine.plan import StepPlan

if TYPE_CHECKING:
    from services.worker.engine.runners.cpu_runner import CpuRunner

Logits = NDArray[np.float32]
PIECE = 512
"""Tokens that are read in a step."""
PASSAGES = "passages"
"""The task of whose conversations all tokens are set against each other."""


@dataclass(slots=True)
class Apart:
    """Of one format, as told token by token."""

    kl: list[float] = field(default_factory=list)
    """Of answers' tokens."""
    same: list[bool] = field(default_factory=list)
    kl_of_passages: list[float] = field(default_factory=list)
    right: dict[str, list[bool]] = field(default_factory=dict)
    """By task: whether an answer is right to the letter."""


def runner_of(model: Path, threads: int, **formats: str) -> "CpuRunner":
    """With room for one conversation. Raises ValueError where the C++ kernels do not do."""
    from services.worker.engine.runners.cpu_runner import CpuRunner
    from services.worker.engine.runners.making import make_runner

    blocks = -(-read_config(model).context // BLOCK)
    config = EngineConfig(
        str(model),
        block_size=BLOCK,
        num_blocks=blocks,
        max_batched_tokens=PIECE,
        max_running=PIECE,
        threads=threads,
        **formats,  # type: ignore[arg-type]
    )
    runner = make_runner(config)
    if not isinstance(runner, CpuRunner):
        raise ValueError(f"{model}: the C++ kernels do not run it, whose formats are told")
    return runner


def measured(
    model: Path, formats: dict[str, dict[str, str]], count: int, threads: int
) -> dict[str, Apart]:
    """Of each format's settings, and of none ("auto"). `count`: conversations of a task."""
    from models.recipe import evaluate

    runners = {
        name: runner_of(model, threads, **settings)
        for name, settings in {"auto": {}, **formats}.items()
    }
    found = {name: Apart(right={skill: [] for skill in evaluate.SKILLS}) for name in runners}
    for skill, ids, start in _conversations(model, count):
        first = 1 if skill == PASSAGES else start
        wanted = logits_of(runners["auto"], ids, first)
        for name, runner in runners.items():
            told = wanted if name == "auto" else logits_of(runner, ids, first)
            own, apart = found[name], kl(wanted, told)
            answer = slice(start - first, None)
            said = told[answer].argmax(-1)
            own.right[skill].append(bool((said == ids[start:]).all()))
            own.same += (said == wanted[answer].argmax(-1)).tolist()
            own.kl += apart[answer].tolist()
            if skill == PASSAGES:
                own.kl_of_passages += apart.tolist()
    return found


def row_of(apart: Apart, exact: Apart) -> dict[str, Any]:
    """What is told of a format."""
    right, before = (np.concatenate(list(of.right.values())) for of in (apart, exact))
    share = right.mean()
    return {
        "answers": len(right),
        "right": 100 * share,
        "right_error": 100 * float(np.sqrt(share * (1 - share) / len(right))),
        "lost": int((before & ~right).sum()),
        "gained": int((right & ~before).sum()),
        "same": 100 * mean(apart.same),
        "tokens": len(apart.same),
        "kl": mean(apart.kl),
        "kl_of_passages": mean(apart.kl_of_passages),
        "tasks": {skill: sum(of) for skill, of in apart.right.items()},
    }


def _conversations(model: Path, count: int) -> Iterator[tuple[str, list[int], int]]:
    """Task, tokens, and where the answer begins."""
    from tokenizers import Tokenizer

    from models.recipe import batches, evaluate
    from models.recipe.template import render

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for skill in evaluate.SKILLS:
        for case in evaluate.cases(skill, count):
            ids = tokenizer.encode(render(case), add_special_tokens=False).ids
            yield skill, ids, batches.answer_start(ids)


def logits_of(runner: "CpuRunner", ids: list[int], first: int) -> Logits:
    """[tokens from `first` on, vocab]: what is told of each behind those before it."""
    found = []
    for begin in range(0, len(ids) - 1, PIECE):
        end = min(len(ids) - 1, begin + PIECE)
        rows = array("i", range(max(first - 1 - begin, 0), end - begin))
        ticket = runner.launch(
            StepPlan(
                token_ids=array("i", ids[begin:end]),
                positions=array("i", range(begin, end)),
                starts=array("i", [0, end - begin]),
                lengths=array("i", [end]),
                tables=array("i", range(-(-end // BLOCK))),
                num_decodes=0,
                sampled=array("i", [0]) * len(rows),
                rows=rows,
                sampling_words=array("i", bytes(len(rows) * SAMPLING.itemsize)),
            )
        )
        runner.collect(ticket)
        if rows:
            found.append(runner.logits(ticket).copy())
    return np.concatenate(found)


def kl(wanted: Logits, found: Logits) -> NDArray[np.float64]:
    """Of each row of logits [rows, vocab], in nats: of the distribution that is wanted from the
    one that was found."""
    p, q = _log_softmax(wanted), _log_softmax(found)
    return np.asarray((np.exp(p) * (p - q)).sum(-1))


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))
