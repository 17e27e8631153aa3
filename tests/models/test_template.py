"""The chat template: every role and part of a request, in Hugging Face as in training."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import transformers

from models.recipe import corpus
from models.recipe.template import render

ROOT = Path(__file__).parents[2]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"enum": ["celsius", "kelvin"]},
                "day": {"type": ["string", "null"]},
                "more": {},
            },
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Caswell"}'},
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "developer", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "The weather "},
            {"type": "text", "text": "in Caswell?"},
        ],
    },
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    {"role": "assistant", "content": "The result: rain."},
    {"role": "user", "content": "Thanks!"},
]
DOCUMENTS = [{"title": "Caswell", "text": "It is a town."}, {"title": "", "text": "It rains."}]


@pytest.fixture(scope="module", params=["demo", "demo-draft"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return transformers.AutoTokenizer.from_pretrained(ROOT / "models" / request.param)


def test_all_roles_tools_and_passages(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(
        MESSAGES, tools=[TOOL], documents=DOCUMENTS, add_generation_prompt=True, tokenize=False
    )
    assert text == (
        "<|system|>Be kind.<|end|><|system|>Be brief.<|end|>"
        "<|tools|>Get the weather. - "
        "get_weather(city: string,unit?: celsius|kelvin,day?: string|null,more?: any)<|end|>"
        "<|user|>The weather in Caswell?<|end|>"
        '<|assistant|><tool_call>{"name": "get_weather", "arguments": {"city": "Caswell"}}'
        "</tool_call><|end|><|tool|>rain<|end|><|assistant|>The result: rain.<|end|>"
        "<|user|>Thanks!<|end|>"
        "<|documents|>[1] Caswell\nIt is a town.<|end|>"
        "<|documents|>[1] Caswell\nIt is a town.<|end|>"
        "<|user|>Thanks!<|end|>"
        "<|documents|>[2] It rains.<|end|><|documents|>[2] It rains.<|end|>"
        "<|user|>Thanks!<|end|><|assistant|>"
    )


def test_passages_stand_with_the_last_question(tokenizer: Any) -> None:
    def prompt(*roles: str, documents: Any = DOCUMENTS) -> Any:
        return tokenizer.apply_chat_template(
            [{"role": role, "content": role.upper()} for role in roles],
            documents=documents,
            add_generation_prompt=True,
            tokenize=False,
        )

    first = "<|documents|>[1] Caswell\nIt is a town.<|end|>"
    second = "<|documents|>[2] It rains.<|end|>"
    user, said = "<|user|>USER<|end|>", "<|assistant|>ASSISTANT<|end|>"
    plain = prompt("user", "assistant", "user", documents=None)
    assert plain == f"{user}{said}{user}<|assistant|>"
    asked = f"{user}{first}{first}{user}{second}{second}{user}"  # each is read twice
    assert prompt("user", "assistant", "user") == f"{user}{said}{asked}<|assistant|>"
    vain = "<|documents|>[1] Search\nNo document was found.<|end|>"
    assert prompt("user", "assistant", "user", documents=[]) == (
        f"{user}{said}{vain}{vain}{user}<|assistant|>"
    )
    followed = f"{asked}{said}<|tool|>TOOL<|end|><|assistant|>"
    assert prompt("user", "assistant", "tool") == followed
    assert prompt("system") == f"<|system|>SYSTEM<|end|>{first}{second}<|assistant|>"


def test_call_arguments_may_be_an_object(tokenizer: Any) -> None:
    function = {"name": "get_weather", "arguments": {"city": "Caswell"}}
    as_object = [{"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}]
    as_text = [{"role": "assistant", "tool_calls": [CALL]}]
    both = [tokenizer.apply_chat_template(m, tokenize=False) for m in (as_object, as_text)]
    assert both[0] == both[1]


def test_tool_call_markers_survive_decoding(tokenizer: Any) -> None:
    said = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    ids = tokenizer(said + "<|end|>", add_special_tokens=False).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == said
    assert ids[-1] == tokenizer.eos_token_id
    assert (
        json.loads(said.removeprefix("<tool_call>").removesuffix("</tool_call>"))["name"] == "add"
    )


def test_training_renders_as_hugging_face_does(tokenizer: Any) -> None:
    for seed in range(60):
        made = corpus.example(random.Random(seed), 0.7)
        for prompt in (False, True):
            theirs = tokenizer.apply_chat_template(
                made.prompt() if prompt else made.messages,
                tools=made.tools or None,
                documents=made.documents or ([] if made.searched else None),
                add_generation_prompt=prompt,
                tokenize=False,
            )
            assert theirs == render(made, prompt)


def test_any_text_survives_the_tokenizer(tokenizer: Any) -> None:
    text = "Grüße, 東京 🏮!\tTabs,  two spaces\n\n'quotes' \"and\" 3.14 — iPhone McDuff"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
