"""The training loop of a lesson: warm-up, a stable stretch, a decay; resumable between pools.

The schedule is that of MiniCPM (Hu et al., 2024): rates stay high for most of the training.
"""

import random
import time
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

import torch

from models.recipe.batches import Row
from models.recipe.centred import Centred
from models.recipe.crew import Crew, Tally
from models.recipe.files import replacing, state_of
from models.recipe.lessons import Lesson, Source

POOL = 256  # examples that are drawn at once
SAVE_EVERY = 4  # pools
MEANS = 48  # examples from which a pool's means are
CLIP = 250.0  # the norm of a step's gradients; few reach it
WILD = 4.0  # times the norms of pools before: trainings were lost at six and twelve times
SETTLED = 4  # pools after which that is looked at: the first warm up


@dataclass(frozen=True)
class Plan:
    """How long and how fast."""

    pools: int
    rate: float  # AdamW's, of what knows something
    new_rate: float  # of what begins at nothing
    progress: tuple[float, float]  # how far the corpus is (`corpus.py`), from and to
    rows: int = 16  # examples of a step
    longest: int = 2800  # tokens of an example
    warm_up: int = 20  # steps
    decay_from: float = 0.5  # share of the lesson

    def rates(self, step: int, share: float) -> tuple[float, float]:
        late = max(0.0, share - self.decay_from) / (1 - self.decay_from)
        factor = min(1.0, (step + 1) / self.warm_up) * max(0.05, 1 - late)
        return self.rate * factor, self.new_rate * factor


@dataclass
class Progress:
    """How far a lesson is."""

    pool: int = 0
    step: int = 0
    tokens: int = 0
    norms: list[float] = field(default_factory=list)  # of gradients, each pool's median


def halves() -> bool:
    """Whether bfloat16 is faster than float32: on a CPU only where it has products of it.
    With AVX-512 alone it takes 1.5 times as long, with AVX2 seven times; with AVX-512's own
    products half as long, those of attention a sixth.
    """
    cpu = torch.cpu
    return cpu._is_amx_tile_supported() or cpu._is_avx512_bf16_supported()


class Training:
    """A lesson, its optimizer and how far they are; kept in one file between pools."""

    def __init__(
        self, lesson: Lesson, plan: Plan, source: Source, threads: int, half: bool
    ) -> None:
        self.lesson, self.plan, self.source = lesson, plan, source
        moved = lesson.groups()
        lesson.requires_grad_(False).zero_grad()  # what another lesson left, too
        for parameter in (p for group in moved for p in group):
            parameter.requires_grad_(True)
        self.half, self.crew, self.centred = half, Crew(lesson, threads, half), Centred(lesson)
        groups = [{"params": group} for group in moved]
        self.optimizer = torch.optim.AdamW(groups, plan.rate, betas=(0.9, 0.98), weight_decay=0.0)
        self.done = Progress()

    def restore(self, path: Path) -> None:
        """Goes on from a file of `save`. Raises ValueError if that is of another plan."""
        saved = state_of(path)
        if saved.get("plan") != asdict(self.plan):
            raise ValueError(f"{path} is of another plan: remove it to begin anew")
        if saved["half"] is not self.half:
            names = {True: "bfloat16", False: "float32"}
            print(f"goes on in {names[self.half]}, which is faster here; until now it was "
                  f"{names[saved['half']]}", flush=True)  # fmt: skip
        self.lesson.load_state_dict(saved["lesson"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.done = Progress(**saved["done"])
        means = zip(self.centred.layers, saved["means"], strict=True)
        self.centred.means = {layer: mean for layer, mean in means if mean is not None}

    def save(self, path: Path) -> None:
        """Writes a file that is whole or not there."""
        state: dict[str, Any] = {
            "plan": asdict(self.plan),
            "half": self.half,
            "lesson": self.lesson.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "done": asdict(self.done),
            "means": [self.centred.means.get(layer) for layer in self.centred.layers],
        }
        with replacing(path) as partial:
            torch.save(state, partial)

    def learn(self) -> Tally:
        """One pool of examples. Raises ArithmeticError where its gradients say that all is being
        lost, ValueError if no example fits the lesson.
        """
        done, plan, tally, norms = self.done, self.plan, Tally(), list[float]()
        share = done.pool / plan.pools
        rows = self._drawn(plan.progress[0] + share * (plan.progress[1] - plan.progress[0]))
        means = rows[:MEANS]  # one by one: nothing is padded
        self.centred.measure(lambda: [self.lesson.lose([one], self.half) for one in means])
        steps = max(1, len(rows) // plan.rows)
        for step in (rows[first::steps] for first in range(steps)):
            for group, rate in zip(
                self.optimizer.param_groups, plan.rates(done.step, share), strict=True
            ):
                group["lr"] = rate
            self.crew.learn(step, tally)
            norms.append(self._clipped())
            with self.centred.stepping(), self.lesson.easing():
                self.optimizer.step()
            self.optimizer.zero_grad()
            done.step += 1
            done.tokens += sum(self.lesson.cost(one) for one in step)
        self._settle(median(norms))
        done.pool += 1
        tally.add({"norm": (done.norms[-1], 1)})
        return tally

    def _clipped(self) -> float:
        """The norm that a step's gradients had. Raises ArithmeticError if it is not finite, before
        a weight is moved.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.lesson.parameters(), CLIP).item()
        if not isfinite(norm):
            raise self._lost(f"the gradients' norm is {norm}")
        return norm

    def _settle(self, norm: float) -> None:
        """Takes a pool's norm. Raises ArithmeticError if it is far above those before."""
        before = self.done.norms
        if len(before) >= SETTLED and norm > WILD * median(before):
            raise self._lost(f"the gradients' norm grew from {median(before):.0f} to {norm:.0f}")
        before.append(norm)

    def _lost(self, why: str) -> ArithmeticError:
        at = f"pool {self.done.pool + 1}, after step {self.done.step}"
        return ArithmeticError(f"{at}: {why}; nothing of it is saved, the last checkpoint stands")

    def _drawn(self, progress: float) -> list[Row]:
        """The pool's examples; as many as there are, those that the lesson takes."""
        first = self.done.pool * POOL
        drawn = (
            self.source.row(number, progress, self.lesson.looked_up)
            for number in range(first, first + POOL)
        )
        rows = [r for r in drawn if len(r.ids) <= self.plan.longest and self.lesson.takes(r)]
        if not rows:
            raise ValueError(
                f"no example fits {type(self.lesson).__name__} of {first} to {first + POOL - 1}: "
                f"{self.plan.longest} tokens at most"
            )
        random.Random(f"{self.source.seed}/{first}").shuffle(rows)
        return rows


def train(lesson: Lesson, plan: Plan, source: Source, path: Path, threads: int, half: bool) -> None:
    """Learns the lesson, or goes on from the checkpoint at `path`; writes one every few pools.

    The result depends on the arguments alone, but for the rounding of other hardware and of
    another number of threads. Raises ValueError if the checkpoint is of another plan, and what
    `Training.learn` does.
    """
    training = Training(lesson, plan, source, threads, half)
    if path.exists():
        training.restore(path)
    done, started, first = training.done, time.time(), training.done.tokens
    print(f"{type(lesson).__name__}: pool {done.pool} of {plan.pools}", flush=True)
    while done.pool < plan.pools:
        tally = training.learn()
        speed = (done.tokens - first) / (time.time() - started)
        print(
            f"{time.strftime('%H:%M:%S')} pool {done.pool}/{plan.pools} step {done.step} "
            f"{done.tokens / 1e6:.2f}M tokens {speed:.0f}/s | {tally}",
            flush=True,
        )
        if done.pool % SAVE_EVERY == 0 or done.pool == plan.pools:
            training.save(path)
