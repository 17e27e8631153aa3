"""What a generation's body may hold: every acceptance and every refusal."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.config import GatewaySettings
from services.common.errors import PenstockError
from services.common.text.content import text_of
from services.gateway.api.generation_schema import ChatCompletionRequest, CompletionRequest
from services.gateway.api.schema import parse, validated

USER = {"role": "user", "content": "Hi"}


def chat(**more: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [USER], **more}
    return parse(ChatCompletionRequest, json.dumps(body).encode())


def completion(**more: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"model": "m", "prompt": "x", **more}).encode())


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"nonsense": 1}, "nonsense", "unknown_parameter"),
        ({"store": "yes"}, "store", "invalid_value"),
        ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
        ({"service_tier": "flex"}, "service_tier", "unsupported_parameter"),
        ({"functions": []}, "functions", "unsupported_parameter"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls", "invalid_value"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"temperature": "1"}, "temperature", "invalid_value"),
        ({"temperature": True}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"top_k": -1}, "top_k", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_value"),
        ({"max_tokens": 2**31}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
        ({"seed": 2**64}, "seed", "invalid_value"),
        ({"stop": ["a"] * 5}, "stop", "invalid_value"),
        ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
        ({"stop": ""}, "stop[0]", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.include_usage",
            "invalid_value",
        ),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "unsupported_parameter",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "unsupported_value"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "unsupported_value"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].vector_store_ids", None),
        (
            {"tools": [{"type": "file_search", "vector_store_ids": ["a"], "filters": {}}]},
            "tools[0].filters.type",
            "missing_required_parameter",
        ),
        ({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
        ({"documents": [{"title": "t"}]}, "documents[0].text", "missing_required_parameter"),
        ({"documents": [{"title": "a\n[2] b", "text": "t"}]}, "documents[0].title", None),
        ({"documents": [{"title": "a\u2029b", "text": "t"}]}, "documents[0].title", None),
        ({"metadata": {"a": 1}}, "metadata.a", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "Hi"}, "messages", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{**USER, "role": "critic"}]}, "messages[0].role", "unsupported_value"),
        ({"messages": [{**USER, "extra": 1}]}, "messages[0].extra", "unknown_parameter"),
        ({"messages": [{**USER, "annotations": []}]}, "messages[0].annotations", None),
        (
            {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages[1].tool_calls[0].id",
            "missing_required_parameter",
        ),
        ({"logit_bias": {"-1": 1.0}}, "logit_bias[-1]", None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "unsupported_value",
        ),
    ],
)
def test_refused_by_name(fields, param, reason):
    with pytest.raises(PenstockError) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert param in refused.value.message
    if reason is not None:
        assert refused.value.reason == reason


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logprobs": False},
        {"n": None, "logit_bias": None, "tools": None, "stop": None, "seed": None},
        {"logit_bias": {}, "store": False, "service_tier": "auto", "modalities": ["text"]},
        {"response_format": {"type": "text"}, "user": "u", "metadata": {"k": "v"}},
    ],
)
def test_values_that_ask_for_nothing_are_accepted(fields):
    given = chat(**fields).prompt(4).request
    assert given.sampling.seed  # drawn by the gateway
    assert given == chat(seed=given.sampling.seed).prompt(4).request


WAYS = {
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "frequency_penalty": -2.0,
    "presence_penalty": 2,
    "min_tokens": 3,
    "stop_token_ids": [5, 6],
}


@pytest.mark.parametrize("ask", [chat, completion])
def test_every_way_of_sampling_arrives(ask):
    asked = ask(**WAYS, logit_bias={"7": -100, "9": 0.5}, bad_words=["no"], n=3)
    made = asked.prompt(4) if ask is chat else asked.prompts(GatewaySettings())[0]
    sampling = made.request.sampling
    assert {name: getattr(sampling, name) for name in WAYS} == WAYS
    assert {one.id: one.bias for one in sampling.logit_bias} == {7: -100, 9: 0.5}
    assert (made.request.choices, list(made.request.bad_words)) == (3, ["no"])
    assert not sampling.HasField("logprobs")
    assert set(sampling.unnamed) == {"temperature", "top_p", "top_k"}, "the checkpoint's"
    assert not {"temperature", "top_k"} & {*ask(temperature=0, top_k=0).sampling(1, None).unnamed}


def test_logprobs_are_asked_for_in_the_form_of_each_endpoint():
    assert chat(logprobs=True).prompt(4).request.sampling.logprobs == 0
    assert chat(logprobs=True).prompt(4).request.sampling.HasField("logprobs")
    assert chat(logprobs=True, top_logprobs=20).prompt(4).request.sampling.logprobs == 20
    (told,) = completion(logprobs=5, echo=True).prompts(GatewaySettings())
    assert (told.request.sampling.logprobs, told.request.echo) == (5, True)


@pytest.mark.parametrize(
    ("model", "fields", "param"),
    [
        (ChatCompletionRequest, {"min_p": 1.1}, "min_p"),
        (ChatCompletionRequest, {"repetition_penalty": 0}, "repetition_penalty"),
        (ChatCompletionRequest, {"frequency_penalty": 2.1}, "frequency_penalty"),
        (ChatCompletionRequest, {"presence_penalty": -2.1}, "presence_penalty"),
        (ChatCompletionRequest, {"logit_bias": {"x": 1}}, "logit_bias"),
        (ChatCompletionRequest, {"logit_bias": {"7": 1, "07": 2}}, "logit_bias"),
        (ChatCompletionRequest, {"logit_bias": {"1_0": 1}}, "logit_bias"),
        (ChatCompletionRequest, {"logit_bias": {"7": 101}}, "logit_bias[7]"),
        (ChatCompletionRequest, {"logit_bias": {str(id): 1 for id in range(301)}}, "logit_bias"),
        (ChatCompletionRequest, {"bad_words": ["x"] * 65}, "bad_words"),
        (ChatCompletionRequest, {"bad_words": [""]}, "bad_words[0]"),
        (ChatCompletionRequest, {"stop_token_ids": list(range(65))}, "stop_token_ids"),
        (ChatCompletionRequest, {"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        (ChatCompletionRequest, {"n": 0}, "n"),
        (ChatCompletionRequest, {"n": True}, "n"),
        (ChatCompletionRequest, {"n": 17}, "n"),
        (ChatCompletionRequest, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (ChatCompletionRequest, {"top_logprobs": 1}, "top_logprobs"),
        (ChatCompletionRequest, {"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        (ChatCompletionRequest, {"best_of": 2}, "best_of"),
        (ChatCompletionRequest, {"echo": True}, "echo"),
        (CompletionRequest, {"min_tokens": 17}, "min_tokens"),
        (CompletionRequest, {"logprobs": 6}, "logprobs"),
        (CompletionRequest, {"n": 16, "prompt": ["x"] * 3}, "n"),
    ],
)
def test_ways_of_sampling_have_bounds(model, fields, param):
    limits = GatewaySettings()

    def ask() -> None:
        body = {"model": "m", **fields}
        if model is ChatCompletionRequest:
            parse(model, json.dumps({"messages": [USER], **body}).encode(), limits).prompt(4)
        else:
            parse(model, json.dumps({"prompt": "x", **body}).encode(), limits).prompts(limits)

    with pytest.raises(PenstockError) as refused:
        ask()
    assert refused.value.param == param
    assert param in refused.value.message


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_what_is_accepted_arrives():
    given = chat(
        messages=[
            {"role": "developer", "content": [text_part("Be "), text_part("brief.")]},
            {"role": "user", "content": "Q", "name": "ann"},
        ],
        temperature=0,
        top_p=0.5,
        top_k=7,
        seed=-1,
        stop="END",
        max_completion_tokens=5,
        ignore_eos=True,
        documents=[{"title": "t", "text": "d"}],
        tools=[{"type": "file_search", "vector_store_ids": ["a", "b", "a"], "max_num_results": 9}],
        metadata={"k": "v"},
        user="u",
    ).prompt(4)
    sampling = given.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 7)
    assert (sampling.seed, sampling.max_tokens, sampling.ignore_eos) == (2**64 - 1, 5, True)
    assert list(given.request.stop) == ["END"]
    messages = given.request.chat.messages
    assert [(m.role, text_of(m), m.name) for m in messages] == [
        ("developer", "Be brief.", ""),
        ("user", "Q", "ann"),
    ]
    assert [(p.title, p.text) for p in given.request.chat.passages] == [("t", "d")]
    assert (given.stores, given.max_chunks, given.question) == (("a", "b"), 9, "Q")
    assert given.tags == {"k": "v", "user": "u"}


@pytest.mark.parametrize("prompts", [["Say"], ["Say", [4, 5]]])
def test_what_is_accepted_of_a_completion_arrives_with_each_prompt(prompts):
    fields = {
        "model": "m",
        "prompt": prompts,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "seed": -1,
        "stop": ["END", "."],
        "max_tokens": 5,
        "ignore_eos": True,
        "metadata": {"k": "v"},
        "user": "u",
    }
    given = validated(CompletionRequest, fields).prompts(GatewaySettings())
    told = [one.request.text or list(one.request.token_ids.ids) for one in given]
    assert told == prompts
    for one in given:
        sampling = one.request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 7)
        assert (sampling.seed, sampling.max_tokens, sampling.ignore_eos) == (2**64 - 1, 5, True)
        assert (one.request.model, list(one.request.stop)) == ("m", ["END", "."])
        assert one.tags == {"k": "v", "user": "u"}


def test_more_messages_than_may_be_are_refused_unseen():
    class Unseen(dict[str, Any]):
        def keys(self) -> Any:
            raise AssertionError("a message was looked at")

        __iter__ = items = __getitem__ = get = keys

    limits = GatewaySettings(max_messages=3)
    allowed = {"model": "m", "messages": [USER] * 3}
    assert len(validated(ChatCompletionRequest, allowed, limits).messages) == 3
    with pytest.raises(PenstockError) as refused:
        validated(ChatCompletionRequest, {**allowed, "messages": [Unseen(USER)] * 4}, limits)
    assert (refused.value.param, refused.value.reason) == ("messages", "invalid_value")
    assert "at most 3" in refused.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": [{"text": "x"}] * 65}, "documents"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 257}]}, None),
        ({"tools": [{"type": "file_search", "vector_store_ids": ["a"]}] * 2}, "tools"),
        ({"tools": [{"type": "file_search", "vector_store_ids": ["a"] * 11}]}, None),
    ],
)
def test_every_list_has_an_end(fields, param):
    with pytest.raises(PenstockError) as refused:
        chat(**fields)
    ((name, _),) = fields.items()
    assert refused.value.param.startswith(param or f"{name}[0].")


def test_tool_choice_none_searches_nothing():
    tools = [{"type": "file_search", "vector_store_ids": ["a"]}]
    assert chat(tools=tools).prompt(4).stores == ("a",)
    assert chat(tools=tools, tool_choice="none").prompt(4).stores == ()


SEARCH = [{"type": "file_search", "vector_store_ids": ["a"]}]


def test_the_last_thing_the_user_said_is_searched_for():
    def said(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": text}

    turns = [said("user", "first"), said("assistant", "so"), said("user", "last")]
    assert chat(messages=turns, tools=SEARCH).prompt(4).question == "last"
    assert (
        chat(messages=[*turns, said("assistant", "but")], tools=SEARCH).prompt(4).question == "last"
    )
    assert chat(tools=SEARCH).prompt(4).max_chunks == 4
    assert chat().prompt(4).max_chunks == 0


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "x"}],
        [{"role": "user", "content": " \n"}],
        [USER, {"role": "user", "content": " "}],
    ],
)
def test_who_asks_nothing_searches_nothing(messages):
    assert chat(messages=messages).prompt(4).question == ""
    with pytest.raises(PenstockError) as refused:
        chat(messages=messages, tools=SEARCH)
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"temperature": 2}, {"temperature": 2.0}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_p": 1}, {"top_p": 1.0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}),
        ({"seed": -(2**63)}, {"seed": 2**63}),
        ({"seed": 0}, {"seed": 0}),
        ({"max_tokens": 1}, {"max_tokens": 1}),
        ({"max_tokens": 2**31 - 1}, {"max_tokens": 2**31 - 1}),
        ({"max_tokens": 3, "max_completion_tokens": 3}, {"max_tokens": 3}),
        ({}, {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 0, "ignore_eos": False}),
    ],
)
def test_the_last_value_that_may_be_is_honoured(fields, given):
    sampling = chat(**fields).prompt(4).request.sampling
    assert {name: getattr(sampling, name) for name in given} == given


@pytest.mark.parametrize(
    ("fields", "over"),
    [
        ({"stop": ["s" * 256] * 4}, {"stop": ["s" * 257]}),
        ({"user": "u" * 512}, {"user": "u" * 513}),
        ({"messages": [{**USER, "name": "n" * 64}]}, {"messages": [{**USER, "name": "n" * 65}]}),
        ({"documents": [{"text": "x"}] * 64}, {"documents": [{"text": ""}]}),
        (
            {"documents": [{"title": "t" * 500, "text": "x"}]},
            {"documents": [{"title": "t" * 501, "text": "x"}]},
        ),
        (
            {"tools": [{**SEARCH[0], "max_num_results": 50}]},
            {"tools": [{**SEARCH[0], "max_num_results": 51}]},
        ),
        (
            {"tools": [{**SEARCH[0], "max_num_results": 1}]},
            {"tools": [{**SEARCH[0], "max_num_results": 0}]},
        ),
        ({"metadata": {"k" * 64: "v" * 512}}, {"metadata": {"k" * 65: "v"}}),
        ({"model": "m" * 256}, {"model": "m" * 257}),
    ],
)
def test_the_longest_that_may_be_is_taken(fields, over):
    chat(**fields).prompt(4)
    with pytest.raises(PenstockError) as refused:
        chat(**over)
    ((name, _),) = over.items()
    assert refused.value.param.startswith(name)


def limits(ids: int = 9, prompts: int = 3) -> GatewaySettings:
    return GatewaySettings(max_prompt_tokens=ids, max_prompts=prompts)


@pytest.mark.parametrize("prompt", ["x", ["x"]])
def test_a_text_prompt(prompt):
    (asked,) = completion(prompt=prompt).prompts(limits())
    assert (asked.request.text, asked.param) == ("x", "")


@pytest.mark.parametrize("prompt", [[1, 2], [[1, 2]]])
def test_a_prompt_of_token_ids(prompt):
    (asked,) = completion(prompt=prompt).prompts(limits(ids=2))
    assert list(asked.request.token_ids.ids) == [1, 2]


def test_a_list_of_prompts_is_one_request_each():
    asked = completion(prompt=["a", "b", "a"], max_tokens=5, user="u").prompts(limits())
    assert [one.request.text for one in asked] == ["a", "b", "a"]
    assert [one.param for one in asked] == ["prompt[0]", "prompt[1]", "prompt[2]"]
    assert {one.request.sampling.max_tokens for one in asked} == {5}
    assert all(one.tags == {"user": "u"} for one in asked)
    assert len({one.request.sampling.seed for one in asked}) == 3, "each has a seed of its own"
    seeded = completion(prompt=["a", "a"], seed=7).prompts(limits())
    assert [one.request.sampling.seed for one in seeded] == [7, 7]
    ids = completion(prompt=[[1], [2, 3]]).prompts(limits(ids=3))
    assert [list(one.request.token_ids.ids) for one in ids] == [[1], [2, 3]]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (["a"] * 4, "prompt"),
        ([[1, 2], [3, 4]], "prompt"),
        (["a", ""], "prompt[1]"),
        (["a", 3], "prompt[1]"),
        ([[1], []], "prompt[1]"),
        ([[1], ["x"]], "prompt[1]"),
        ([[1], [2**32]], "prompt[1]"),
    ],
)
def test_of_several_prompts_the_one_at_fault_is_named(prompt, param):
    with pytest.raises(PenstockError) as refused:
        completion(prompt=prompt).prompts(limits(ids=3))
    assert refused.value.param == param
    assert param in refused.value.message


def test_more_token_ids_than_may_be_are_refused_unseen():
    class Unseen(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("an id was looked at")

    for prompt in (Unseen([1, 2, 3]), [Unseen([1, 2]), Unseen([3])]):
        request = validated(CompletionRequest, {"model": "m", "prompt": prompt})
        with pytest.raises(PenstockError) as refused:
            request.prompts(limits(ids=2))
        assert (refused.value.param, refused.value.reason) == ("prompt", "invalid_value")


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [1, "a"], [-1], [2**32], [True], [1.5], 3, {}, [{}], [None]]
)
def test_other_prompts_are_refused(prompt):
    with pytest.raises(PenstockError) as refused:
        completion(prompt=prompt).prompts(limits())
    assert refused.value.param == "prompt"


@pytest.mark.parametrize("fields", [{"suffix": "x"}, {"best_of": 2}])
def test_completions_refuse_what_they_do_not_do(fields):
    (name,) = fields
    with pytest.raises(PenstockError) as refused:
        completion(**fields)
    assert (refused.value.param, refused.value.reason) == (name, "unsupported_parameter")


NAMES = st.text(max_size=9)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted(
    {*ChatCompletionRequest.model_fields, *ChatCompletionRequest.NEUTRAL, "prompt", "echo"}
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4), st.booleans())
def test_any_fields_are_a_request_or_a_refusal(fields, is_chat):
    with contextlib.suppress(PenstockError):
        if is_chat:
            asked = chat(**fields)
            prompts = [asked.prompt(9)]
        else:
            asked = completion(**fields)
            prompts = asked.prompts(limits())
        assert {prompt.request.model for prompt in prompts} == {asked.model}


@given(st.binary(max_size=64) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_request_or_a_refusal(body):
    with pytest.raises(PenstockError):
        parse(ChatCompletionRequest, body)
