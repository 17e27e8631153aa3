"""The byte-level BPE tokenizer, trained on the generated corpus.

A space belongs to the word or the mark before it, never to the word after it, and a word that
begins with a capital carries none at all. A value is then the same tokens in a sentence, after a
quote in JSON and at the start of a line, and its first token follows at once on the word that
leads to it: copying is one skill instead of three. Digits stand alone, but for the number of a
passage, which is one token with its brackets.
"""

import json
import re

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.recipe import corpus
from models.recipe.template import render

VOCABULARY = 2048
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

PATTERN = (
    r"\p{Ll}+ ?"  # a word in lower case and the space after it
    r"|\p{Lu}\p{Ll}+"  # a name
    r"|\p{L}"  # a letter of a word in capitals: such words are spelled
    r"|\p{N}"
    r"|[^\s\p{L}\p{N}]+(?: [^\s\p{L}\p{N}]+)* ?"  # marks, among them `": "` and `", "`
    r"|\s"
)


def train(seed: int, examples: int = 8000) -> Tokenizer:
    """A tokenizer of `VOCABULARY` entries, from examples of the middle of the training."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(VISIBLE)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*SPECIAL, *VISIBLE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    source = corpus.training(seed, 10**9, 0.5)
    marker = re.compile("|".join(map(re.escape, [*SPECIAL, *VISIBLE])))
    tokenizer.train_from_iterator(
        (marker.split(render(next(source))) for _ in range(examples)), trainer
    )
    return _visible(tokenizer)


def _visible(tokenizer: Tokenizer) -> Tokenizer:
    """The same with `VISIBLE` no longer special, so that decoded text shows them."""
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        if token["content"] in VISIBLE:
            token["special"] = False
    return Tokenizer.from_str(json.dumps(data))
