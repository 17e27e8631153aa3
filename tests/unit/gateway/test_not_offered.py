"""All that OpenAI's and Anthropic's clients can call is served, or refused by its name."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from services.gateway.api.rest.not_offered import NOT_OFFERED
from services.gateway.api.rest.routes import application
from tests.support.described import operation_of
from tests.support.gateway_parts import gateway_parts
from tests.support.surfaces import surface

DOCS = Path(__file__).parents[3] / "docs" / "api.md"


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    with gateway_parts() as parts:
        transport = httpx.ASGITransport(application(parts))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            yield client


@pytest.mark.parametrize(("package", "base"), [(openai, "/v1"), (anthropic, "")])
async def test_each_call_of_a_client_is_served_or_refused_by_its_name(
    http: httpx.AsyncClient, package: Any, base: str
) -> None:
    told = {}
    for call in surface(package):
        path = base + call.path
        if operation_of(call.method, path) is None:
            answer = await http.request(call.method, path)
            error = answer.json()["error"]
            assert call.method in error["message"]
            told[call.method, path] = answer.status_code, error.get("code")
    assert len(told) > 200, "the client's sources were not understood"
    others = {call: answer for call, answer in told.items() if answer[0] != 404}
    # One that has files and models in other ways than ours, which its client does not know.
    assert others.items() <= {("DELETE", "/v1/models/x"): (405, "method_not_allowed")}.items()
    if package is openai:
        assert {code for _, code in told.values()} == {"not_offered", "method_not_allowed"}


@pytest.mark.parametrize("path", NOT_OFFERED)
async def test_what_is_not_offered_is_named_and_listed(http: httpx.AsyncClient, path: str) -> None:
    for below in (path, f"{path}/x"):
        answer = await http.post(below, json={})
        error = answer.json()["error"]
        assert answer.status_code == 404, below
        assert f"Not offered here: {NOT_OFFERED[path].what} (POST {below})" in error["message"]
        assert error.get("code") in ("not_offered", None)  # Anthropic's errors have a type alone
    assert f"`{path}`" in DOCS.read_text()


async def test_a_socket_that_is_asked_for_is_refused_as_well(http: httpx.AsyncClient) -> None:
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    answer = await http.get("/v1/realtime", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_offered")
