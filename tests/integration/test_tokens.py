"""How many tokens a conversation has, and which, before a scripted tokenizer."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from anthropic import AsyncAnthropic
from openai import BadRequestError

from protos.common_pb2 import FINISH_STOP, Tool
from protos.gateway_pb2 import PublicDetokenizeRequest, PublicTokenizeRequest
from protos.gateway_pb2_grpc import InferenceStub
from protos.tokenizer_pb2 import PromptRequest, TextDelta
from services.common.config import MeteringSettings
from services.common.errors import invalid
from services.common.link import LinkCall
from services.common.text.content import said, text_of
from tests.support.gateway_rig import EMBEDDING_MODEL, MODEL, Rig, gateway_rig, say
from tests.support.stories import ledger

ASK: list[Any] = [{"role": "user", "content": "Pressure?"}]


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    prices = {MODEL: {"prompt": 2, "output": 10}}
    metering = MeteringSettings(prices=prices)  # type: ignore[arg-type]
    async with gateway_rig(redis_url, namespace, metering=metering) as rig:
        rig.tokenizer.script = _count
        yield rig


async def _count(call: LinkCall, request: PromptRequest) -> None:
    assert request.tokens_only
    ids = list(request.token_ids.ids) or [5, 6, 7]
    if 99 in ids:
        raise invalid("token id 99 is outside the vocabulary of 50", "prompt[1]")
    text = "It is" if request.HasField("token_ids") else ""
    delta = TextDelta(token_ids=ids, text=text, finish=FINISH_STOP)
    delta.usage.prompt_tokens = len(ids)
    call.send(delta.SerializeToString())


async def test_anthropics_client_counts(rig):
    async with AsyncAnthropic(base_url=rig.url, api_key=rig.key, max_retries=0) as client:
        tool: Any = {"name": "pressure", "input_schema": {"type": "object"}}
        told = await client.messages.count_tokens(
            model=MODEL, messages=ASK, system="Be brief.", tools=[tool]
        )
        again = await client.beta.messages.count_tokens(model=MODEL, messages=ASK)
    assert (told.input_tokens, again.input_tokens) == (3, 3)
    sent = rig.tokenizer.requests[0]
    assert [text_of(one) for one in sent.chat.messages] == ["Be brief.", "Pressure?"]
    assert sent.chat.whole
    assert [one.name for one in sent.chat.tools] == ["pressure"]
    (entry, _) = await ledger(rig, 2)
    assert (entry.prompt, entry.nanos) == (0, 0)


async def test_openais_client_counts(rig):
    client = await rig.openai()
    tool: Any = {"type": "function", "name": "pressure", "parameters": {}, "strict": False}
    told = await client.responses.input_tokens.count(
        model=MODEL, input="Pressure?", instructions="Be brief.", tools=[tool]
    )
    assert (told.object, told.input_tokens) == ("response.input_tokens", 3)
    sent = rig.tokenizer.requests[0]
    assert [text_of(one) for one in sent.chat.messages] == ["Be brief.", "Pressure?"]
    assert sent.chat.whole
    assert [one.name for one in sent.chat.tools] == ["pressure"]

    rig.tokenizer.script = say("3 bar")
    first = await client.responses.create(model=MODEL, input="Pressure?")
    rig.tokenizer.script = _count
    await client.responses.input_tokens.count(
        model=MODEL, input="Now?", previous_response_id=first.id
    )
    messages = rig.tokenizer.requests[-1].chat.messages
    assert [text_of(one) for one in messages] == ["Pressure?", "3 bar", "Now?"]
    theirs = await rig.openai((await rig.keys.create("globex"))[0])
    with pytest.raises(BadRequestError) as refused:
        await theirs.responses.input_tokens.count(
            model=MODEL, input="Now?", previous_response_id=first.id
        )
    assert refused.value.param == "previous_response_id"


async def test_tokens_there_and_back_as_vllms_clients_ask(rig):
    http = await rig.http()
    told = (await http.post("/tokenize", json={"model": MODEL, "prompt": "It is"})).json()
    assert told == {"count": 3, "max_model_len": 512, "tokens": [5, 6, 7], "token_strs": None}
    assert rig.tokenizer.requests[0].text == "It is"
    told = (await http.post("/tokenize", json={"model": MODEL, "messages": ASK})).json()
    assert told["count"] == 3
    assert text_of(rig.tokenizer.requests[1].chat.messages[0]) == "Pressure?"
    told = (await http.post("/detokenize", json={"model": MODEL, "tokens": [5, 6]})).json()
    assert told == {"prompt": "It is"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": ASK}, "messages"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": [1, 99]}, "tokens[1]"),
        ("/v1/messages/count_tokens", {"messages": ASK, "max_tokens": 4}, "max_tokens"),
        ("/v1/messages/count_tokens", {"messages": []}, "messages"),
        ("/v1/responses/input_tokens", {"input": "a", "max_output_tokens": 4}, "max_output_tokens"),
        ("/v1/responses/input_tokens", {"input": "a", "truncation": "auto"}, "truncation"),
        ("/v1/responses/input_tokens", {}, "input"),
        ("/tokenize", {"model": EMBEDDING_MODEL, "prompt": "a"}, "model"),
        ("/v1/chat/completions", {"model": EMBEDDING_MODEL, "messages": ASK}, "model"),
    ],
)
async def test_bad_input_is_named(rig, path, body, param):
    answer = await (await rig.http()).post(path, json={"model": MODEL, **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_over_grpc_it_is_the_same(rig):
    stub: Any = InferenceStub(await rig.channel())
    key = (("authorization", f"Bearer {rig.key}"),)
    asked, tool = [said("user", "Pressure?")], Tool(name="pressure")
    for more in ({"text": "It is"}, {"messages": asked, "tools": [tool]}):
        told = await stub.Tokenize(PublicTokenizeRequest(model=MODEL, **more), metadata=key)
        assert (list(told.token_ids), told.window) == ([5, 6, 7], 512)
    text, chat = rig.tokenizer.requests
    assert text.text == "It is"
    assert chat.chat.whole
    assert [text_of(one) for one in chat.chat.messages] == ["Pressure?"]
    assert [one.name for one in chat.chat.tools] == ["pressure"]
    request = PublicDetokenizeRequest(model=MODEL, token_ids=[5, 6])
    assert (await stub.Detokenize(request, metadata=key)).text == "It is"
    assert {(one.prompt, one.nanos) for one in await ledger(rig, 3)} == {(0, 0)}
    rig.settings.gateway.max_prompt_tokens = 3
    for call, odd, param in (
        (stub.Tokenize, PublicTokenizeRequest(model=MODEL), "text"),
        (stub.Tokenize, PublicTokenizeRequest(model=MODEL, text="a", messages=asked), "messages"),
        (stub.Tokenize, PublicTokenizeRequest(model=MODEL, text="a", tools=[tool]), "tools"),
        (stub.Tokenize, PublicTokenizeRequest(text="a"), "model"),
        (stub.Detokenize, PublicDetokenizeRequest(model=MODEL), "token_ids"),
        (stub.Detokenize, PublicDetokenizeRequest(model=MODEL, token_ids=[1] * 4), "token_ids"),
        (stub.Detokenize, PublicDetokenizeRequest(model=MODEL, token_ids=[1, 99]), "token_ids[1]"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(odd, metadata=key)
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert dict(raised.value.trailing_metadata())["x-param"] == param
