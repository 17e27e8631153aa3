"""What answers repeat of what stands before them: names, values and keys, found by their tokens."""

import re
from collections import defaultdict
from dataclasses import dataclass

from tokenizers import Encoding

CONTENT = re.compile(r"\d|[^\W\d_]{4}")  # what tells more than a small word
NAME = re.compile(r"[A-Z]\w")


Aim = tuple[int, list[int]]  # from a position, to any of these


@dataclass(frozen=True)
class Repeated:
    """A stretch of an answer."""

    first: int  # token
    size: int
    places: list[int]  # where it stands before, first tokens
    key: bool  # of JSON


class Text:
    """A text, its tokens, and where words begin and end."""

    def __init__(self, text: str, encoded: Encoding) -> None:
        self.text, self.ids, self.offsets = text, encoded.ids, encoded.offsets
        pieces = [text[start:end] for start, end in self.offsets]
        self.words = [piece.strip() for piece in pieces]
        skipped = zip(self.offsets, pieces, strict=True)
        self.starts = [at + len(piece) - len(piece.lstrip()) for (at, _), piece in skipped]

    def begins(self, token: int) -> bool:
        """Whether no word goes on there."""
        at = self.starts[token]
        split = token > 0 and self.offsets[token - 1][0] == self.offsets[token][0]
        return not split and not (at > 0 and self.text[at - 1].isalnum())

    def ends(self, token: int) -> bool:
        """Whether a word does not go on behind it."""
        at = self.offsets[token][1]
        following = token + 1 < len(self.ids) and self.offsets[token + 1][0] < at
        within = at < len(self.text) and self.text[at - 1 : at + 1].isalnum()
        return not following and not within

    def common(self, one: int, other: int, stop: int) -> int:
        """How many tokens from `one` on, before `stop`, are whole words that stand at `other`."""
        size, most = 1, min(stop - one, one - other)
        while size < most and self.ids[one + size] == self.ids[other + size]:
            size += 1
        while size and not (self.ends(one + size - 1) and self.ends(other + size - 1)):
            size -= 1
        return size

    def tells(self, first: int, size: int, opens: bool) -> bool:
        """Whether a stretch is a name or a value, and not a small word on its way. `opens`: it
        begins an answer, with a capital whatever it is.
        """
        start, end = self.starts[first], self.offsets[first + size - 1][1]
        said = self.text[start:end]
        named = not opens and NAME.search(said)
        return self.text[start - 1] == '"' or bool(CONTENT.search(said) or named)

    def is_key(self, first: int, size: int) -> bool:
        """Whether a stretch is a key of JSON, with or without the quotation mark before it."""
        end = self.offsets[first + size - 1][1]
        opened = '"' in self.text[self.starts[first] - 1 : end]
        return opened and self.text[end : end + 2] == '":'


def repeated(text: str, encoded: Encoding, answers: list[range]) -> list[Repeated]:
    """The longest stretches of answers (their tokens) that stand before, from left to right."""
    whole, found = Text(text, encoded), list[Repeated]()
    places: dict[str, list[int]] = defaultdict(list)
    for token, word in enumerate(whole.words):
        if word and whole.begins(token):
            places[word].append(token)
    for answer in answers:
        at = answer.start
        while at < answer.stop:
            some = places[whole.words[at]] if whole.words[at] and whole.begins(at) else []
            before = [place for place in some if place < answer.start]
            sizes = [whole.common(at, place, answer.stop) for place in before]
            size = max(sizes, default=0)
            if size and whole.tells(at, size, at == answer.start):
                longest = [p for p, n in zip(before, sizes, strict=True) if n == size]
                found.append(Repeated(at, size, longest, whole.is_key(at, size)))
            else:
                size = 1
            at += size
    return found
