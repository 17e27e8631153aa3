"""Passages as a retrieval service hands them over: titled, cut, at times with shorter lines."""

import random
import re
from dataclasses import dataclass

SENTENCE_END = re.compile(r"\n\s*\n|(?<=[a-z)’'”\"\d][.!?]) +(?=[A-Z“\"‘\d£$])|\n(?=[-*•|] )")
HEADINGS = [
    "About", "Overview", "Notes", "General", "Details", "History", "Visiting", "People", "Prices",
    "Contact", "Introduction", "Background", "What you need to know", "Practical", "Summary",
]  # fmt: skip
PATH = " › "  # between the parts of a title, as the retrieval service puts them
ENDINGS = (".md", ".md", ".md", ".txt", ".pdf", "", "_2.md", "-final.txt")
Spans = list[tuple[int, int]]


@dataclass
class Passage:
    """A passage, and where it answers the question: text[start:end] for each span."""

    title: str
    text: str
    tells: Spans

    @property
    def whole(self) -> str:
        """Title and text, for finding out what is named where."""
        return f"{self.title}\n{self.text}"


def passage(rng: random.Random, title: str, text: str, tells: Spans) -> Passage:
    """A passage from a whole text; some are given shorter lines, or begin with their heading."""
    if rng.random() < 0.25:
        text = wrapped(text, rng.randint(45, 120))
    path = title.split(PATH)
    if len(path) > 1 and rng.random() < 0.7:
        heading = f"{'#' * rng.randint(1, len(path) - 1)} {path[-1]}\n\n"
        text, tells = heading + text, [(a + len(heading), b + len(heading)) for a, b in tells]
    return Passage(title, text, tells)


def merged(rng: random.Random, passages: list[Passage], title: str = "Notes") -> Passage:
    """One passage of several, which tells of different things."""
    lines = any("\n" in one.text for one in passages)
    join = "\n\n" if lines else rng.choice((" ", "\n", "\n\n"))
    text = ""
    tells: Spans = []
    for one in passages:
        text += join if text else ""
        tells += [(len(text) + start, len(text) + end) for start, end in one.tells]
        text += one.text
    return Passage(titled(rng, title, "notes"), text, tells)


def wrapped(text: str, width: int) -> str:
    """The text with line ends for some of its spaces, all else unchanged."""
    letters = list(text)
    begin, space = 0, -1
    for at, letter in enumerate(text):
        if letter == "\n":
            begin, space = at + 1, -1
        elif at - begin >= width and space > 0 and not text.startswith("|", begin):
            letters[space] = "\n"
            begin, space = space + 1, -1
        if letter == " " and at > begin:
            space = at
    return "".join(letters)


def cut(text: str, words: int) -> list[tuple[int, int]]:
    """(start, end) of chunks of up to about `words` words, parted between sentences."""
    borders = [found.end() for found in SENTENCE_END.finditer(text)] + [len(text)]
    chunks, start, last = [], 0, 0
    for border in borders:
        if last > start and len(text[start:border].split()) > words:
            chunks.append((start, last))
            start = last
        last = border
    chunks.append((start, last))
    return [(a, a + len(text[a:b].rstrip())) for a, b in chunks if text[a:b].strip()]


def within(spans: Spans, start: int, end: int) -> Spans:
    """The spans that lie in text[start:end], counted from its start."""
    return [(a - start, b - start) for a, b in spans if start <= a and b <= end]


def titled(rng: random.Random, title: str, kind: str, bare: bool = True) -> str:
    """A title as uploads have it: words, a file name, both; or none, if it may be `bare`."""
    title = title or _capital(kind)
    roll = rng.random()
    if roll < 0.3:
        return title
    if roll < 0.38:
        return title if kind.lower() in title.lower() else f"{_capital(kind)}: {title}"
    if roll < 0.72:
        stem = title if rng.random() < 0.6 else kind
        below = (rng.choice(HEADINGS),) if rng.random() < 0.25 else ()
        return PATH.join((_file(rng, stem), title, *below))
    if roll < 0.76:
        return PATH.join((title, rng.choice(HEADINGS)))
    return _file(rng, title) if not bare or roll < 0.9 else ""


def _file(rng: random.Random, name: str) -> str:
    """A name for a file about something."""
    stem = re.sub(r"[^a-z0-9]+", rng.choice("-_"), name.lower()).strip("-_") or "text"
    return stem + rng.choice(ENDINGS)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
