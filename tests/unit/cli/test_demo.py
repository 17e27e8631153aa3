"""`penstock demo`, with a stack that is not there and an API that answers as a gateway does."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from services.cli import client
from services.cli.commands import demo
from services.cli.main import main

RECORD = {
    "spans": [
        {
            "service": "router",
            "name": "place",
            "id": "a",
            "parent": None,
            "start_ms": 0.0,
            "duration_ms": 1.5,
            "attributes": {"mode": "split"},
        }
    ],
    "decisions": [],
}


def part(text: str, *cited: str) -> dict[str, Any]:
    delta = {"content": text, "annotations": [{"filename": name} for name in cited]}
    return {"choices": [{"delta": delta}], "penstock": {"request_id": "req_7"}}


ANSWER = [
    part("It is "),
    part("a pipe.", "b.txt"),
    part("", "a.md", "b.txt"),
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 321,
            "completion_tokens": 45,
            "prompt_tokens_details": {"cached_tokens": 64},
        },
    },
    {"choices": [{"delta": {}}], "penstock": {"took": 3}},
]


def uploaded(request: httpx.Request) -> dict[str, Any]:
    """The parts of a form by their files' names; the one without is the purpose."""
    head = f"Content-Type: {request.headers['content-type']}\n\n".encode()
    form = message_from_bytes(head + request.content).walk()
    parts = [part for part in form if not part.is_multipart()]
    return {part.get_filename() or "purpose": part.get_payload(decode=True) for part in parts}


@dataclass
class Api:
    """A gateway's answers; what was asked is kept."""

    answer: list[dict[str, Any]] = field(default_factory=lambda: list(ANSWER))
    ends: str = "completed"  # each file, once it was looked at twice
    asked: list[tuple[str, Any]] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    looks: dict[str, int] = field(default_factory=dict)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["Authorization"] == "Bearer the-key"
        path = request.url.path
        if path == "/v1/files":
            id = f"file_{len(self.files)}"
            self.files[id] = uploaded(request)
            return httpx.Response(200, json={"id": id})
        if path.startswith("/v1/vector_stores/vs_1/files"):
            return self.attached(path, request)
        if path == "/v1/chat/completions":
            self.asked.append((path, json.loads(request.content)))
            lines = "\n\n".join(f"data: {json.dumps(chunk)}" for chunk in self.answer)
            return httpx.Response(200, text=lines + "\n\ndata: [DONE]\n\n")
        found: dict[str, Any] = {
            "/v1/vector_stores": {"id": "vs_1"},
            "/v1/models": {"data": [{"id": "first"}, {"id": "second"}]},
            "/v1/requests/req_7": RECORD,
        }
        return httpx.Response(200, json=found[path]) if path in found else httpx.Response(404)

    def attached(self, path: str, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            id = json.loads(request.content)["file_id"]
        else:
            id = path.rpartition("/")[2]
        assert id in self.files
        self.looks[id] = self.looks.get(id, -1) + 1
        over = self.looks[id] >= 2
        why = None if self.ends == "completed" else {"message": "not text"}
        status = self.ends if over else "in_progress"
        return httpx.Response(200, json={"status": status, "last_error": why})


@dataclass
class Rig:
    api: Api
    stack: list[str]  # what was done with it
    run: Callable[..., int]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A demo over two documents, of which nothing starts and nothing waits."""
    api, stack = Api(), list[str]()
    folder = tmp_path / "documents"
    folder.mkdir()
    for name, text in (("b.txt", "A penstock."), ("a.md", "# Water"), ("c.png", "no document")):
        (folder / name).write_text(text)
    questions = ('{"question": "What is it?"}', '{"question": "And then?"}')
    (tmp_path / "questions.jsonl").write_text("\n".join(questions))

    @contextmanager
    def started(_arguments: Any, port: int) -> Iterator[Any]:
        stack.append(f"up at {port}")
        try:
            yield SimpleNamespace(url="http://here:1", key="the-key")
        finally:
            stack.append("down")

    real = client.open_client

    def open_client(url: str, key: str) -> httpx.Client:
        assert url == "http://here:1"
        headers = real(url, key).headers
        return httpx.Client(base_url=url, headers=headers, transport=httpx.MockTransport(api))

    monkeypatch.setattr(demo, "local_stack", started)
    monkeypatch.setattr(demo, "supervised", lambda: stack.append("supervised"))
    monkeypatch.setattr(client, "open_client", open_client)
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: None)
    monkeypatch.setattr(demo, "time", clock)
    return Rig(api, stack, lambda *more: main(["demo", "--documents", str(folder), *more]))


def test_a_question_is_answered_from_the_documents_and_its_way_is_shown(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rig.run() == 0
    assert rig.stack == ["supervised", "up at 0", "down"], "on a free port"
    assert list(rig.api.files.values()) == [
        {"a.md": b"# Water", "purpose": b"assistants"},
        {"b.txt": b"A penstock.", "purpose": b"assistants"},
    ]
    assert set(rig.api.looks.values()) == {2}, "each until it is indexed"
    ((_, body),) = rig.api.asked
    assert body["model"] == "first"
    assert body["messages"] == [{"role": "user", "content": "What is it?"}]
    assert body["tools"] == [{"type": "file_search", "vector_store_ids": ["vs_1"]}]
    assert (body["temperature"], body["stream"]) == (0, True)
    assert body["stream_options"] == {"include_usage": True}
    said, progress = capsys.readouterr()
    assert "It is a pipe.\n" in said
    assert (said.count("a.md"), said.count("b.txt")) == (1, 1), "each file is cited once"
    assert "321 prompt tokens (64 cached), 45 completion tokens" in said
    assert "place (split)" in said, "the record of this request"
    assert "indexed 2 documents" in progress


def test_the_question_that_is_given_is_asked(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").unlink()
    assert rig.run("--question", "Why?") == 0
    assert rig.api.asked[0][1]["messages"][0]["content"] == "Why?"


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        (["questions.jsonl"], "--question is needed"),
        (["documents/a.md", "documents/b.txt"], "--documents: no document"),
    ],
)
def test_what_is_missing_is_told_before_anything_starts(
    gone: list[str], said: str, rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in gone:
        (tmp_path / name).unlink()
    assert rig.run() == 1
    assert said in capsys.readouterr().err
    assert not rig.stack


@pytest.mark.parametrize(
    ("change", "said", "asked"),
    [
        ({"ends": "failed"}, "a.md was not indexed: {'message': 'not text'}", 0),
        ({"answer": [part(" \n", "a.md"), *ANSWER[3:]]}, "the answer is empty", 1),
    ],
)
def test_a_demo_that_shows_nothing_fails(
    change: dict[str, Any],
    said: str,
    asked: int,
    rig: Rig,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in change.items():
        setattr(rig.api, name, value)
    assert rig.run() == 1
    assert said in capsys.readouterr().err
    assert len(rig.api.asked) == asked
    assert rig.stack[-1] == "down"
