"""`penstock chat`: what is a command, and what is said to the model."""

import json
from typing import Any

import httpx
import pytest

from services.cli import client
from services.cli.commands import chat
from services.cli.main import main


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The contents of the messages of each chat request; every answer is "yes"."""
    requests: list[list[str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        requests.append([m["content"] for m in json.loads(request.content)["messages"]])
        chunk = {"choices": [{"delta": {"content": "yes"}}]}
        return httpx.Response(200, text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    def connect(_: Any) -> httpx.Client:
        return httpx.Client(base_url="http://penstock", transport=httpx.MockTransport(answer))

    monkeypatch.setattr(client, "connect", connect)
    return requests


def type_in(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    rest = iter(lines)

    def next_line(_: str) -> str:
        try:
            return next(rest)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", next_line)


def test_a_conversation_goes_on(asked, monkeypatch):
    type_in(monkeypatch, "hi", "", "and?")
    assert main(["chat", "--system", "Be brief."]) == 0
    assert asked == [["Be brief.", "hi"], ["Be brief.", "hi", "yes", "and?"]]


def test_commands_are_not_said_to_the_model(asked, monkeypatch, capsys):
    type_in(monkeypatch, "/help", "/helm now", "hi", "/quit", "never typed")
    assert main(["chat"]) == 0
    assert asked == [["hi"]]
    said = capsys.readouterr().out
    assert said.startswith(chat.COMMANDS)
    assert "no command /helm; /help shows" in said


def test_a_new_conversation_forgets_the_old_one(asked, monkeypatch):
    type_in(monkeypatch, "hi", "/new", "again")
    assert main(["chat", "--system", "Be brief."]) == 0
    assert asked == [["Be brief.", "hi"], ["Be brief.", "again"]]


def test_two_slashes_say_one(asked, monkeypatch):
    type_in(monkeypatch, "//etc is a folder")
    assert main(["chat"]) == 0
    assert asked == [["/etc is a folder"]]


def test_what_is_asked_for_is_in_the_request(monkeypatch):
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}, {"id": "large"}]})
        bodies.append(json.loads(request.content))
        return httpx.Response(200, text="data: [DONE]\n\n")

    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(
        client, "connect", lambda _: httpx.Client(base_url="http://p", transport=transport)
    )
    assert main(["chat", "hi"]) == 0
    options = ["--model", "large", "--max-tokens", "7", "--temperature", "0.5"]
    assert main(["chat", *options, "--store", "vs_1", "--store", "vs_2", "hi"]) == 0
    plain, full = bodies
    assert (plain["model"], plain["max_tokens"], plain["temperature"]) == ("tiny", 512, 0)
    assert plain["stream"]
    assert "tools" not in plain
    assert (full["model"], full["max_tokens"], full["temperature"]) == ("large", 7, 0.5)
    assert full["tools"] == [{"type": "file_search", "vector_store_ids": ["vs_1", "vs_2"]}]


def test_a_command_as_the_one_message(asked, capsys):
    assert main(["chat", "/help"]) == 0
    assert capsys.readouterr().out.strip() == chat.COMMANDS
    assert main(["chat", "/helm", "me"]) == 1
    assert "no command /helm" in capsys.readouterr().err
    assert main(["chat", "//x", "y"]) == 0
    assert asked == [["/x y"]]
