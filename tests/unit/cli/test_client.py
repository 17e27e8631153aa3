"""How the commands find a Penstock and a key, and what they make of its answers."""

import argparse
import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.cli import client
from services.cli.command_line import parser
from services.cli.running import Running, holding, state_file
from services.common.config import Settings
from services.common.discovery import Registration, Replica
from services.common.redis import connect
from tests.support.authority import Authority


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that runs with this data directory."""
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    state = Running("http://here:1", "here:2", "redis://r", "n", "laptop-key", os.getpid())
    with holding(Settings()):
        state_file(Settings()).write_text(json.dumps(asdict(state)))
        yield


def connected(url: str | None = None, key: str | None = None) -> tuple[str, str]:
    """The URL and the key of the client for these arguments."""
    with client.connect(argparse.Namespace(url=url, key=key, ca=None)) as api:
        return str(api.base_url).rstrip("/"), api.headers.get("Authorization", "")


@pytest.mark.usefixtures("running")
def test_what_is_given_comes_before_the_environment_and_that_before_what_runs_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    assert connected() == ("http://here:1", "Bearer laptop-key")
    assert connected("http://there:3") == ("http://there:3", "Bearer laptop-key")
    monkeypatch.setenv("PENSTOCK_API_KEY", "of the environment")
    assert connected() == ("http://here:1", "Bearer of the environment")
    assert connected("http://there:3", "given") == ("http://there:3", "Bearer given")


@pytest.mark.parametrize("url", ["http://there:3", "http://there:3/", "http://there:3/v1"])
def test_an_address_is_taken_as_people_write_it(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    assert connected(url, "k")[0] == "http://there:3"


def test_where_nothing_runs_an_address_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    with pytest.raises(RuntimeError, match="give --url"):
        connected()


def answering(status: int, content: Any) -> httpx.Client:
    text = content if isinstance(content, str) else json.dumps(content)
    transport = httpx.MockTransport(lambda _: httpx.Response(status, text=text))
    return httpx.Client(base_url="http://penstock", transport=transport)


@pytest.mark.parametrize(
    ("status", "content", "told"),
    [
        (
            401,
            {"error": {"message": "no key", "code": "invalid_api_key"}},
            "no key (invalid_api_key)",
        ),
        (429, {"error": {"message": "full", "code": None, "type": "limit"}}, "full (limit)"),
        (502, "<html>bad gateway", "<html>bad gateway"),
        (500, {"detail": "odd"}, '{"detail": "odd"}'),
        (500, ["odd"], '["odd"]'),
    ],
)
def test_a_failure_is_told_in_the_server_s_words(status: int, content: Any, told: str) -> None:
    with answering(status, content) as api:
        with pytest.raises(RuntimeError) as error:
            client.checked(api.get("/v1/models"))
        assert str(error.value) == f"/v1/models: {status}: {told}"
        with pytest.raises(RuntimeError) as error:
            list(client.stream_chat(api, {}))
        assert str(error.value) == f"/v1/chat/completions: {status}: {told}"


def test_a_stream_gives_its_chunks_and_raises_its_error_midway() -> None:
    chunks = [{"choices": [1]}, {"error": {"message": "the worker was lost"}}, {"choices": [2]}]
    lines = [": a comment", "event: x", *(f"data: {json.dumps(c)}" for c in chunks), "data: [DONE]"]
    with answering(200, "\n\n".join(lines)) as api:
        with pytest.raises(RuntimeError, match="the worker was lost"):
            list(client.stream_chat(api, {"model": "m"}))
        stream = client.stream_chat(api, {"model": "m"})
        assert next(stream) == chunks[0]
        stream.close()
    with answering(200, f"data: {json.dumps(chunks[0])}\n\ndata: [DONE]\n\n") as api:
        assert list(client.stream_chat(api, {})) == chunks[:1]


async def test_one_that_was_left_on_a_cluster_is_found_by_its_redis(
    redis_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setenv("PENSTOCK_NAMESPACE", namespace)
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    with pytest.raises(RuntimeError, match="give --url"):
        await asyncio.to_thread(connected)
    (tmp_path / "key").write_text("kept here\n")
    redis = connect(redis_url)
    facts = {"url": "http://10.0.0.2:8000", "grpc": "10.0.0.2:8001"}
    gateway = Replica("gateway", "gateway-1", "10.0.0.2:1", "h", 1, facts=facts)
    await Registration(redis, namespace, gateway, 60)._once()
    await redis.aclose()
    assert await asyncio.to_thread(connected) == ("http://10.0.0.2:8000", "Bearer kept here")
    assert await asyncio.to_thread(connected, "http://there:3") == ("http://there:3", "")


def test_a_door_with_a_certificate_of_ones_own_authority_is_trusted_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    folder = Authority().issue(tmp_path / "door", "door.example")
    asked = parser().parse_args(
        ["chat", "--url", "https://door.example", "--ca", str(folder / "ca.crt"), "hi"]
    )
    with client.connect(asked):
        assert client.trusting(folder / "ca.crt").get_ca_certs()
    for wrong in (tmp_path / "none", tmp_path / "door" / "tls.key"):
        asked.ca = wrong
        with pytest.raises(RuntimeError, match=f"--ca: {wrong}: "):
            client.connect(asked)
