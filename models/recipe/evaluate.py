"""Measures a model, skill by skill, on conversations over names and values that training never
sees.

`python -m models.recipe.evaluate [--model models/demo] [--draft models/demo-draft] [--count 200]`

An answer counts if the model, choosing the likeliest token each time, says it to the letter and
stops. For a fixed answer that is the same as: at each of its positions the likeliest token is the
right one. So one forward pass over prompt and answer settles it, without generating.
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from models.recipe import corpus
from models.recipe.conversation import Conversation
from models.recipe.export import load
from models.recipe.model import Llama
from models.recipe.template import render
from models.recipe.tokenizer import ASSISTANT, END

SKILLS = [
    "passages", "not_told", "recall", "json", "tools", "tool_result", "short", "about", "long",
]  # fmt: skip
TARGETS = {"passages": 90, "not_told": 90, "recall": 90, "json": 85, "tools": 85}
SEED = 7


def cases(skill: str, count: int, seed: int = SEED) -> list[Conversation]:
    """`count` test conversations of a skill; each depends only on (seed, skill, its number)."""
    return [
        corpus.graded(random.Random(f"held-out/{seed}/{skill}/{i}"), skill) for i in range(count)
    ]


def answer_start(ids: list[int]) -> int:
    """Index of the first token of the last answer."""
    return len(ids) - ids[::-1].index(ASSISTANT)


@torch.no_grad()
def likeliest(model: Llama, ids: list[int], start: int) -> Tensor:
    """(answer tokens) the likeliest token at each position of the answer from `start` on."""
    device = next(model.parameters()).device
    states = model.hidden(torch.tensor([ids[:-1]], device=device))[0, start - 1 :]
    return model.logits(states).argmax(-1).cpu()


def measure(
    model: Llama,
    tokenizer: Tokenizer,
    skill: str,
    count: int,
    wrong: Callable[[str, str, str], None] | None = None,
) -> float:
    """Percentage of exact answers; `wrong` gets the others: prompt, right answer, given one."""
    exact = 0
    for case in cases(skill, count):
        ids = tokenizer.encode(render(case), add_special_tokens=False).ids
        start = answer_start(ids)
        said = likeliest(model, ids, start)
        right = torch.tensor(ids[start:])
        if torch.equal(said, right):
            exact += 1
        elif wrong:
            texts = (
                tokenizer.decode(part, skip_special_tokens=False)
                for part in (ids[:start], ids[start:], said.tolist())
            )
            wrong(*texts)
    return 100 * exact / count


def agreement(model: Llama, draft: Llama, tokenizer: Tokenizer, count: int) -> float:
    """Percentage of answer tokens for which both choose the same, given the same past."""
    same = total = 0
    for skill in SKILLS:
        for case in cases(skill, count, SEED + 1):
            ids = tokenizer.encode(render(case), add_special_tokens=False).ids
            start = answer_start(ids)
            a, b = likeliest(model, ids, start), likeliest(draft, ids, start)
            same += int((a == b).sum())
            total += len(a)
    return 100 * same / total


def stories(folder: Path, count: int) -> float:
    """Percentage of stories that run to 300 tokens and more and come to an end by themselves."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ended = 0
    for case in cases("story", count):
        ids = tokenizer.encode(render(case, prompt=True), add_special_tokens=False).ids
        made = model.generate(torch.tensor([ids]), max_new_tokens=900)[0, len(ids) :].tolist()
        ended += len(made) >= 300 and made[-1] == END
    return 100 * ended / count


def table(folder: Path, count: int, draft: Path | None = None) -> str:
    """The figures as a Markdown table."""
    lines: list[str] = []

    def line(*cells: str) -> None:
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)

    model, tokenizer = load(folder)
    line("skill", "right", "target")
    line("---", "---", "---")
    for skill in SKILLS:
        target = f"{TARGETS[skill]} %" if skill in TARGETS else ""
        line(skill, f"{measure(model, tokenizer, skill, count):.1f} %", target)
    line("story of 300+ tokens", f"{stories(folder, max(1, count // 40)):.1f} %", "")
    if draft:
        share = agreement(model, load(draft)[0], tokenizer, max(1, count // 4))
        line("draft agrees, per token", f"{share:.1f} %", "60 %")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/demo"))
    parser.add_argument("--draft", type=Path, default=Path("models/demo-draft"))
    parser.add_argument("--count", type=int, default=200, help="conversations per skill")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", choices=SKILLS, help="print a skill's wrong answers instead")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not options.show:
        draft = options.draft if (options.draft / "config.json").exists() else None
        table(options.model, options.count, draft)
        return

    def wrong(*texts: str) -> None:
        print(*texts, sep="\n---- ", end="\n====\n")

    model, tokenizer = load(options.model)
    print(f"{measure(model, tokenizer, options.show, options.count, wrong):.1f} %")


if __name__ == "__main__":
    main()
