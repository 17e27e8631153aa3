"""Sets of short documents and questions by hands that had no part in the bank.

A line of a set is a document: `title`, `text`, `kind`, `questions`; these have `question`, `answer`
and, some of them, `also`. `answer` stands in the text, `also` are other ways to say it; it is null
for what is not told.
Each question is asked over its document and three others of the set, or over what the platform's
retrieval brings for it.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from models.recipe.conversation import Conversation, Document, Span, assistant, user
from models.recipe.shown import Shelf
from models.recipe.skills.passages import NOT_TOLD
from models.recipe.tokenizer import END

OTHERS = 3
LONGEST = 64  # tokens of an answer
SEED = 5


class Writes(Protocol):
    """A checkpoint that answers."""

    tokenizer: Any

    def prompt(self, case: Conversation) -> list[int]: ...

    def write(self, prompt: list[int], longest: int) -> list[int]: ...


@dataclass
class Case:
    """A question of a set, put to some passages."""

    conversation: Conversation
    answers: list[str]  # the right one first; none: not told
    numbers: set[int]  # of the passages that tell; empty where none was found that does


def among_others(path: Path) -> list[Case]:
    """All questions of a file, each over its document and three others, all of them whole."""
    documents = _documents(path)
    found = []
    for at, document in enumerate(documents):
        for number, asked in enumerate(document["questions"]):
            rng = random.Random(f"{SEED}/{at}/{number}")
            others = rng.sample([d for d in documents if d is not document], OTHERS)
            place = rng.randint(0, OTHERS)
            shown = [*others[:place], document, *others[place:]]
            passages = [{"title": d["title"], "text": d["text"]} for d in shown]
            found.append(_case(asked, passages, [d is document for d in shown]))
    return found


def brought(path: Path) -> list[Case]:
    """All questions of a file, each over what retrieval brings for it from all its documents."""
    documents = _documents(path)
    shelf = Shelf.of([{"title": d["title"], "text": d["text"]} for d in documents])
    found = []
    for at, document in enumerate(documents):
        for asked in document["questions"]:
            shown = shelf.brings(asked["question"])
            found.append(_case(asked, [one for _, one in shown], [of == at for of, _ in shown]))
    return found


def _documents(path: Path) -> list[dict[str, Any]]:
    """Raises ValueError, which names the line, if one is no JSON."""
    found = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                found.append(json.loads(line))
            except ValueError as why:
                raise ValueError(f"{path}:{number}: {why}") from None
    return found


def _case(asked: dict[str, Any], passages: list[Document], own: list[bool]) -> Case:
    """`own`: which passages are of the question's document."""
    answers = [asked["answer"], *asked.get("also", [])] if asked["answer"] else []
    spans = [
        Span(number, start, start + len(answers[0]))
        for number, one in enumerate(passages)
        if answers and own[number] and (start := one["text"].find(answers[0])) >= 0
    ]
    right = f"{answers[0]} [{spans[0].document + 1}]." if spans else NOT_TOLD
    made = Conversation(
        "passages" if spans else "not_told",
        [user(asked["question"]), assistant(right)],
        documents=passages,
        tells=spans,
    )
    return Case(made, answers, {span.document + 1 for span in spans})


def measure(writer: Writes, some: list[Case], show: bool = False) -> str:
    """What the model says to a set's questions, in a few lines; `show` adds its wrong answers."""
    told = exact = value = cited = untold = silent = ended = denied = 0
    lines: list[str] = []
    for case in some:
        made = writer.write(writer.prompt(case.conversation), LONGEST)
        ended += made[-1] == END
        said = writer.tokenizer.decode(made).strip()
        if not case.answers:
            untold += 1
            right = said == NOT_TOLD
            silent += right
        else:
            told += 1
            words, _, number = said.removesuffix("].").rpartition(" [")
            same = _plain(words) in map(_plain, case.answers)
            value += same
            there = number.isdigit() and int(number) in case.numbers
            cited += there
            right = same and there and said.endswith("].")
            exact += right
            denied += said == NOT_TOLD
        if show and not right:
            asked = case.conversation.messages[0]["content"]
            lines.append(
                f"{asked} = {' / '.join(case.answers) or '-'} {sorted(case.numbers)}: {said}"
            )
    total = told + untold
    lines += [
        f"told ({told}): {100 * exact / max(1, told):.1f} % right with the right number, "
        f"{100 * value / max(1, told):.1f} % right whatever the number, "
        f"{100 * cited / max(1, told):.1f} % with the right number, "
        f"{100 * denied / max(1, told):.1f} % denied",
        f"not told ({untold}): {100 * silent / max(1, untold):.1f} % right",
        f"ended by itself: {100 * ended / max(1, total):.1f} %",
    ]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """The words alone, as two ways to write the same answer share them."""
    words = text.casefold().strip(" .,;:!?\"'").split()
    return " ".join(words[1:] if words[:1] in (["the"], ["a"], ["an"]) else words)
