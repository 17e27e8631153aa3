"""What a token can take in at the most is never less than what a token does take in."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from services.tokenizer.prompts.bound import bytes_per_token
from services.tokenizer.prompts.encode import PromptEncoder
from tests.support import tokenizers as kinds

PLAIN, COMPOSING = kinds.byte_level(), kinds.byte_level()
COMPOSING.normalizer = normalizers.NFC()
COMPOSING.add_tokens([" water of the penstock", "\u1f82"])


def test_it_is_the_longest_token() -> None:
    longest = max(map(len, PLAIN.get_vocab()))
    assert bytes_per_token(PLAIN) == longest == len("<|assistant|>")
    assert bytes_per_token(COMPOSING) == 4 * len(" water of the penstock")


@pytest.mark.parametrize("encoder", [PromptEncoder(PLAIN), PromptEncoder(COMPOSING)])
@given(text=st.text() | st.text("e\u0301\u03b1\u0313\u0300\u0345\u212a\u1112\u1161\u11ab a"))
@settings(deadline=None)
def test_nothing_has_fewer_tokens_than_the_least(encoder: PromptEncoder, text: str) -> None:
    assert encoder.least(text) <= len(encoder._tokenizer.encode(text))


def test_there_is_none_where_text_can_vanish() -> None:
    assert all(bytes_per_token(make()) == 0 for make in (kinds.metaspace, kinds.unigram))
    assert bytes_per_token(kinds.wordpiece()) == 0
    strips = kinds.byte_level()
    strips.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert bytes_per_token(strips) == 0
    drops = kinds.byte_level()
    split = pre_tokenizers.Split(Regex(" +"), "removed")
    drops.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert bytes_per_token(drops) == 0
    for other in (normalizers.Lowercase(), normalizers.NFKC(), normalizers.NFD()):
        normalizing = kinds.byte_level()
        normalizing.normalizer = other
        assert bytes_per_token(normalizing) == 0, other
