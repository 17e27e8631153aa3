"""Passages as a retrieval service hands them over: titled, cut, at times with shorter lines."""

import random
import re
from dataclasses import dataclass

SENTENCE_END = re.compile(r"\n\s*\n|(?<=[a-z)’'”\"\d][.!?]) +(?=[A-Z“\"‘\d£$])|\n(?=[-*•|] )")
HEADINGS = [
    "About", "Overview", "Notes", "General", "Details", "History", "Visiting", "People", "Prices",
    "Contact", "Introduction", "Background", "What you need to know", "Practical", "Summary",
]  # fmt: skip
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
    """A passage from a whole text; some texts are given shorter lines."""
    if rng.random() < 0.25:
        text = wrapped(text, rng.randint(45, 120))
    return Passage(title, text, tells)


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
    title = title or kind[:1].upper() + kind[1:]
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "text"
    file = (slug if rng.random() < 0.5 else slug.replace("-", "_")) + rng.choice(
        (".md", ".md", ".txt", ".pdf", "")
    )
    roll = rng.random()
    if roll < 0.38:
        return title
    if roll < 0.5:
        return (
            f"{kind[:1].upper() + kind[1:]}: {title}"
            if kind and kind.lower() not in title.lower()
            else title
        )
    if roll < 0.66:
        return f"{file} › {title}"
    if roll < 0.74:
        stem = re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_") or "notes"
        return f"{stem}{rng.choice(('', '', '_2', '-7', '_final'))}.md › {title}"
    if roll < 0.80:
        return f"{title} › {rng.choice(HEADINGS)}"
    if roll < 0.84:
        return f"{file} › {title} › {rng.choice(HEADINGS)}"
    return file if not bare or roll < 0.92 else ""
