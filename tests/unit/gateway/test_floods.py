"""A body of very many faults is told one of them: each costs microseconds, and a quarter of a
million of them would hold the interpreter for seconds."""

from typing import Any

import pytest
from pydantic import ValidationError

from services.common.config import GatewaySettings
from services.common.errors import PenstockError
from services.gateway.api.generation_schema import ChatCompletionRequest, CompletionRequest
from services.gateway.api.pooled_schema import EmbeddingsRequest
from services.gateway.api.schema import Body, validated

MANY = 5000
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
NUMBERED = {f"k{n}": 1 for n in range(MANY)}


@pytest.mark.parametrize(
    ("model", "fields", "param"),
    [
        (ChatCompletionRequest, {**CHAT, "messages": [1] * MANY}, "messages"),
        (ChatCompletionRequest, {**CHAT, "messages": [{}] * 2048}, "messages[0]"),
        (ChatCompletionRequest, {**CHAT, "messages": [{"content": [1] * MANY}]}, "messages[0]"),
        (ChatCompletionRequest, {**CHAT, "messages": [NUMBERED]}, "messages[0].k0"),
        (ChatCompletionRequest, {**CHAT, "metadata": NUMBERED}, "metadata"),
        (ChatCompletionRequest, {**CHAT, "stop": [1] * MANY}, "stop"),
        (ChatCompletionRequest, {**CHAT, "documents": [1] * MANY}, "documents"),
        (ChatCompletionRequest, {**CHAT, "tools": [1] * MANY}, "tools"),
        (ChatCompletionRequest, {**CHAT, **NUMBERED}, "k0"),
        (CompletionRequest, {"model": "m", "prompt": "x", **NUMBERED}, "k0"),
        (EmbeddingsRequest, {"model": "m", "input": ["x", *[1.5] * MANY]}, "input"),
        (EmbeddingsRequest, {"model": "m", "input": [""] * 2048}, "input[0]"),
    ],
)
def test_few_faults_are_told_of_many(model: type[Body], fields: dict[str, Any], param: str):
    limits = GatewaySettings()
    with pytest.raises(ValidationError) as raised:
        model.model_validate(fields, context=limits)
    assert raised.value.error_count() <= 5
    with pytest.raises(PenstockError) as told:
        validated(model, fields, limits)
    assert told.value.param.startswith(param)


def test_an_unknown_field_is_unknown_however_many_there_are():
    for fields in ({"odd": 1}, {"odd": 1, **NUMBERED}):
        with pytest.raises(PenstockError) as told:
            validated(CompletionRequest, {"model": "m", "prompt": "x", **fields})
        assert (told.value.param, told.value.reason) == ("odd", "unknown_parameter")
        assert told.value.message == "Unknown parameter: 'odd'."
