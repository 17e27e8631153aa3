"""Tools and forms in requests and answers, as OpenAI's and vLLM's clients send and read them."""

import json
from typing import Any

import pytest

from protos.common_pb2 import FINISH_TOOL_CALLS, Constraint, ToolChoice
from protos.tokenizer_pb2 import PromptPlan, TextDelta, ToolCallDelta
from services.common.config import GatewaySettings
from services.common.errors import PenstockError
from services.gateway.api.generation_schema import ChatCompletionRequest, CompletionRequest
from services.gateway.api.rest.openai_format import Chunks, chat_completion
from services.gateway.api.schema import validated
from services.gateway.runs.prompt import Answer, Prompt

USER = {"role": "user", "content": "Hi"}
FIND = {"name": "find", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}
FIND_TOOL = {"type": "function", "function": FIND}
CALL = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"q": "x"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "found"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = json.dumps(SCHEMA | {"additionalProperties": False})
DEEP = json.loads('{"allOf": [' * 50 + "{}" + "]}" * 50)


def of_parameters(type: Any = "object", required: Any = None, **properties: Any) -> dict[str, Any]:
    schema = {"type": type, "required": required, "properties": properties}
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}


def chat(**fields: Any) -> Prompt:
    request = {"model": "m", "messages": [USER], **fields}
    return validated(ChatCompletionRequest, request).prompt(4)


def test_what_schemas_may_say_is_taken_as_it_is() -> None:
    """Of several drafts."""
    kinds = {"type": ["string", "null"], "enum": ["a", None], "default": {"type": 5}}
    several = {"items": [{}, True], "anyOf": [True, {"const": 1}], "required": ["b"], "type": None}
    asked = of_parameters(required=["a"], a=kinds, b=several, type="object", c=True)
    (tool,) = chat(**asked).request.chat.tools
    assert json.loads(tool.parameters) == asked["tools"][0]["function"]["parameters"]


def test_tools_calls_and_results_travel() -> None:
    other = {"type": "function", "function": {"name": "go", "strict": True, "description": "Goes."}}
    sent = chat(messages=[USER, CALLED, RESULT], tools=[FIND_TOOL, other], tool_choice="required")
    asked = sent.request.chat
    assert [(t.name, t.description, t.strict) for t in asked.tools] == [
        ("find", "", False),
        ("go", "Goes.", True),
    ]
    assert json.loads(asked.tools[0].parameters) == FIND["parameters"]
    assert (asked.tool_choice.mode, asked.one_call) == (ToolChoice.REQUIRED, False)
    _, called, result = asked.messages
    (call,) = called.tool_calls
    assert (call.id, call.name, call.arguments) == ("call_1", "find", '{"q": "x"}')
    assert (result.tool_call_id, result.content[0].text) == ("call_1", "found")
    named = {"type": "function", "function": {"name": "find"}}
    chosen = chat(tools=[FIND_TOOL], tool_choice=named, parallel_tool_calls=False).request.chat
    assert (chosen.tool_choice.mode, chosen.tool_choice.name) == (ToolChoice.NAMED, "find")
    assert chosen.one_call
    some = {"mode": "required", "tools": [{"type": "function", "function": {"name": "go"}}]}
    allowed = chat(
        tools=[FIND_TOOL, other], tool_choice={"type": "allowed_tools", "allowed_tools": some}
    ).request.chat.tool_choice
    assert (allowed.mode, list(allowed.allowed)) == (ToolChoice.REQUIRED, ["go"])
    options = {"enable_thinking": False, "style": "short"}
    assert json.loads(chat(chat_template_kwargs=options).request.chat.template_options) == options
    search = {"type": "file_search", "vector_store_ids": ["vs"]}
    both = chat(tools=[search, FIND_TOOL])
    assert (both.stores, [t.name for t in both.request.chat.tools]) == (("vs",), ["find"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [FIND_TOOL, FIND_TOOL]}, "tools"),
        (
            {"tools": [{**FIND_TOOL, "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{**FIND_TOOL, "function": {"name": "f", "parameters": DEEP}}]},
            "tools[0].function.parameters",
        ),
        (of_parameters(type=5), "tools[0].function.parameters.type"),
        (of_parameters(required=5), "tools[0].function.parameters.required"),
        (of_parameters(q={"type": 5}), "tools[0].function.parameters.properties.q.type"),
        (of_parameters(q={"enum": 5}), "tools[0].function.parameters.properties.q.enum"),
        (of_parameters(q=5), "tools[0].function.parameters.properties.q"),
        (
            of_parameters(q={"anyOf": [{}, {"items": {"properties": {"type": {"type": [5]}}}}]}),
            "tools[0].function.parameters.properties.q.anyOf[1].items.properties.type.type",
        ),
        ({"guided_json": DEEP}, "guided_json"),
        ({"guided_json": json.dumps(DEEP)}, "guided_json"),
        (
            {"messages": [USER, {**CALLED, "tool_calls": [
                {**CALL, "function": {"name": "f", "arguments": json.dumps(DEEP)}}]}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"tools": [{**FIND_TOOL, "vector_store_ids": ["a"]}]}, "tools[0].vector_store_ids"),
        ({"tools": [FIND_TOOL], "tool_choice": "sometimes"}, "tool_choice.type"),
        (
            {"tools": [FIND_TOOL], "tool_choice": {"type": "allowed_tools"}},
            "tool_choice.allowed_tools",
        ),
        (
            {"tools": [FIND_TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
                "mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}}},
            "tool_choice",
        ),
        (
            {"tools": [FIND_TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
                "mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
        ),
        ({"chat_template_kwargs": {"a": {"b": 1}}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        (
            {"tools": [FIND_TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
        ),
        (
            {"tools": [{"type": "file_search", "vector_store_ids": ["a"]}],
             "tool_choice": "required"},
            "tool_choice",
        ),
        ({"messages": [USER, {**RESULT, "tool_call_id": None}]}, "messages[1].tool_call_id"),
        ({"messages": [USER, CALLED, {**RESULT, "tool_call_id": "x"}]}, "messages[2].tool_call_id"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "messages[1].content"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        (
            {"messages": [USER, {**CALLED, "tool_calls": [
                {**CALL, "function": {"name": "f", "arguments": "{"}}]}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(PenstockError) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert param in refused.value.message


@pytest.mark.parametrize(
    ("fields", "param", "constraint"),
    [
        ({"response_format": {"type": "text"}}, "", None),
        ({"response_format": {"type": "json_object"}}, "response_format",
         Constraint(json_object=True)),
        (
            {"response_format": {"type": "json_schema",
                                 "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
            "response_format.json_schema.schema",
            Constraint(json_schema=CLOSED),
        ),
        ({"guided_json": SCHEMA}, "guided_json", Constraint(json_schema=CLOSED)),
        ({"guided_json": json.dumps(SCHEMA)}, "guided_json",
         Constraint(json_schema=CLOSED)),
        ({"guided_regex": "a+"}, "guided_regex", Constraint(regex="a+")),
        ({"guided_choice": ["a", "b"]}, "guided_choice",
         Constraint(choice=Constraint.Options(texts=["a", "b"]))),
        ({"guided_grammar": "start: \"a\""}, "guided_grammar", Constraint(grammar='start: "a"')),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json",
         Constraint(json_schema=CLOSED)),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice",
         Constraint(choice=Constraint.Options(texts=["a"]))),
    ],
)  # fmt: skip
def test_forms(fields: dict[str, Any], param: str, constraint: Constraint | None) -> None:
    request = {"model": "m", "prompt": "Hi", **fields}
    (completion,) = validated(CompletionRequest, request).prompts(GatewaySettings())
    for prompt in (chat(**fields), completion):
        assert prompt.form == param
        assert prompt.request.sampling.HasField("constraint") is (constraint is not None)
        if constraint is not None:
            assert prompt.request.sampling.constraint == constraint


def deltas() -> list[TextDelta]:
    return [
        TextDelta(reasoning="Well, ", plan=PromptPlan(window=9)),
        TextDelta(reasoning="so.", text="I "),
        TextDelta(text="look."),
        TextDelta(tool_calls=[ToolCallDelta(index=0, name="find"),
                              ToolCallDelta(index=0, arguments='{"q"')]),
        TextDelta(tool_calls=[ToolCallDelta(index=0, arguments=': "x"}'),
                              ToolCallDelta(index=1, name="go", arguments="{}")]),
        TextDelta(finish=FINISH_TOOL_CALLS),
    ]  # fmt: skip


def test_a_stream_puts_together_what_is_answered_at_once() -> None:
    whole = Answer("req_abc", "m", [])
    whole.add(deltas())
    (choice,) = chat_completion([whole])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "Well, so.")
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [
        {"name": "find", "arguments": '{"q": "x"}'},
        {"name": "go", "arguments": "{}"},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2

    streamed = Answer("req_abc", "m", [])
    chunks = Chunks(streamed, chat=True, include_usage=False)
    heard: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for delta in deltas():
        streamed.add([delta])
        for block in chunks.delta(delta).split(b"\n\n")[:-1]:
            (told,) = json.loads(block[6:])["choices"]
            for kind in ("content", "reasoning_content"):
                heard[kind] += told["delta"].get(kind, "")
            for piece in told["delta"].get("tool_calls", ()):
                if "id" in piece:
                    assert piece["index"] == len(heard["tool_calls"])
                    heard["tool_calls"].append({**piece, "function": {**piece["function"]}})
                else:
                    function = heard["tool_calls"][piece["index"]]["function"]
                    function["arguments"] += piece["function"]["arguments"]
    for call in heard["tool_calls"]:
        del call["index"]
    assert heard == {kind: message[kind] for kind in heard}


def test_an_answer_of_calls_alone_has_no_content_and_may_be_sent_back() -> None:
    made = Answer("req_abc", "m", [])
    made.add([TextDelta(tool_calls=[ToolCallDelta(index=0, name="find", arguments="{}")])])
    (choice,) = chat_completion([made])["choices"]
    assert choice["message"]["content"] is None
    id = choice["message"]["tool_calls"][0]["id"]
    result = {"role": "tool", "tool_call_id": id, "content": "y"}
    # As OpenAI's `parse` gives it.
    choice["message"]["parsed"] = {"a": 1}
    choice["message"]["provider_specific_fields"] = {"refusal": None}
    choice["message"]["tool_calls"][0]["function"]["parsed_arguments"] = {}
    sent = chat(messages=[USER, choice["message"], result]).request.chat
    assert [m.role for m in sent.messages] == ["user", "assistant", "tool"]
