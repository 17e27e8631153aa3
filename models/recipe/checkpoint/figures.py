"""Figures of a state, from its likeliest tokens behind what is right so far:
`python -m models.recipe.checkpoint.figures STATE [sets…] [wrong]`, sets among bank, platform, easy
and the skills. "tail": all tokens behind the first one, up to the number.
"""

import random
import sys
from collections import Counter
from pathlib import Path

import torch

from models.recipe import corpus, evaluate, ordinary
from models.recipe.batches import Row, answer_start, row
from models.recipe.checkpoint.common import HERE, llama, say, tokenizer
from models.recipe.model import Llama
from models.recipe.skills.passages import NOT_TOLD

(SPACE,) = tokenizer.encode(" ").ids
DENY = tokenizer.encode(NOT_TOLD, add_special_tokens=False).ids[0]


def rows_of(name: str, count: int = 40) -> list[Row]:
    if name == "bank":
        kinds = ("not_told", "passages", "passages", "passages")
        made = [corpus.graded(random.Random(f"bank/{i}"), kinds[i % 4]) for i in range(2 * count)]
    elif name == "platform":
        made = [case.conversation for case in ordinary.brought(HERE.parent / "development.jsonl")]
    elif name == "easy":
        made = [case.conversation for case in ordinary.among_others(HERE / "easy.jsonl")]
    else:
        made = evaluate.cases(name, count)
    return [row(tokenizer, one, 4096) for one in made]


def figures(model: Llama, rows: list[Row], wrong: bool = False) -> str:
    n: Counter[str] = Counter()
    for one in rows:
        start = answer_start(one.ids)
        said, right = evaluate.likeliest(model, one.ids, start), torch.tensor(one.ids[start:])
        same = said == right
        n.update(tokens=len(same), right=int(same.sum()))
        if wrong and not same.all():
            print("   ", *map(_shown, one.ids[start:], said.tolist()))
        if one.skill == "not_told":
            n.update(untold=1, silent=bool(same.all()))
            continue
        n.update(told=1, exact=bool(same.all()), first=bool(same[0]), denied=int(said[0]) == DENY)
        spaces = (right == SPACE).nonzero().flatten().tolist()
        if one.skill == "passages" and spaces and spaces[-1] > 0:
            at = spaces[-1]
            n.update(tail=bool(same[1 : at + 1].all()), number=bool(same[at + 1]))
    names, told = ("exact", "first", "tail", "number", "denied"), max(1, n["told"])
    shares = " ".join(f"{name} {100 * n[name] / told:.0f}" for name in names)
    untold, tokens = f"not told {n['silent']} of {n['untold']}", 100 * n["right"] / n["tokens"]
    return f"{shares} of {n['told']}; {untold}; tokens {tokens:.1f}"


def _shown(right: int, said: int) -> str:
    a, b = (repr(tokenizer.decode([x], skip_special_tokens=False))[1:-1] for x in (right, said))
    return a if right == said else f"{{{a}→{b}}}"


if __name__ == "__main__":
    path, *names = sys.argv[1:]
    model, wrong = llama(Path(path)).eval(), "wrong" in names
    for name in [n for n in names if n != "wrong"] or ["bank", "platform", "easy"]:
        say(name, figures(model, rows_of(name), wrong))
