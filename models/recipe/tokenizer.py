"""The byte-level tokenizer: most English words are one token, each with and without a space.

A space belongs to the word behind it, and is joined to it last of all: `Bristol` and ` Bristol` are
cut at the same places, and differ in their first token alone, by a space. Their codes are the same
(`vocabulary.codes`), so a value is copied from the middle of a sentence to the start of an answer
by one rule. Digits stand alone, but for the number of a passage, which is one token with its
brackets.

Which words are tokens is decided by how often they stand in the bank and by MiniLM's vocabulary,
which lists English words in the order of their frequency: so documents of any kind find theirs.
Other words are cut into pieces, as names are.
"""

import calendar
import importlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import regex
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.recipe import minilm

VOCABULARY = 20_480
PIECES = 1_300  # bytes, marks, and parts of words, without a space
LOWER = 6_300  # words in small letters; what room is left goes to words with a capital
SPECIAL = [
    "<|pad|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|tools|>",
    "<|documents|>",
]
PAD, END, SYSTEM, USER, ASSISTANT, TOOL, TOOLS, DOCUMENTS = range(len(SPECIAL))
CITES = [f"[{number}]" for number in range(1, 21)]  # one token says which passage
VISIBLE = ["<tool_call>", "</tool_call>", *CITES]  # single tokens that decoding shows
FIRST_CITE = len(SPECIAL) + 2

PATTERN = (
    r"'(?:s|t|re|ve|m|ll|d)(?!\p{L})"
    r"| ?\p{Lu}?\p{Ll}+"
    r"| ?\p{L}"  # a letter of a word in capitals: such words are spelled
    r"| ?\p{N}"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|\s"
)
BANK = Path(__file__).with_name("bank")
# What JSON, calls and tables are made of.
MARKS = (
    '{"a": "b", "c": 1, "d": null, "e": {"f": ["g", "h"], "i": []}} {"j": {}}\n'
    '<tool_call>{"name": "a", "arguments": {"b": "c", "d": 2}}</tool_call>\n'
    "| a | b |\n| --- | --- |\n- a (b), c; d: e. 'f' \"g\" £1 $2 €3 4%\n"
    "5 – 6 ‘h’ “i” j’s k… l/m n@o.p\n"
)


def counts() -> Counter[str]:
    """How often each piece of text, without a space before it, shall count."""
    found: Counter[str] = Counter()
    pattern = regex.compile(PATTERN)
    for path in sorted(BANK.rglob("*.txt")):
        for piece in pattern.findall(path.read_text()):
            found[piece.removeprefix(" ")] += 3
    for piece in pattern.findall(MARKS):
        found[piece.removeprefix(" ")] += 2_000
    names = names_of_people()
    for rank, word in enumerate(minilm.words()):
        weight = 60_000 // (rank + 100)
        found[word.capitalize()] += weight if word in names else weight // 6
        found[word] += weight // 3 if word in names else weight
    for name in sorted(names):
        found[name.capitalize()] += 1
    for name in (*calendar.month_name[1:], *calendar.day_name):
        found[name] += 1_000
    return found


def names_of_people() -> set[str]:
    """In small letters."""
    found: set[str] = set()
    for locale in ("en_GB", "en_US"):
        provider = importlib.import_module(f"faker.providers.person.{locale}").Provider
        for names in (provider.first_names, provider.last_names):
            found.update(name.lower() for name in names)
    return found


def train() -> Tokenizer:
    """A tokenizer of `VOCABULARY` entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(VISIBLE)
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES,
        special_tokens=[*SPECIAL, *VISIBLE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    marker = re.compile("|".join(map(re.escape, [*SPECIAL, *VISIBLE])))
    counted = Counter({p: n for p, n in counts().items() if p.strip() and not marker.search(p)})
    repeated = ("\n".join([piece] * count) for piece, count in counted.items())
    tokenizer.train_from_iterator(repeated, trainer)
    data = json.loads(tokenizer.to_str())
    _add_spaces(data)
    _add_words(data, counted)
    for token in data["added_tokens"]:
        if token["content"] in VISIBLE:  # so that decoded text shows them
            token["special"] = False
    return Tokenizer.from_str(json.dumps(data))


def _add_spaces(data: dict[str, Any]) -> None:
    """Adds each piece with a space before it, by merges that come after all others."""
    vocabulary, merges = data["model"]["vocab"], data["model"]["merges"]
    for token in list(vocabulary):
        if token not in (*SPECIAL, *VISIBLE, "Ġ", "Ċ"):
            vocabulary["Ġ" + token] = len(vocabulary)
            merges.append(["Ġ", token])


def _add_words(data: dict[str, Any], counted: Counter[str]) -> None:
    """Adds whole words, which are taken before any merge, with a space and without."""
    data["model"]["ignore_merges"] = True
    vocabulary = data["model"]["vocab"]
    words = [w for w, _ in counted.most_common() if w.isascii() and w.isalpha() and len(w) > 1]
    lower = [word for word in words if word.islower()][:LOWER]
    for word in (*lower, *(word for word in words if not word.islower())):
        for token in (word, "Ġ" + word):
            if token not in vocabulary and len(vocabulary) < VOCABULARY:
                vocabulary[token] = len(vocabulary)
