"""A stretch of a lesson by the clock, from a state that is kept here, with a mixture of its own:
`python -m models.recipe.checkpoint.go LESSON MINUTES OUT.pt --start STATE [rates …]`.
"""

import argparse
import random
import statistics
import time
from functools import partial
from pathlib import Path

import torch

from models.recipe import corpus, lessons, train
from models.recipe.batches import Row
from models.recipe.centred import Centred
from models.recipe.checkpoint.common import llama, say, source, tokenizer
from models.recipe.crew import Crew, Tally
from models.recipe.vocabulary import movable

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("lesson", choices=["saying", "answers", "draft"])
parser.add_argument("minutes", type=float)
parser.add_argument("out", type=Path)
parser.add_argument("--start", type=Path, required=True)
parser.add_argument("--old", type=float, default=1.2e-4)
parser.add_argument("--new", type=float, default=3.5e-4)
parser.add_argument("--share", type=float, default=0.3, help="of passages")
parser.add_argument("--warm", type=int, default=40, help="steps")
parser.add_argument("--decay", type=float, default=0.3, help="from this share on")
parser.add_argument("--clip", type=float, default=250.0)
parser.add_argument("--first", type=int, default=8_000_000, help="number of the first example")
parser.add_argument("--longest", type=int, default=2400)
parser.add_argument("--rows", type=int, default=16)
o = parser.parse_args()

rest = sum(share for skill, share in corpus.LATER.items() if skill != "passages")
corpus.LATER["passages"] = rest * o.share / (1 - o.share)
torch.manual_seed(o.first)
model = llama(o.start, "draft" if o.lesson == "draft" else "demo")
moves, drawn, half = movable(tokenizer), source("3"), train.halves()
lesson: lessons.Answers = {
    "saying": lambda: lessons.Saying(model, moves),
    "answers": lambda: lessons.Answers(model, moves),
    "draft": lambda: lessons.Draft(model, moves),
}[o.lesson]()
groups = lesson.groups()
lesson.requires_grad_(False)
for parameter in (p for group in groups for p in group):
    parameter.requires_grad_(True)
optimizer = torch.optim.AdamW([{"params": g} for g in groups], betas=(0.9, 0.98), weight_decay=0.0)
crew, centred, tally = Crew(lesson, 2, half), Centred(lesson), Tally()
began = saved = time.time()
number, step, tokens = o.first, 0, 0
pool: list[Row] = []
norms: list[float] = []


def save(name: str = "") -> None:
    path = o.out.with_stem(f"{o.out.stem}{name}")
    torch.save({"model": model.state_dict(), "number": number}, path)


def measured(some: list[Row]) -> None:
    for one in some:  # nothing is padded
        lesson.lose([one], half)


while (share := (time.time() - began) / (o.minutes * 60)) < 1:
    if len(pool) < o.rows:
        while len(pool) < 16 * o.rows:
            one = drawn.row(number, 0.75 + 0.2 * share, False)
            number += 1
            if len(one.ids) <= o.longest:
                pool.append(one)
        random.Random(number).shuffle(pool)
        some = pool[: train.MEANS]
        centred.measure(partial(measured, some))
    rows, pool = pool[: o.rows], pool[o.rows :]
    late = max(0.0, share - o.decay) / (1 - o.decay)
    factor = min(1.0, (step + 1) / o.warm) * max(0.05, 1 - late)
    for group, rate in zip(optimizer.param_groups, (o.old, o.new), strict=True):
        group["lr"] = rate * factor
    crew.learn(rows, tally)
    moved = [p for g in groups for p in g if p.grad is not None]
    norms.append(float(torch.nn.utils.clip_grad_norm_(moved, o.clip)))
    usual = statistics.median(norms[-100:])
    if norms[-1] < 3 * usual:
        with centred.stepping():
            optimizer.step()
    else:
        say(f"step {step} left out: norm {norms[-1]:.0f}, usual {usual:.0f}")
    optimizer.zero_grad()
    step, tokens = step + 1, tokens + sum(len(one.ids) for one in rows)
    if step % 20 == 0:
        speed = tokens / (time.time() - began)
        done = f"step {step} {tokens / 1e6:.2f}M {speed:.0f}/s {factor:.2f} norm {usual:.1f}"
        say(f"{done} | {tally}")
        tally = Tally()
    if time.time() - saved > 300:
        save(f"-{round((time.time() - began) / 60)}")
        saved = time.time()
save()
