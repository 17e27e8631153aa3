"""How much text one token can stand for: what is hopelessly long is known without tokenizing it."""

import json
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

_ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())
# Composed, a character takes at most four times its own bytes: of four code points (U+1F82), or of
# one that is another name for it (the Kelvin sign), three jamo or the like, no more than that.
_NFC_SHRINKS = 4


def bytes_per_token(tokenizer: Tokenizer) -> int:
    """The most bytes of UTF-8 that one token takes in; 0 if there is no bound, or none is known.

    Byte-level BPE has one, as every byte of the text ends up in a token. All others may drop or
    join any amount: runs of spaces, unknown words.
    """
    normalizer = tokenizer.normalizer
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder().values()
    keeps_all = (
        (normalizer is None or isinstance(normalizer, normalizers.NFC))
        and isinstance(tokenizer.model, models.BPE)
        and _is_byte_level(tokenizer.pre_tokenizer)
        and not any(token.lstrip or token.rstrip for token in added)  # takes spaces in
        and vocabulary.keys() >= _ALPHABET
    )
    if not keeps_all:
        return 0
    lengths = [len(piece) for piece in vocabulary]  # a character stands for a byte
    lengths += [len(token.content.encode()) for token in added]
    return max(lengths) * (1 if normalizer is None else _NFC_SHRINKS)


def _is_byte_level(pre_tokenizer: Any) -> bool:
    """Whether bytes are what comes out, and nothing is dropped before."""
    if pre_tokenizer is None:
        return False
    told: dict[str, Any] = json.loads(pre_tokenizer.__getstate__())
    *before, last = told.get("pretokenizers", [told])
    dropping = any(step.get("behavior") == "Removed" for step in before)
    kinds = {step["type"] for step in before}
    return last["type"] == "ByteLevel" and kinds <= {"Split", "Digits"} and not dropping
