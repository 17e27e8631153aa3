"""What each token of the vocabulary stands for."""

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.recipe import minilm
from models.recipe.tokenizer import CITES, FIRST_CITE, SPECIAL, VISIBLE


def texts(tokenizer: Tokenizer) -> list[str]:
    """Of each token: the bytes that it stands for, `Ġ` for a space before it."""
    return [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())]


def spelled(tokenizer: Tokenizer) -> list[bytes]:
    """What each token stands for; a marker for nothing."""
    known = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves
    letters = {chr(byte): byte for byte in known}
    others = (byte for byte in range(256) if byte not in known)
    letters |= {chr(256 + i): byte for i, byte in enumerate(others)}
    return [
        b"" if i < FIRST_CITE + len(CITES) and (i < len(SPECIAL) or i >= FIRST_CITE)
        else bytes(letters.get(c, 63) for c in name)
        for i, name in enumerate(texts(tokenizer))
    ]  # fmt: skip


def movable(tokenizer: Tokenizer) -> Tensor:
    """(vocab) whether training may move the token's row: of markers, marks and digits, not words"""
    shown = {*SPECIAL, *VISIBLE}
    return torch.tensor([t in shown or not t[-1].isascii() or not t[-1].isalpha() or len(t) == 1
                         for t in texts(tokenizer)])  # fmt: skip


def meanings(tokenizer: Tokenizer, size: int) -> Tensor:
    """(vocab, size) what MiniLM makes of each token: principal components, of unit variance over
    all features together. A word with and without a space or a capital means the same.
    """
    words = [text.removeprefix("Ġ").lower() for text in texts(tokenizer)]
    known = sorted({word for word in words if word.isascii() and word.isalpha()})
    said, read = minilm.encode(known), minilm.embedded(known)
    both = torch.cat([x / x.std() for x in (said - said.mean(0), read - read.mean(0))], 1)
    left, values, _ = torch.linalg.svd(both, full_matrices=False)
    found = left[:, :size] * values[:size].sqrt()  # the strongest would outshine the others
    found = found / found.norm(dim=1, keepdim=True) * size**0.5
    table = dict(zip(known, found, strict=True))
    return torch.stack([table.get(word, torch.zeros(size)) for word in words])


def codes(tokenizer: Tokenizer, *widths: int) -> Tensor:
    """(vocab, all widths) a code of each token, drawn at random; the same with a space before it
    and without. Of each width alone all codes have the same norm, its square the width: what is
    compared by one of them has no token that is less like itself than another is like it.
    """
    names = spelled(tokenizer)  # bytes: halves of letters are no text, and no two are the same
    stems = [name.strip(b" ") if name else b"<%d>" % token for token, name in enumerate(names)]
    known = {stem: row for row, stem in enumerate(dict.fromkeys(stems))}
    drawn = [torch.randn(len(known), width) for width in widths]
    even = [x / x.norm(dim=1, keepdim=True) * x.shape[1] ** 0.5 for x in drawn]
    return torch.cat(even, 1)[[known[stem] for stem in stems]]
