"""What requests cost, and what they may at most."""

import pytest
from pydantic import ValidationError

from protos.common_pb2 import Usage
from protos.tokenizer_pb2 import PromptRequest
from services.common.config import MeteringSettings
from services.gateway.metering.estimate import expected, of_texts
from services.gateway.metering.prices import Cost, Prices
from services.gateway.metering.run import Used
from services.gateway.runs.prompt import Prompt


def prices(**table: object) -> Prices:
    return Prices(MeteringSettings(prices=table, currency="EUR"))  # type: ignore[arg-type]


def usage(prompt: int = 1000, cached: int = 600, output: int = 10) -> Usage:
    return Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=output)


def test_prompt_cached_and_output_tokens_have_their_own_prices():
    table = prices(m={"prompt": 0.15, "cached": 0.0375, "output": 0.6})
    assert table.used("m", "normal", usage()) == Used(1000, 600, 10, 60_000 + 22_500 + 6_000)
    table = prices(m={"prompt": 0.15, "output": 0.6})  # cached tokens as the others
    assert table.used("m", "normal", usage()).cost == 156_000
    assert prices(m={"prompt": 1, "cached": 0}).used("m", "", usage()).cost == 400_000


def test_a_tier_and_a_model_have_their_own():
    low = {"prompt": 1, "output": 2}
    table = prices(**{"m": {"prompt": 2, "tiers": {"low": low}}, "*": {"output": 7}})
    assert table.used("m", "low", usage()).cost == 1_020_000
    assert table.used("m", "high", usage()).cost == 2_000_000
    assert table.used("another", "low", usage()).cost == 70_000
    assert table.cost("m", Used(cost=1_500_000_000)) == Cost(1_500_000_000, "EUR")
    assert table.cost("m", Used(cost=1_500_000_000)).amount == 1.5
    assert prices().cost("m", Used()) is None
    assert prices().used("m", "low", usage()) == Used(1000, 600, 10, 0)


def test_costs_are_rounded_once_to_a_billionth():
    """A token of 0.0004 a million is 0.4 billionths; a half goes up."""
    table = prices(m={"prompt": 0.0004, "output": 0.0001})
    for tokens, nanos in ((1, 0), (2, 1), (3, 1), (1000, 400)):
        assert table.used("m", "", usage(tokens, 0, 0)).cost == nanos
    assert table.used("m", "", usage(1, 0, 1)).cost == 1


def test_a_price_finer_than_costs_are_kept_is_refused():
    with pytest.raises(ValidationError, match="at most 6 decimal places"):
        MeteringSettings(prices={"m": {"prompt": 0.0000001}})  # type: ignore[dict-item]
    with pytest.raises(ValidationError, match="tiers"):
        MeteringSettings(prices={"m": {"tiers": {"lo": {}}}})  # type: ignore[dict-item]


def asks(text: str = "", ids: int = 0, max_tokens: int = 0, choices: int = 0) -> Prompt:
    request = PromptRequest(text=text, choices=choices)
    if ids:
        request.token_ids.ids.extend(range(ids))
    request.sampling.max_tokens = max_tokens
    return Prompt(request)


def test_what_a_request_may_use_is_told_before_it_is_tokenized():
    assert expected([asks(ids=100, max_tokens=20, choices=3)], 512, 50) == (100, 60)
    assert expected([asks(ids=100), asks(ids=500)], 512, 50) == (600, 62)  # what the window leaves
    prompt, output = expected([asks("x" * 400, max_tokens=7)], 512, 50)
    assert (100 <= prompt <= 110, output) == (True, 7)
    assert expected([asks("x" * 9000, max_tokens=7)], 512, 50) == (512, 0)
    assert of_texts(["abcd", "é" * 4, ""]) == 3
