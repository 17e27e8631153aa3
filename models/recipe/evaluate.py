"""Measures a model, skill by skill, on conversations over what training never sees.

`python -m models.recipe.evaluate [--model models/demo] [--draft models/demo-draft] [--count 200]`
`python -m models.recipe.evaluate --set models/recipe/ordinary.jsonl [--wrong]`

Names and values are held out, and so are one in eight of the bank's documents and kinds of
subjects. Values of which there are few (colours, jobs, times of day, numbers below 100) are not,
nor what `about`, `talk` and the lists and counts of `short` ask: these are fixed; of tools, names
are held out, but not what they do, nor the ways to ask for it. A set is a file of documents with
questions, by another hand (`ordinary.py`): `development.jsonl` is to be looked at while the recipe
changes, `ordinary.jsonl` by finished weights alone.

An answer counts if the model, choosing the likeliest token each time, says it to the letter and
stops. For a fixed answer that is the same as: at each of its positions the likeliest token is the
right one. So one forward pass over prompt and answer settles it, without generating. The
arithmetic is float32, on the shipped bfloat16 weights.
"""

import argparse
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor

from bench.result_file import checkpoint_folder
from models.recipe import corpus, ordinary
from models.recipe.batches import answer_start
from models.recipe.card import NOT_YET, write_figures
from models.recipe.conversation import Conversation
from models.recipe.export import load
from models.recipe.files import alone
from models.recipe.model import Llama
from models.recipe.template import render
from models.recipe.tokenizer import END

SKILLS = {
    "passages": "answer from 1-5 passages, with the right citation",
    "large": "answer from 2-4 passages of whole documents, two in each",
    "not_told": "say that the passages do not tell",
    "recall": "a fact that the user stated",
    "not_stated": "say that the user did not state it",
    "json": "requested keys from a list of labels and values",
    "json_of_prose": "requested keys from any text",
    "tools": "call an offered tool",
    "tool_result": "report what a tool returned",
    "no_tool": "say that no offered tool fits",
    "short": "repeat, change case, count, list, spell",
    "about": "what Penstock's parts do",
    "talk": "greetings, thanks, and what it does not do",
    "bare": "a question that documents answer, beside none: say what it answers from",
    "vain": "a question for which a search found nothing: say that they do not tell",
    "long": "answer from 7-9 passages",
}
TARGETS = {"recall": 90, "json": 85, "tools": 85, "draft": 60}
SEED = 11
ANSWER, STORY = 128, 900  # tokens that are written at most


def cases(skill: str, count: int, seed: int = SEED) -> list[Conversation]:
    """`count` test conversations of a skill; each depends only on (seed, skill, its number)."""
    return [
        corpus.graded(random.Random(f"held-out/{seed}/{skill}/{i}"), skill) for i in range(count)
    ]


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
    seed: int = SEED,
    wrong: Callable[[str, str, str], None] | None = None,
) -> float:
    """Percentage of exact answers; `wrong` gets the others: prompt, right answer, given one."""
    exact = 0
    for case in cases(skill, count, seed):
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


class Writer:
    """A checkpoint that writes through transformers, always the likeliest token."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        )
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def prompt(self, case: Conversation) -> list[int]:
        return self.tokenizer.encode(render(case, prompt=True), add_special_tokens=False).ids

    def write(self, prompt: list[int], longest: int) -> list[int]:
        """The tokens after the prompt, with the one that ends the turn."""
        ids = torch.tensor([prompt])
        longest = min(longest, self.model.config.max_position_embeddings - len(prompt))
        made: list[int] = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=longest
        )[0, len(prompt) :].tolist()
        return made


def stories(writer: Writer, count: int, seed: int = SEED) -> float:
    """Percentage of stories that run to 300 tokens and more and come to an end by themselves."""
    made = [writer.write(writer.prompt(case), STORY) for case in cases("story", count, seed)]
    return 100 * sum(len(ids) >= 300 and ids[-1] == END for ids in made) / count


def agreement(
    writer: Writer, draft: Llama, skills: Iterable[str], count: int, longest: int, seed: int = SEED
) -> float:
    """Percentage of the tokens that the model writes, up to `longest` at a time, for which the
    draft, given the same past, finds the same likeliest."""
    same = total = 0
    for skill in skills:
        for case in cases(skill, count, seed):
            prompt = writer.prompt(case)
            made = writer.write(prompt, longest)
            same += int((likeliest(draft, prompt + made, len(prompt)) == torch.tensor(made)).sum())
            total += len(made)
    return 100 * same / total


def table(folder: Path, draft: Path, count: int, seed: int = SEED) -> str:
    """The figures as a Markdown table, printed line by line as they come."""
    lines: list[str] = []

    def line(*cells: str) -> None:
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)

    def row(label: str, share: float, target: str = "") -> None:
        line(label, f"{share:.1f} %", f"{TARGETS[target]} %" if target in TARGETS else "")

    line(f"skill ({count} conversations each, seed {seed})", "right", "target")
    line("---", "---", "---")
    (model, tokenizer), (guesser, _) = load(folder), load(draft)
    for skill, what in SKILLS.items():
        row(f"{skill}: {what}", measure(model, tokenizer, skill, count, seed), skill)
    writer, few = Writer(folder), max(1, count // 20)  # these are written out token by token
    of_each = f"({few} conversations each)"
    row(f"story: 300 tokens and more, ended by itself {of_each}", stories(writer, few, seed))
    agreed = agreement(writer, guesser, SKILLS, few, ANSWER, seed)
    row(f"draft agrees, per token of answers, cut at {ANSWER} tokens {of_each}", agreed, "draft")
    agreed = agreement(writer, guesser, ["story"], few, STORY, seed)
    row(f"draft agrees, per token of stories {of_each}", agreed)
    return "\n".join(lines)


def at_least_one(text: str) -> int:
    """An argument's type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return int(text)


def print_wrong(*texts: str) -> None:
    print(*texts, sep="\n---- ", end="\n====\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=checkpoint_folder, default="models/demo")
    parser.add_argument("--draft", type=checkpoint_folder, default="models/demo-draft")
    parser.add_argument("--count", type=at_least_one, default=200, help="conversations per skill")
    parser.add_argument("--seed", type=int, default=SEED, help="of the conversations")
    parser.add_argument("--threads", type=at_least_one, default=1)
    parser.add_argument(
        "--show", choices=list(SKILLS), help="print a skill's wrong answers instead"
    )
    parser.add_argument("--set", type=Path, help="measure on the documents of this file instead")
    parser.add_argument("--wrong", action="store_true", help="with --set: print wrong answers")
    parser.add_argument("--card", action="store_true", help="write the figures into README.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.set:
        writer = Writer(options.model)
        for title, some in (
            ("each document among three others", ordinary.among_others(options.set)),
            ("what retrieval brings of all documents", ordinary.brought(options.set)),
        ):
            print(title, ordinary.measure(writer, some, options.wrong), sep="\n", flush=True)
        return
    if options.show:
        model, tokenizer = load(options.model)
        share = measure(model, tokenizer, options.show, options.count, options.seed, print_wrong)
        print(f"{share:.1f} %")
        return
    if not options.card:
        table(options.model, options.draft, options.count, options.seed)
        return
    with alone(options.model.absolute().parent):  # as `make` has it while it writes there
        card = options.model / "README.md"
        write_figures(card, NOT_YET)
        write_figures(card, table(options.model, options.draft, options.count, options.seed))


if __name__ == "__main__":
    main()
