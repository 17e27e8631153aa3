"""What an answer says of its passages: marks ([1], [2], …), and quotations that it gives them.

A quotation is attributed to the passages whose marks stand right behind it, or before it in its
sentence. It is in a passage if its words stand there in their order: case, spaces, emphasis and the
kind of quotes, dashes and apostrophes do not count, and an ellipsis stands for whatever was left
out. What is no one's is not checked, nor is what stands in code.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from protos.common_pb2 import Passage
from services.common.text.normal_form import normalized
from services.common.text.titles import name_in

_MARK = re.compile(r"\[(\d{1,3})\]")
_INDEXED = re.compile(r"_$|(?<![^\W_])[A-Za-z]$")
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
_QUOTE = re.compile(
    r"\"([^\"\n]{0,2000})\"|“([^“”\n]{0,2000})”|„([^„“”\n]{0,2000})[“”]|«([^«»\n]{0,2000})»"
)
_SHORTEST = 20  # characters of a quotation, as it is compared: shorter ones are names and words
_AROUND = 160  # characters to either side in which its mark stands
_BEHIND = re.compile(r"[^\n.!?\[\]]{0,120}[.!?]?\s?((?:\[\d{1,3}\][\s,;]{0,2})+)")
_BEFORE = re.compile(r"((?:\[\d{1,3}\][\s,;]{0,2})+)[^\n.!?\[\]]{0,120}$")
_LEFT_OUT = re.compile(r"\[?(?:\.{3}|…)\]?")
_LIKE: dict[str, str | None] = {
    **dict.fromkeys("’‘`´", "'"),
    **dict.fromkeys("‐‑‒–—", "-"),
    **dict.fromkeys('*_"“”„«»', None),
}
_AS_COMPARED = str.maketrans(_LIKE)
_EDGES = " .,;:!?-'()"


def filename(passage: Passage) -> str:
    """Of the passage's document: its title without the headings above the passage. What the client
    brought itself has none: all of its title is its name."""
    return name_in(passage.title) if passage.source_id else passage.title


def place(passage: Passage) -> dict[str, dict[str, int]]:
    """Where in its document it stands: `pages` or `rows`, of those that have some."""
    spans = {"pages": passage.pages, "rows": passage.rows}
    return {
        name: {"first": span.first, "last": span.last}
        for name, span in spans.items()
        if passage.HasField(name)
    }


def annotations(text: str, passages: Sequence[Passage]) -> list[dict[str, Any]]:
    """One `file_citation` for each mark in `text` that names one of `passages`, from 1 on.

    `index` is the character of the mark's bracket. A passage that the client brought itself has no
    file: its `file_id` is null.
    """
    found = []
    for mark in _MARK.finditer(text):
        number = int(mark.group(1))
        if 1 <= number <= len(passages):
            passage = passages[number - 1]
            found.append(
                {
                    "type": "file_citation",
                    "index": mark.start(),
                    "file_id": passage.source_id or None,
                    "filename": filename(passage),
                }
            )
    return found


@dataclass(frozen=True)
class Quotation:
    """One that none of the passages has which it is attributed to."""

    index: int  # of its first character, behind the quote
    length: int
    passages: tuple[int, ...]  # from 1 on


class Checked(NamedTuple):
    """An answer against the passages that its prompt held."""

    cited: int = 0  # marks that name a passage
    unknown: tuple[int, ...] = ()  # the numbers of those that name none
    quoted: int = 0  # quotations that are attributed to a passage
    unfounded: tuple[Quotation, ...] = ()  # those of them that are not in it


def check(text: str, passages: Sequence[Passage]) -> Checked:
    """Without passages nothing is cited: a [1] may be anything."""
    if not passages:
        return Checked()
    prose = _CODE.sub(lambda code: " " * len(code.group()), text)
    marks = [(int(mark.group(1)), mark.start()) for mark in _MARK.finditer(prose)]
    cited = sum(1 <= n <= len(passages) for n, _ in marks)
    others = [n for n, at in marks if not 1 <= n <= len(passages) and not _index(prose, at)]
    unknown = tuple(dict.fromkeys(others))
    told: dict[int, str] = {}
    quoted, unfounded = 0, []
    for start, quote in _quotes(prose):
        words = _compared(_MARK.sub("", quote)) if len(quote) >= _SHORTEST else ""
        if len(words) < _SHORTEST:
            continue
        of = [n for n in _attributed(prose, start, quote) if 1 <= n <= len(passages)]
        if not of:
            continue
        quoted += 1
        for number in of:
            if number not in told:
                passage = passages[number - 1]
                told[number] = _compared(f"{passage.title}\n{passage.text}")
        if not any(_stands_in(words, told[number]) for number in of):
            unfounded.append(Quotation(start, len(quote), tuple(of)))
    return Checked(cited, unknown, quoted, tuple(unfounded))


def _index(prose: str, at: int) -> bool:
    """Behind a letter alone or an underscore ("a[12]"). Many models write "the lighthouse[2]"."""
    return bool(_INDEXED.search(prose[max(0, at - 2) : at]))


def _quotes(prose: str) -> Iterator[tuple[int, str]]:
    for found in _QUOTE.finditer(prose):
        kind = found.lastindex or 1
        yield found.start(kind), found.group(kind)


def _attributed(prose: str, start: int, quote: str) -> list[int]:
    """Numbers of passages; none, if it is nobody's."""
    end = start + len(quote) + 1
    marks = _BEHIND.match(prose[end : end + _AROUND])
    marks = marks or _BEFORE.search(prose[max(0, start - 1 - _AROUND) : start - 1])
    return [int(number) for number in _MARK.findall(marks.group(1))] if marks else []


def _compared(text: str) -> str:
    return normalized(text.translate(_AS_COMPARED).replace("…", "..."), "NFKC").casefold()


def _stands_in(words: str, passage: str) -> bool:
    at = 0
    for part in _LEFT_OUT.split(words):
        part = part.strip(_EDGES)
        found = passage.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return True
