"""What guessing ahead brings: the demonstration model's tasks with and without, in turn.

    python -m bench.speculation [--model DIR] [--draft DIR] [--batch 1 16] [--rounds 5]
                                [--temperature 0] [--skills passages long ...] [--json FILE]

Each way has an engine of its own, in this process; of each task they take turns, round by round, in
changing order, and their tokens must be the same. Told are ratios to no guesses: steps of the model
that decode (fewer is better), time from first tokens to the last ones, and whole time (what is told
is how many times as fast), by the clock and by the processor. Of a batch, requests follow one
another so that it stays full while there are any.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from bench.result_file import checkpoint_folder, result_file
from services.worker.engine.config import SPECULATIONS, EngineConfig
from services.worker.engine.engine import Engine
from services.worker.engine.messages import Request, Sampling

SKILLS = ("passages", "long", "json", "tools", "recall", "story")
LONGEST = 128
"""Tokens of an answer."""
Asked = list[tuple[list[int], Sampling]]


@dataclass
class Took:
    steps: int = 0
    """With decodes in them."""
    decode_s: float = 0.0
    """Of steps without prompts."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", type=checkpoint_folder, default=Path("models/demo"))
    add("--draft", type=checkpoint_folder, default=Path("models/demo-draft"))
    add("--ways", nargs="+", choices=SPECULATIONS[1:], default=[*SPECULATIONS[1:]])
    add("--skills", nargs="+", default=[*SKILLS])
    add("--batch", nargs="+", type=int, default=[1, 16])
    add("--count", type=int, default=16, help="requests of a task and round")
    add("--rounds", type=int, default=5)
    add("--guesses", type=int, default=None, help="default: the engine's")
    add("--temperature", type=float, default=0.0)
    add("--threads", type=int, default=None)
    add("--json", type=result_file, help="where the figures go")
    given = parser.parse_args()
    engines = {way: _engine(given, way) for way in ("off", *given.ways)}
    rows: list[dict[str, Any]] = []
    for batch in given.batch:
        for skill in given.skills:
            asked = prompts(given.model, skill, given.count, given.temperature)
            for way, figures in compare(engines, asked, batch, given.rounds).items():
                rows.append({"batch": batch, "skill": skill, "way": way, **figures})
                print(" ".join(_told(rows[-1])), flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["same"] for row in rows) else 1


def _told(row: dict[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        yield f"{name} {value:.2f}" if isinstance(value, float) else f"{value!s:>8}"


def prompts(model: Path, skill: str, count: int, temperature: float) -> Asked:
    """Conversations that the model was not trained on, up to the answer."""
    from tokenizers import Tokenizer

    from models.recipe import corpus
    from models.recipe.template import render

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    found = []
    for number in range(count):
        case = corpus.graded(random.Random(f"speculation/{skill}/{number}"), skill)
        ids = tokenizer.encode(render(case, prompt=True), add_special_tokens=False).ids
        found.append((ids, Sampling(LONGEST, temperature=temperature, seed=number)))
    return found


def compare(
    engines: dict[str, Engine], asked: Asked, batch: int, rounds: int
) -> dict[str, dict[str, float | bool]]:
    """Of each way but the first its ratios to the first."""
    took: dict[str, list[Took]] = {way: [] for way in engines}
    for number in range(rounds + 1):
        order = [*engines] if number % 2 else [*engines][::-1]
        for way in order:
            took[way].append(run(engines[way], asked, batch))
    plain, *others = engines
    return {way: _ratios(took[plain][1:], took[way][1:]) for way in others}


def _ratios(plain: list[Took], guessed: list[Took]) -> dict[str, float | bool]:
    pairs = [*zip(plain, guessed, strict=True)]

    def fewer(name: str) -> float:
        return float(median(getattr(a, name) / getattr(b, name) for a, b in pairs))

    drafted = sum(one.drafted for one in guessed)
    return {
        "steps": fewer("steps"),
        "decode": fewer("decode_s"),
        "wall": fewer("wall_s"),
        "cpu": fewer("cpu_s"),
        "accepted": sum(one.accepted for one in guessed) / max(1, drafted),
        "same": all(a.tokens == b.tokens for a, b in pairs),
    }


def run(engine: Engine, asked: Asked, batch: int) -> Took:
    """All of them, `batch` at a time."""
    took, rest = Took(), iter(enumerate(asked))
    running = 0
    wall, cpu = time.perf_counter(), time.process_time()
    while True:
        for number, (prompt, sampling) in islice(rest, batch - running):
            engine.add(Request(str(number), prompt, sampling))
            running += 1
        if not engine.has_work:
            break
        step = engine.step()
        took.steps += bool(step.decode_tokens)
        took.decode_s += 0 if step.prefill_tokens else step.duration_ns / 1e9
        took.drafted += step.draft_tokens
        took.accepted += step.accepted_tokens
        for output in step.outputs:
            took.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            running -= output.finish_reason is not None
    took.wall_s, took.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return took


def _engine(given: argparse.Namespace, way: Any) -> Engine:
    more: dict[str, Any] = {} if way != "draft" else {"draft_model": str(given.draft)}
    if given.guesses is not None:
        more["num_speculative_tokens"] = given.guesses
    return Engine(
        EngineConfig(
            model=str(given.model),
            speculation=way,
            kv_cache_bytes=2**28,
            max_running=max(given.batch),
            prefix_caching=False,
            threads=given.threads,
            **more,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
