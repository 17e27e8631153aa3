"""MiniLM as a reader from left to right: what a causal model is to learn of it.

MiniLM (`minilm.py`) reads a text as a whole. Here each of its tokens looks back only, which changes
what its layers say little, and what can be learned from it as a reader hardly at all. Its places
are numbers up to 512, and it needs them: without, it finds answers no better than by chance.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from models.recipe import minilm
from models.recipe.tokenizer import CITES, FIRST_CITE, SPECIAL, SYSTEM, TOOLS, USER
from models.recipe.vocabulary import spelled

CLS, SEP, UNKNOWN = 101, 102, 100
TYPICAL = slice(1, 200)  # of the places' rows, those of which the mean is a word's without place


@dataclass
class Said:
    """What one of MiniLM's layers makes of (rows, tokens); each (rows, tokens, minilm.WIDTH)."""

    read: Tensor
    attended: Tensor  # unit variance, before the norm's gain
    normed: Tensor  # after it
    out: Tensor  # unit variance, before the norm's gain


def unit(x: Tensor) -> Tensor:
    """Of mean 0 and variance 1."""
    return F.layer_norm(x, x.shape[-1:])


class Teacher:
    """MiniLM, causal."""

    def __init__(self) -> None:
        self.net: Any
        self.net, self.wordpiece = minilm.reader()
        self.places = self.net.embeddings.position_embeddings.weight
        self.count = len(self.net.encoder.layer)

    def words(self, ids: Tensor) -> Tensor:
        """(rows, tokens, width): what the first layer reads."""
        places = torch.arange(ids.shape[1]).clamp(max=len(self.places) - 1)
        return self.placed(self.net.embeddings.word_embeddings(ids), self.places[places])

    def placed(self, rows: Tensor, places: Tensor | None = None) -> Tensor:
        """What the first layer reads of these rows of words."""
        e = self.net.embeddings
        places = self.places[TYPICAL].mean(0) if places is None else places
        out: Tensor = e.LayerNorm(rows + places + e.token_type_embeddings.weight[0])
        return out

    def rows_of(self, tokenizer: Tokenizer) -> Tensor:
        """(vocab, minilm.WIDTH) the mean of MiniLM's rows for the text of each of our tokens."""
        known, table = self.wordpiece.get_vocab(), self.net.embeddings.word_embeddings.weight
        made = []
        for token, name in enumerate(spelled(tokenizer)):
            word, mark = name.decode(errors="replace"), marker(token)
            ids = self.wordpiece.encode(word, add_special_tokens=False).ids
            blank = known["." if "\n" in word else ","]  # which MiniLM does not read at all
            ids = [i for i in ids if i != UNKNOWN] or [blank if mark is None else mark]
            within = "##" + word  # as letters are mostly
            if mark is None and word.isalpha() and word.islower() and within in known:
                ids = [known[within]]
            made.append(table[ids].mean(0))
        return torch.stack(made).detach()

    def scores(self, number: int, x: Tensor) -> Tensor:
        """(rows, heads, tokens, tokens)"""
        attention = self.net.encoder.layer[number].attention.self
        heads = self.net.config.num_attention_heads
        q, k = (
            project(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for project in (attention.query, attention.key)
        )
        scores: Tensor = q @ k.mT * q.shape[-1] ** -0.5
        return scores

    def layer(self, number: int, x: Tensor) -> tuple[Said, Tensor]:
        """What a layer makes of what it reads, and what the next reads."""
        block = self.net.encoder.layer[number]
        tokens = x.shape[1]
        scores = self.scores(number, x) + torch.full((tokens, tokens), -1e9).triu_(1)
        values = block.attention.self.value(x).unflatten(-1, (scores.shape[1], -1)).transpose(1, 2)
        brought = (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)
        attended = unit(x + block.attention.output.dense(brought))
        norm = block.attention.output.LayerNorm
        normed = attended * norm.weight + norm.bias
        out = unit(normed + block.output.dense(F.gelu(block.intermediate.dense(normed))))
        norm = block.output.LayerNorm
        return Said(x, attended, normed, out), out * norm.weight + norm.bias

    @torch.no_grad()
    def layers(self, ids: Tensor) -> list[Said]:
        """What all layers make of (rows, tokens) ids."""
        x, found = self.words(ids), []
        for number in range(self.count):
            said, x = self.layer(number, x)
            found.append(said)
        return found


def marker(token: int) -> int | None:
    """What MiniLM reads in place of a marker, or None if the token is text."""
    if token in (USER, SYSTEM, TOOLS):
        return CLS
    return SEP if token < len(SPECIAL) or FIRST_CITE <= token < FIRST_CITE + len(CITES) else None


@dataclass
class Read:
    """A text as MiniLM reads it, and which of its tokens end where ours do."""

    ids: list[int]
    ours: list[int]
    theirs: list[int]


def read(wordpiece: Tokenizer, spelling: list[bytes], ids: list[int]) -> Read:
    """Our `ids`, as MiniLM has them. Both end together where a word does."""
    found = Read([], [], [])
    begin = 0
    for at in range(len(ids) + 1):
        mark = marker(ids[at]) if at < len(ids) else SEP
        if mark is None:
            continue
        _text(wordpiece, [spelling[token] for token in ids[begin:at]], begin, found)
        if at < len(ids):
            found.ours.append(at)
            found.theirs.append(len(found.ids))
            found.ids.append(mark)
        begin = at + 1
    return found


def _text(wordpiece: Tokenizer, pieces: list[bytes], begin: int, found: Read) -> None:
    """Adds what stands between two markers."""
    ends, size = {}, 0
    for i, piece in enumerate(pieces):
        size += len(piece)
        if piece.strip():
            ends[size] = begin + i
    text = b"".join(pieces).decode(errors="replace")
    encoded = wordpiece.encode(text, add_special_tokens=False)
    widths, total = [0], 0  # bytes before each character
    for character in text:
        total += len(character.encode())
        widths.append(total)
    if total != size:  # cut within a character
        widths = list(range(len(text) + 1))
    for i, (token, (_, end)) in enumerate(zip(encoded.ids, encoded.offsets, strict=True)):
        ours = ends.get(widths[end])
        if ours is not None and token != UNKNOWN:
            found.ours.append(ours)
            found.theirs.append(len(found.ids) + i)
    found.ids += encoded.ids
