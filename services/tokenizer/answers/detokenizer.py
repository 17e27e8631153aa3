"""Token ids to text while they arrive: what is given out never has to be taken back.

    new = detokenizer_factory(tokenizer)     # once a model
    detokenizer = new()                      # once a request
    text = detokenizer.push([17, 4]) + ... + detokenizer.flush()

All that is given out, in whatever portions the ids arrive, is `tokenizer.decode(all ids)`, special
tokens skipped. Only whole characters come out; an incomplete one is held until its last byte
arrives, and `flush` gives U+FFFD for what never became whole.

One exception: of a run of SentencePiece's byte tokens that is broken somewhere, `decode` makes
U+FFFD throughout. Here the whole characters of the run come out as they are completed, and only
what is broken is replaced.
"""

import codecs
import re
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from tokenizers import Tokenizer, decoders

_CONTEXT = 8  # ids kept to know how the next one is joined; more only while they give no text
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Detokenizer(Protocol):
    """One request's output."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these ids completed; ids of no token are skipped."""
        ...

    def flush(self) -> str:
        """The rest, at the end."""
        ...


def detokenizer_factory(
    tokenizer: Tokenizer, shown: Collection[str] = ()
) -> Callable[[], Detokenizer]:
    """Makes detokenizers that share what they learn about the vocabulary. `shown`: special tokens
    that are not skipped."""
    special = _special(tokenizer, shown)
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        pieces = _BytePieces(tokenizer, special)
        return lambda: ByteLevelDetokenizer(pieces)
    byte_tokens = _byte_tokens(tokenizer)
    return lambda: JoiningDetokenizer(tokenizer, special, byte_tokens)


def token_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """Gives the bytes that a token stands for by itself: special tokens as they are written, none
    for ids of no token."""
    special, byte_tokens = _special(tokenizer, ()), _byte_tokens(tokenizer)
    by_bytes = isinstance(tokenizer.decoder, decoders.ByteLevel)
    pieces = _BytePieces(tokenizer, special) if by_bytes else None

    def bytes_of(id: int) -> bytes:
        token = tokenizer.id_to_token(id)
        if token is None or id in special:
            return (token or "").encode()
        if pieces is not None:
            return pieces[id]
        return byte_tokens.get(id) or token.replace("▁", " ").removeprefix("##").encode()

    return bytes_of


class ByteLevelDetokenizer:
    """For byte-level BPE, where every token is a string of bytes whatever stands beside it."""

    def __init__(self, pieces: "_BytePieces") -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_ids: Iterable[int]) -> str:
        pieces = self._pieces
        return self._decode(b"".join([pieces[id] for id in token_ids]))

    def flush(self) -> str:
        return self._decode(b"", True)


class JoiningDetokenizer:
    """For all others (SentencePiece, WordPiece, …): a token's text is what it adds to the text of
    the tokens before it, because spaces come and go with the neighbour.
    """

    def __init__(
        self, tokenizer: Tokenizer, special: frozenset[int], byte_tokens: dict[int, bytes]
    ) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._byte_tokens = byte_tokens
        self._decode_bytes = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._context: list[int] = []  # the last ids that gave text
        self._run: list[int] = []  # the byte tokens just before now

    def push(self, token_ids: Iterable[int]) -> str:
        text = ""
        for id in token_ids:
            if id in self._special or self._tokenizer.id_to_token(id) is None:
                continue
            byte = self._byte_tokens.get(id)
            # A first space is joined: the decoder may strip it, however it is written.
            if byte is not None and (byte != b" " or self._context or self._run):
                text += self._decode_bytes(byte)
                self._run.append(id)
                continue
            if self._run:
                text += self._end_run()
            text += self._join(id)
        return text

    def flush(self) -> str:
        return self._end_run()

    def _join(self, id: int) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        joined = self._tokenizer.decode([*self._context, id], skip_special_tokens=False)
        added = joined[len(before) :]
        self._context = [id] if added else [*self._context[1 - _CONTEXT :], id]
        return added

    def _end_run(self) -> str:
        self._context, self._run = self._run[-_CONTEXT:], []
        return self._decode_bytes(b"", True)


class _BytePieces(dict[int, bytes]):
    """Token id → its bytes; none for special tokens and ids of no token. Fills as it is used."""

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._special = special
        self._byte_of = _byte_of_character()

    def __missing__(self, id: int) -> bytes:
        token = self._tokenizer.id_to_token(id)
        if token is None or id in self._special:
            return b""  # not kept: any uint32 may come, and the table stays the vocabulary's size
        try:
            piece = bytes([self._byte_of[character] for character in token])
        except KeyError:  # an added token that is written as it is
            piece = token.encode()
        self[id] = piece
        return piece


def _byte_of_character() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 stands for itself, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + n): b for n, b in enumerate(rest)}


def _special(tokenizer: Tokenizer, shown: Collection[str]) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(
        id for id, token in added.items() if token.special and token.content not in shown
    )


def _byte_tokens(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Ids of "<0x00>" to "<0xFF>", where the decoder takes them for bytes."""
    found = {
        id: bytes([int(match[1], 16)])
        for token, id in tokenizer.get_vocab().items()
        if (match := _BYTE_TOKEN.fullmatch(token))
    }
    euro = [id for byte in "€".encode() for id, is_ in found.items() if is_ == bytes([byte])]
    return found if tokenizer.decode(euro) == "€" else {}
