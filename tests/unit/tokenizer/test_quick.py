"""The quick way to a text's tokens is the tokenizer's own way, or it is not taken."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from services.tokenizer.prompts import quick as module
from services.tokenizer.prompts.encode import Encoded, PromptEncoder
from services.tokenizer.prompts.quick import Fastokens, Quick, QuickEncoding
from tests.support import tokenizers as kinds

DEMO = Path(__file__).parents[3] / "models" / "demo" / "tokenizer.json"
LIKE_GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PARTS = [
    "the",
    "The",
    " don't",
    "I'LL",
    "12345",
    "\r\n\n",
    "   x",
    "!!!\n",
    "é",
    "e\u0301",
    "東京",
    "🚰",
]
PARTS += ["<|eos|>", "<|eo", "<tool>", *" \n\t\u3000'-_aZß4٣½\u200d\u212a"]
TEXTS = st.text() | st.lists(st.sampled_from(PARTS)).map("".join)


@cache
def made(kind: str) -> Tokenizer:
    if kind == "demo":
        return Tokenizer.from_file(str(DEMO))
    tokenizer = kinds.byte_level()
    if kind == "merged":  # as Llama 3: a word that is a token is one, whatever the merges say
        tokenizer = Tokenizer(models.BPE(ignore_merges=True))
        split = pre_tokenizers.Split(Regex(LIKE_GPT_4), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=360,
            special_tokens=["<|bos|>", "<|eos|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(["the water, The Water don't 東京 " * 3], trainer)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)]
        )
    if kind == "deep":  # loops within loops
        signs = r"[^\s\p{L}\p{N}]+"
        split = pre_tokenizers.Split(Regex(rf"{signs}(?: {signs})* ?|\p{{L}}+|\s"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    if kind == "composing":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


@cache
def encoder(kind: str) -> PromptEncoder:
    return PromptEncoder(made(kind))


@pytest.mark.parametrize("kind", ["demo", "plain", "merged", "composing"])
@given(text=TEXTS)
@example(text="e\u0301 東京\u0301 <|eos|> water")
@settings(deadline=None, max_examples=60)
def test_it_gives_what_the_tokenizer_gives(kind: str, text: str) -> None:
    tokenizer, ours = made(kind), encoder(kind)
    right = tokenizer.encode(text, add_special_tokens=False)
    [found] = ours._all_of([text])
    assert list(found.ids) == right.ids
    assert ours.count(text) == len(found) == len(right)
    around = tokenizer.encode(text)
    ids, added = ours.encode_text(text)
    assert (ids.tolist(), added) == (around.ids, sum(around.special_tokens_mask))
    counts = [Encoded([text], [e]).tokens_before(n) for e in (found, right) for n in _places(text)]
    half = len(counts) // 2
    assert counts[:half] == counts[half:]


def _places(text: str) -> range:
    return range(1, len(text) + 1) if text else range(0)


@pytest.mark.parametrize("kind", ["demo", "plain", "merged", "composing"])
def test_it_is_taken_for_byte_level_pairs(kind: str) -> None:
    [found] = encoder(kind)._all_of(["東京 and the keeper"])
    assert isinstance(found, QuickEncoding)


def test_a_text_that_a_normalizer_changes_is_the_tokenizer_s() -> None:
    [found] = encoder("composing")._all_of(["e\u0301 and more"])
    assert not isinstance(found, QuickEncoding)


def test_it_is_not_taken_where_its_ids_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is that fastokens reads otherwise."""

    class Misreading:
        def from_json_str(self, text: str) -> object:
            other = Tokenizer.from_str(text)
            other.pre_tokenizer = made("merged").pre_tokenizer
            return Fastokens.from_json_str(other.to_str())

    assert Quick.of(made("demo")) is not None
    monkeypatch.setattr(module, "Fastokens", Misreading())
    assert Quick.of(made("demo")) is None


@pytest.mark.parametrize("make", [kinds.metaspace, kinds.unigram, kinds.wordpiece])
def test_other_kinds_are_the_tokenizer_s(make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    [found] = PromptEncoder(tokenizer)._all_of(["water of the penstock"])
    assert not isinstance(found, QuickEncoding)


def test_a_text_that_it_gives_up_on_is_the_tokenizer_s() -> None:
    deep = "!? " * 4000
    ours = encoder("deep")
    assert ours._quick is not None
    assert ours._quick.ids(deep) is None
    assert ours.count(deep) == len(made("deep").encode(deep, add_special_tokens=False))
