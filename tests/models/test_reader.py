"""The reader, and what it tells the demo model."""

import random
from typing import cast

import pytest
import torch
from tokenizers import Tokenizer

from models.recipe import corpus, told
from models.recipe import tokenizer as bpe
from models.recipe.batches import Row, row
from models.recipe.lessons import Reading, Told
from models.recipe.minilm import WIDTH
from models.recipe.model import Llama, Shape
from models.recipe.reader import Pairs, Reader, missed, pairs, readable
from models.recipe.tokenizer import DOCUMENTS, USER

SHAPE = Shape(bpe.VOCABULARY, hidden=448, inner=32, layers=7, heads=14, head_dim=32, theta=1e9)


@pytest.fixture(scope="module")
def reader(tokenizer: Tokenizer) -> Reader:
    torch.manual_seed(0)
    return Reader(tokenizer)


@pytest.fixture(scope="module")
def rows(tokenizer: Tokenizer) -> list[Row]:
    """Questions over passages, told and not."""
    made = (row(tokenizer, corpus.looked_up(random.Random(i), 0.4), 4096) for i in range(16))
    return [one for one in made if readable(one)]


def test_a_pair_is_a_question_with_a_passage_as_the_prompt_has_them(rows: list[Row]) -> None:
    assert any(len(pairs(one)) > 1 for one in rows)
    for one in rows:
        for pair, shown in zip(pairs(one), one.guide.readings, strict=True):
            assert pair.ids[0] == USER
            assert pair.ids[pair.mark] == DOCUMENTS
            assert one.ids[pair.second] == pair.ids[pair.mark :]
            assert pair.second.start == shown.second
        told = {at + pair.apart for pair in pairs(one) for at in pair.firsts}
        assert told == {first for _, first, _ in one.guide.tells}


def test_passages_of_a_question_are_compared_and_those_of_others_are_not(
    reader: Reader, rows: list[Row]
) -> None:
    some = Pairs.of([pairs(one) for one in rows[:4]])
    scores = torch.zeros_like(some.open, dtype=torch.float).masked_fill(~some.open, -1e9)
    for n, one in enumerate(rows[:4]):
        places = sum(len(pair.inside) + 1 for pair in pairs(one))
        right = len(one.guide.tells) or len(one.guide.readings)
        wanted = 2 * torch.tensor(places / right).log()
        assert missed(scores, some)[n] == pytest.approx(float(wanted), rel=1e-4)


def test_padding_changes_nothing(reader: Reader, rows: list[Row]) -> None:
    some = [pairs(one) for one in rows[:3]]
    with torch.no_grad():
        together, alone = reader(Pairs.of(some)), [reader(Pairs.of([one])) for one in some]
    at = 0
    for one in alone:
        part = together[at : at + len(one), :, : one.shape[2]]
        torch.testing.assert_close(part, one, rtol=1e-3, atol=1e-3)
        at += len(one)


def test_the_demo_model_that_says_what_the_reader_says_is_told_nothing_more(
    reader: Reader, rows: list[Row]
) -> None:
    part = rows[:3]
    shown = [pairs(one) for one in part]
    some = Pairs.of(shown)
    width = max(len(one.ids) for one in part)
    streams = [torch.zeros(len(part), width, WIDTH + 64) for _ in range(told.TOLD)]
    with torch.no_grad():
        for layer, said in enumerate(reader.said(some)):
            at = 0
            for n, mine in enumerate(shown):
                for pair in mine:
                    streams[layer][n, pair.second, :WIDTH] = 3 * said[at, pair.mark : len(pair.ids)]
                    at += 1
        assert told.unlike(streams, shown, reader).max() < 1e-4
        streams[4][..., :WIDTH] += 5 * torch.randn(WIDTH)  # the same for all tokens
        assert told.unlike(streams, shown, reader).max() < 0.1
        streams[2][..., :WIDTH] = streams[2][..., :WIDTH].roll(1, 2)
        assert told.unlike(streams, shown, reader).argmax() == 2


def test_streams_of_any_size_are_even_if_tokens_are_alike() -> None:
    there = torch.tensor([[True, True, True, False]])
    same = torch.randn(1, 4, 1).sign() * torch.ones(1, 4, 6)
    grown = same * torch.tensor([1.0, 1.0, 8.0, 1000.0])[:, None]
    even, also, not_even = told.uneven([same, 30 * same, grown], there)
    assert max(even, also) < 1e-4
    assert not_even > 1, "padding counts nothing, the third token does"


def test_the_reader_learns_and_the_demo_model_follows(
    tokenizer: Tokenizer, rows: list[Row]
) -> None:
    torch.manual_seed(0)
    reading = Reading(Reader(tokenizer))
    words = reading.reader.words.weight.clone()
    following = Told(Llama(SHAPE), reading.reader)
    for lesson, rate in ((reading, 2e-4), (following, 1e-3)):
        parameters = [p for group in lesson.groups() for p in group]
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimizer = torch.optim.AdamW(parameters, rate, weight_decay=0.0)
        part = sorted(rows, key=lambda one: len(one.ids))[:3]
        lost = []
        for _ in range(6):
            loss, _ = lesson.lose(part, False)
            lost.append(loss.item())
            loss.backward()  # type: ignore[no-untyped-call]
            lesson.hold()
            optimizer.step()
            optimizer.zero_grad()
        assert lost[-1] < 0.95 * lost[0]
    assert torch.equal(cast(Reading, reading).reader.words.weight, words)
