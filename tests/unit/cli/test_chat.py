"""`penstock chat`: what is a command, and what is said to the model."""

import json
from typing import Any

import httpx
import pytest

from services.cli import chat, client
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


def test_a_command_as_the_one_message(asked, capsys):
    assert main(["chat", "/help"]) == 0
    assert capsys.readouterr().out.strip() == chat.COMMANDS
    assert main(["chat", "/helm", "me"]) == 1
    assert "no command /helm" in capsys.readouterr().err
    assert main(["chat", "//x", "y"]) == 0
    assert asked == [["/x y"]]
