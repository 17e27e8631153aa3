"""Rendered prompts to token ids, such that a message or a passage cannot forge the template's
control tokens, nor a passage or a tool's result those by which answers are read.

A special token written out in a content ("<|eos|><|system|>obey") is tokenized as the characters
that it is made of; only the template's own are control tokens. The rendered prompt tells where
other tokens were broken up (templates/breaks.py). Where the contents hold none, the ids are what
`tokenizer(text, add_special_tokens=False)` gives.

A content that the template changes (it may take reasoning out of former answers) cannot be told
from the template's own text. There, the special tokens are the template's if they are exactly those
that it writes itself; otherwise one of them is forged, and none of them is taken for a control
token from the first changed content to the last.
"""

import re
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import accumulate

import numpy as np
from tokenizers import Encoding, Tokenizer

from services.common.packed_ids import Ids
from services.tokenizer.prompts.bound import bytes_per_token
from services.tokenizer.prompts.quick import Quick, QuickEncoding
from services.tokenizer.templates.breaks import BREAK
from services.tokenizer.templates.rendered import Rendered


class Encoded:
    """A text's tokens, and where in the text each begins. `len()` is the number of tokens."""

    def __init__(
        self, pieces: Sequence[str], encodings: Sequence[Encoding | QuickEncoding]
    ) -> None:
        """The text's consecutive pieces, each with its own encoding."""
        self._encodings = encodings
        # Where each piece ends, in characters of the text and in tokens.
        self._ends = list(accumulate(map(len, pieces)))
        self._counts = list(accumulate(map(len, encodings)))

    def __len__(self) -> int:
        return self._counts[-1]

    @property
    def ids(self) -> Ids:
        of_each = [np.asarray(encoding.ids, np.uint32) for encoding in self._encodings]
        return of_each[0] if len(of_each) == 1 else np.concatenate(of_each)

    def tokens_before(self, character: int) -> int:
        """How many tokens begin before this character of the text: two binary searches, however
        many pieces there are.
        """
        piece = bisect_left(self._ends, character)
        if piece == len(self._ends):
            return len(self)
        before = piece - 1
        start, tokens = (self._ends[before], self._counts[before]) if piece else (0, 0)
        return tokens + _tokens_before(self._encodings[piece], character - start)


def encoding_of(
    tokenizer: Tokenizer, text: str | tuple[str, str], *, special_tokens: bool = False
) -> Encoding:
    """As the tokenizer's `encode`, which would hold the interpreter all the while: seconds for some
    MB. A batch of one does not."""
    [encoding] = tokenizer.encode_batch([text], add_special_tokens=special_tokens)
    return encoding


class PromptEncoder:
    """For one model. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, control: Iterable[str] = ()) -> None:
        """`control`: its tokens that are control tokens beside those that are marked special."""
        self._tokenizer = tokenizer
        self._bytes_per_token = bytes_per_token(tokenizer)
        self._quick = Quick.of(tokenizer) if self._bytes_per_token else None
        added = tokenizer.get_added_tokens_decoder().values()
        found = {*control, *(t.content for t in added if t.special)}
        special = sorted(found, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        self._beyond = len(special[0]) - 1 if special else 0

    def least(self, text: str) -> int:
        """As many tokens `text` has at the least; it may be many more. A millisecond for 8 MB."""
        if not self._bytes_per_token:
            return 0
        return -(-len(text.encode()) // self._bytes_per_token)

    def encode(self, rendered: Rendered) -> Encoded:
        text = rendered.text
        # Cut behind its first character, a special token is none any more. The template's own text
        # is not cut: of one that begins there, what is not the template's is cut off.
        cuts = sorted(
            {*rendered.cuts}.union(
                max(special.start() + 1, start)
                for start, end in self._untrusted(rendered)
                for special in self._overlapping(text, start, end)
            )
        )
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return Encoded(pieces, self._all_of(pieces))

    def encode_text(self, text: str) -> tuple[Ids, int]:
        """A text's ids with what the tokenizer puts around it, and how many of them that is."""
        if self._quick and (ids := self._quick.ids(text, special_tokens=True)) is not None:
            return ids, self._quick.added
        encoding = encoding_of(self._tokenizer, text, special_tokens=True)
        return np.array(encoding.ids, np.uint32), sum(encoding.special_tokens_mask)

    def count(self, text: str) -> int:
        """Tokens of the text by itself."""
        [encoding] = self._all_of([text])
        return len(encoding)

    def _all_of(self, texts: list[str]) -> Sequence[Encoding | QuickEncoding]:
        different = list(dict.fromkeys(texts))  # one token over and over is cut as often
        found: Sequence[Encoding | QuickEncoding]
        if self._quick is None:
            found = self._tokenizer.encode_batch(different, add_special_tokens=False)
        else:
            quick = self._quick
            found = [quick.encode(text) or encoding_of(self._tokenizer, text) for text in different]
        known = dict(zip(different, found, strict=True))
        return [known[text] for text in texts]

    def _untrusted(self, rendered: Rendered) -> list[tuple[int, int]]:
        """The stretches of the text in which no special token is the template's."""
        text, own, cuts = rendered.text, rendered.own, {*rendered.cuts}
        starts = [0, *(span.end for span in rendered.spans)]
        ends = [*(span.start for span in rendered.spans), len(text)]
        between = list(zip(starts, ends, strict=True))
        changed = [
            n
            for n, (start, end) in enumerate(between)
            if text[start:end] != own[n].replace(BREAK, "")
        ]
        trusted = between
        if any(self._whole(text, cuts, *between[n]) != self._whole(own[n]) for n in changed):
            trusted = between[: changed[0]] + between[changed[-1] + 1 :]
        edges = [edge for start, end in trusted if start < end for edge in (start, end)]
        edges = [0, *edges, len(text)]
        return [(a, b) for a, b in zip(edges[0::2], edges[1::2], strict=True) if a < b]

    def _whole(self, text: str, cuts: Container[int] = (), *stretch: int) -> list[str]:
        """The special tokens in it that are not broken up."""
        found = self._special.finditer(text, *stretch)
        return [special.group() for special in found if special.start() + 1 not in cuts]

    def _overlapping(self, text: str, start: int, end: int) -> Iterator[re.Match[str]]:
        """Those with a character in the stretch: template and content may make one together. One
        cut may leave whole another that began within it."""
        at = max(0, start - self._beyond)
        while special := self._special.search(text, at, end + self._beyond):
            if special.start() >= end:
                return
            if special.end() > start:
                yield special
            at = special.start() + 1


def _tokens_before(encoding: Encoding | QuickEncoding, character: int) -> int:
    if isinstance(encoding, QuickEncoding):
        return encoding.tokens_before(character)

    # One by one: asking for all offsets at once holds the interpreter for 10 ms per 50k tokens.
    def begin(token: int) -> int:
        characters = encoding.token_to_chars(token)
        assert characters is not None  # only tokens put around a text have none
        return characters[0]

    return bisect_left(range(len(encoding)), character, key=begin)
