"""Byte-level BPE, which most checkpoints have, by fastokens: ten to forty times as fast as
tokenizers, to the same ids, and without the interpreter's lock (decision 0049).

That they are the same is tried where a checkpoint is read, with texts of everything that
pre-tokenizers tell apart; one whose ids differ, or that fastokens cannot read, has tokenizers
alone. So has a text that fastokens gives up on: its regular expressions have a bounded stack.
"""

import os
import random
from collections.abc import Iterator
from functools import cached_property
from unicodedata import is_normalized

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

# A text takes one thread, as the pool that it is in counts: read with the first long text.
os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")

from fastokens._native import Tokenizer as Fastokens

from services.common.packed_ids import Ids

_TRIALS = 100
_SPECIAL = 32  # tokens that are tried
_OWN = 200  # words of the vocabulary
_TIMES = (1, 1, 1, 2, 3)
_SIGNS = (
    " \n\t\r\u00a0\u3000\u2028\u0085'\u2019-_.,!?/\\*#`\"<>|(){}[]0123456789\u0663\u00bd\u2167"
    "abcxyz\u00df\u00e9\u0301ABCXYZ\u01c5\u03a3\u03c2\u0130\u0131\u017f\u212a\ud55c\u1112\u1161"
    "\u6f22\u5b57\u304b\u30ab\u30fc\U0001f389\u200d\U0001f1e9\ufeff\x00\x7f\U0001d4b3\u0936\u0947"
    "\u0e2a\u0e27\u0645\u0631\u05e9\u05dc\u041f\u0440\u00ab\u20ac\u2122"
)
_WORDS = (
    *("the", " The", "THE", "don't", "I'LL", "we're", " 's", "12345", "http://a.b/c?d=e&f"),
    *("def f(x):\n    return x", "\r\n\r\n", "   \n", "   x", "!!!\n\n", "a/b//", " ...", "Gr"),
    *("\u00f6\u00dfe", "e\u0301", " \u0434\u043e\u043c", "\u6771\u4eac", "camelCaseWord"),
)


class QuickEncoding:
    """A text's tokens, every byte of it in one of them. As a tokenizers' Encoding, its length is
    their number."""

    def __init__(self, text: str, ids: Ids, ends: Ids) -> None:
        """`ends`: of each token, behind its last byte."""
        self.ids = ids
        self._text, self._ends = text, ends

    def __len__(self) -> int:
        return len(self.ids)

    def tokens_before(self, character: int) -> int:
        """How many tokens begin before this character."""
        if not character or not len(self):
            return 0
        # Each begins where the one before ends, and the first at 0.
        return 1 + int(np.searchsorted(self._ends[:-1], self._byte_of(character)))

    def _byte_of(self, character: int) -> int:
        if self._text.isascii():
            return character
        if character >= len(self._text):
            return int(self._ends[-1])
        return int(self._characters[character])

    @cached_property
    def _characters(self) -> NDArray[np.intp]:
        """Of each character, its first byte."""
        data = np.frombuffer(self._text.encode(), np.uint8)
        return np.flatnonzero((data & 0xC0) != 0x80)


class Quick:
    """One tokenizer's. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError where fastokens cannot read it."""
        self._fast = Fastokens.from_json_str(tokenizer.to_str())
        self.added: int = self._fast.num_special_tokens_to_add(False)
        """How many tokens are put around a text, where they are asked for."""
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        added = tokenizer.get_added_tokens_decoder()
        self._lengths = np.zeros(max([*vocabulary.values(), *added]) + 1, np.uint32)
        for piece, id in vocabulary.items():
            self._lengths[id] = len(piece)  # a character stands for a byte
        for id, token in added.items():
            self._lengths[id] = len(token.content.encode())

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Quick | None":
        """`tokenizer`: of byte-level BPE. None where it would not give what the tokenizer gives.
        Takes some 30 ms beside reading the vocabulary: seconds for 128,000 tokens."""
        try:
            quick = cls(tokenizer)
        except ValueError:
            return None
        same = all(quick._is_right(tokenizer, text) for text in _trials(tokenizer))
        return quick if same else None

    def ids(self, text: str, *, special_tokens: bool = False) -> Ids | None:
        """None where only the tokenizer itself can tell."""
        try:
            ids, _ = self._fast.encode_batch_flat([text], special_tokens)
        except ValueError:  # too deep for its regular expressions
            return None
        return np.frombuffer(ids, "<u4")

    def encode(self, text: str) -> QuickEncoding | None:
        """As `ids`; none, too, where a normalizer made another text of it."""
        if (ids := self.ids(text)) is None:
            return None
        ends = np.cumsum(self._lengths.take(ids), dtype=np.uint32)
        size = len(text) if text.isascii() else len(text.encode())
        return QuickEncoding(text, ids, ends) if ends[-1:].sum() == size else None

    def _is_right(self, tokenizer: Tokenizer, text: str) -> bool:
        right = [tokenizer.encode(text, add_special_tokens=around).ids for around in (False, True)]
        for around, ids in enumerate(right):
            found = self.ids(text, special_tokens=bool(around))
            if found is None or found.tolist() != ids:
                return False
        kept = tokenizer.normalizer is None or is_normalized("NFC", text)
        whole = self.encode(text) is not None
        return len(right[1]) - len(right[0]) == self.added and (whole or not kept)


def _trials(tokenizer: Tokenizer) -> Iterator[str]:
    """The same each time."""
    dice = random.Random(0)
    special = [t.content for t in tokenizer.get_added_tokens_decoder().values()]
    own = [tokenizer.decode([dice.randrange(tokenizer.get_vocab_size())]) for _ in range(_OWN)]
    words = [*_WORDS, *dice.sample(special, min(len(special), _SPECIAL)), *own]
    for _ in range(_TRIALS):
        parts = [
            dice.choice(words) if dice.random() < 0.5 else dice.choice(_SIGNS) * dice.choice(_TIMES)
            for _ in range(dice.randint(1, 40))
        ]
        yield "".join(parts)
