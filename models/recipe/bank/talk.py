"""The bank's small talk: what is said beside documents, and the answers.

`? ` gives what a user may say, `?+` what many do, `= ` what is answered; alternatives are parted by
bars.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from models.recipe.bank.render import validate
from models.recipe.bank.text import BankError, Text, definitions, parse, split

OFF_TOPIC = "I only answer from the documents"


@dataclass(frozen=True)
class Exchange:
    """Ways to say something, and ways to answer."""

    asks: tuple[Text, ...]
    answers: tuple[Text, ...]
    often: bool  # whether many say so

    @property
    def asks_facts(self) -> bool:
        """Whether the user asks for what documents may tell."""
        return any(str(part).startswith(OFF_TOPIC) for text in self.answers for part in text.parts)


def _plain(said: str) -> str:
    """Without what differs from one who types it to another: case and punctuation."""
    return " ".join(re.findall(r"[\w{}:]+", said.lower()))


def read(path: Path) -> list[Exchange]:
    """The exchanges of a file. Raises BankError naming file and line."""
    found: list[Exchange] = []
    asks: tuple[Text, ...] = ()
    said, often = set[str](), False
    answered: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        mark, words = line[:2].strip(), line[2:]
        if not line.strip() or mark == "#":
            continue
        try:
            if mark not in ("?", "?+", "=") or (mark == "=") is not bool(asks):
                raise BankError("a `?` line is followed by a `=` line, and by nothing else")
            often = mark == "?+" or (mark == "=" and often)
            texts = tuple(parse(text) for text in split(words, "|"))
            for text in texts:
                validate(text)
            if mark != "=":
                asks = texts
                said = {_plain(text) for text in split(words, "|")} - {""}
                continue
            for asked in asks:
                definitions(asked, *texts)
            for one in said:
                if answered.setdefault(one, words) != words:
                    raise BankError(f"`{one}` has two answers")
        except BankError as error:
            raise BankError(f"{path.name}:{number}: {error}") from None
        found.append(Exchange(asks, texts, often))
        asks = ()
    if asks:
        raise BankError(f"{path.name}:{number}: the last `?` line has no `=` line")
    return found
