"""What streams out is what decoding all of it at the end gives, for each kind of tokenizer."""

import random
from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from services.tokenizer.answers.detokenizer import detokenizer_factory
from tests.support import tokenizers as kinds

KINDS = ["byte_level", "metaspace", "unigram", "wordpiece"]


@cache
def made(kind: str) -> Tokenizer:
    make: Callable[[], Tokenizer] = getattr(kinds, kind)
    return make()


def streamed(tokenizer: Tokenizer, ids: list[int], cuts: Iterable[int] = ()) -> list[str]:
    """What came out after each portion, and last what the end gave."""
    detokenizer = detokenizer_factory(tokenizer)()
    bounds = [0, *sorted(cuts), len(ids)]
    portions = [ids[a:b] for a, b in pairwise(bounds)]
    return [*(detokenizer.push(portion) for portion in portions), detokenizer.flush()]


def byte_token(tokenizer: Tokenizer, byte: int) -> int | None:
    """The id of SentencePiece's token for one byte, where there are such tokens."""
    return tokenizer.token_to_id(f"<0x{byte:02X}>")


def some_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, special ones and ids of no token too; byte tokens only as whole characters."""
    of_bytes = {byte_token(tokenizer, byte) for byte in range(256)}
    one = st.integers(0, tokenizer.get_vocab_size() + 5).filter(lambda id: id not in of_bytes)
    units = one.map(lambda id: [id])
    if of_bytes != {None}:
        spelled = st.characters(codec="utf-8").map(
            lambda character: [byte_token(tokenizer, byte) for byte in character.encode()]
        )
        units |= spelled
    return st.lists(units, max_size=30).map(lambda drawn: [id for unit in drawn for id in unit])


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=60), seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_text_comes_back_as_decode_gives_it(kind: str, text: str, seed: int) -> None:
    tokenizer = made(kind)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    cuts = random.Random(seed).choices(range(len(ids) + 1), k=4)
    assert "".join(streamed(tokenizer, ids, cuts)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=120)
def test_random_ids_come_back_as_decode_gives_them(kind: str, data: st.DataObject) -> None:
    tokenizer = made(kind)
    ids = data.draw(some_ids(tokenizer))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    assert "".join(streamed(tokenizer, ids, cuts)) == tokenizer.decode(ids)


@given(run=st.binary(min_size=1, max_size=12), data=st.data())
def test_any_run_of_byte_tokens_gives_its_whole_characters(run: bytes, data: st.DataObject) -> None:
    """Broken ones too: the documented exception."""
    tokenizer = made("metaspace")
    the, water = tokenizer.encode("The").ids, tokenizer.encode("water").ids
    ids = [*the, *(byte_token(tokenizer, byte) for byte in run), *water]
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    expected = f"The{run.decode('utf-8', 'replace')} water"
    assert "".join(streamed(tokenizer, ids, cuts)) == expected


def test_an_id_of_no_token_does_not_part_a_character() -> None:
    tokenizer = made("metaspace")
    first, last = (tokenizer.token_to_id(token) for token in ("<0xC2>", "<0x80>"))
    ids = [first, tokenizer.get_vocab_size() + 3, last]
    assert "".join(streamed(tokenizer, ids, range(9))) == tokenizer.decode(ids) == "\x80"


def test_a_space_as_a_byte_is_joined_as_any_space() -> None:
    tokenizer = made("metaspace")
    space, letter = (tokenizer.token_to_id(token) for token in ("<0x20>", "<0x61>"))
    for ids in ([space], [space, space], [letter, space], [space, letter, space, letter]):
        assert "".join(streamed(tokenizer, ids, range(9))) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "unigram"])
def test_a_character_never_comes_in_part(kind: str) -> None:
    tokenizer = made(kind)
    text = "The water 東京 🚰🌊 é"
    portions = streamed(tokenizer, tokenizer.encode(text).ids, range(200))
    assert not any("\ufffd" in portion for portion in portions)
    assert "".join(portions).strip() == text


def test_text_comes_out_as_soon_as_it_is_whole() -> None:
    tokenizer = made("byte_level")
    ids = tokenizer.encode("ab🚰cd").ids
    detokenizer = detokenizer_factory(tokenizer)()
    out = [detokenizer.push([id]) for id in ids]
    for done in range(len(ids)):
        whole = tokenizer.decode(ids[: done + 1]).rstrip("\ufffd")
        assert "".join(out[: done + 1]) == whole


def test_an_incomplete_character_comes_at_the_end() -> None:
    tokenizer = made("byte_level")
    ids = tokenizer.encode("a🚰").ids[:-1]
    *before, last = streamed(tokenizer, ids)
    assert ("".join(before), last) == ("a", "\ufffd")


def test_a_broken_run_of_byte_tokens_keeps_its_whole_characters() -> None:
    tokenizer = made("metaspace")
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "東".encode() + b"\xe4"]
    ids += tokenizer.encode("water").ids
    assert "".join(streamed(tokenizer, ids, range(20))) == "東\ufffd water"


def test_special_tokens_do_not_show_and_do_not_join() -> None:
    tokenizer = made("metaspace")
    the, water = tokenizer.encode("The").ids, tokenizer.encode("water").ids
    eos = tokenizer.token_to_id(kinds.EOS)
    assert "".join(streamed(tokenizer, [eos, *the, eos, *water, eos], range(9))) == "The water"


def test_added_tokens_that_are_not_special_show() -> None:
    tokenizer = kinds.byte_level()
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("東 京")])
    ids = tokenizer.encode("a<tool_call>b東 京c").ids
    assert "".join(streamed(tokenizer, ids, range(9))) == "a<tool_call>b東 京c"
