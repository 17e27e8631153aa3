"""`penstock bench serve` against a scripted server: what it sends, measures, counts and refuses."""

import argparse
import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from bench import serve

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def event(text: str = "", finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], "usage": None}).encode() + b"\n\n"


def chat_event(text: str | None = None, finish: str | None = None) -> bytes:
    delta = {"role": "assistant"} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


END = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\ndata: [DONE]\n\n"
WHOLE = event("one ") + event("two") + event("", "stop") + END
PIECE_S = 0.05

# By prompt: the blocks that the server sends, PIECE_S apart.
STREAMS: dict[str, list[bytes]] = {
    "plain": [event("one "), event("two "), event("three", "length"), END],
    "cut anywhere": [bytes([b]) for b in (": hello\n\n" + "").encode()]
    + [(event("naïve ") + event("港")).replace(b"\n", b"\r\n")[i : i + 7] for i in range(0, 400, 7)]
    + [event("", "stop") + END],
    "empty": [event("", "stop") + END],
    "error inside": [event("one "), b'data: {"error": {"message": "the worker is lost"}}\n\n'],
    "no end": [event("one ") + event("", "stop")],
    "no usage": [event("one ") + event("", "stop") + b"data: [DONE]\n\n"],
    "no finish": [event("one ") + END],
    "odd": [b'data: {"choices": [17]}\n\n'],
    "no json": [b"data: {oh\n\n"],
}


class Server:
    """An HTTP server in a thread of its own; `seen` holds what it was asked, in order."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.running = self.most_running = 0
        self._port: Future[int] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> "Server":
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._port.result(10)}"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self._port.set_result(server.sockets[0].getsockname()[1])
        await self._stop.wait()
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        start, *lines = head.split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines if line)}
        body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or "{}")
        path = start.split()[1]
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if path == "/v1/models":
            self._send(writer, 200, json.dumps({"data": [{"id": "small"}]}).encode())
        else:
            at = time.perf_counter()
            self.seen.append({"path": path, "headers": headers, "body": body, "at": at})
            await self._stream(writer, body)
        self.running -= 1
        writer.close()

    def _send(self, writer: asyncio.StreamWriter, status: int, content: bytes) -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + content)

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        wanted = body.get("prompt")
        if wanted == "refused":
            error = {"error": {"message": "temperature must be at most 2", "param": "temperature"}}
            return self._send(writer, 400, json.dumps(error).encode())
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        if wanted == "hang":
            await self._stop.wait()
        blocks = STREAMS.get(str(wanted), [WHOLE])
        if "messages" in body:
            blocks = [chat_event() + chat_event("one "), chat_event("two"), chat_event("", "stop")]
            blocks.append(END)
        for block in blocks:
            if block:
                writer.write(f"{len(block):x}\r\n".encode() + block + b"\r\n")
                await asyncio.sleep(PIECE_S if len(block) > 20 else 0)
        if wanted != "dropped":
            writer.write(b"0\r\n\r\n")


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


def run(server: Server, folder: Path, workload: list[dict[str, Any]], *extra: str) -> Any:
    """(exit code, report or None)"""
    source, out = folder / "w.jsonl", folder / "out.json"
    lines = [
        json.dumps(
            {"id": f"r{i}", "max_tokens": 8, "temperature": 0, "ignore_eos": False}
            | {"arrival_s": 0}
            | request
        )
        for i, request in enumerate(workload)
    ]
    source.write_text("".join(line + "\n" for line in lines))
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    given = ["--url", server.url, "--workload", str(source), "--json", str(out), *extra]
    code = serve.main(parser.parse_args(given))
    return code, json.loads(out.read_text()) if out.exists() else None


def test_a_stream_is_measured_piece_by_piece(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = run(server, tmp_path, [{"prompt": "plain"}])
    assert code == 0
    (request,) = report["requests"]
    assert request["text"] == "one two three"
    assert request["finish_reason"] == "length"
    assert (request["prompt_tokens"], request["cached_tokens"]) == (7, 4)
    assert request["completion_tokens"] == 3
    assert len(request["itl_s"]) == 2
    assert request["e2e_s"] > 1.9 * PIECE_S
    assert request["e2e_s"] == pytest.approx(request["ttft_s"] + sum(request["itl_s"]))
    assert request["tpot_s"] == pytest.approx(sum(request["itl_s"]) / 2)
    assert report["totals"]["output_tokens"] == 3
    assert report["totals"]["output_tok_per_s"] == pytest.approx(3 / request["e2e_s"], rel=0.05)
    said = capsys.readouterr()
    assert "1/1 done, 0 running, 0 failed, 3 tokens" in said.err
    assert "ttft" in said.out


def test_each_kind_of_prompt_goes_where_it_belongs_with_all_its_parameters(
    server: Server, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": "Hello?"}]
    workload = [
        {"prompt": "plain", "seed": 11, "temperature": 0.5},
        {"prompt_token_ids": [5, 6, 7], "ignore_eos": True, "max_tokens": 2},
        {"messages": messages},
    ]
    code, report = run(server, tmp_path, workload, "--key", "secret", "--concurrency", "1")
    assert code == 0
    text, ids, chat = server.seen
    common = {"model": "small", "stream": True, "stream_options": {"include_usage": True}}
    assert text["path"] == ids["path"] == "/v1/completions"
    assert text["body"] == common | {
        "prompt": "plain",
        "seed": 11,
        "temperature": 0.5,
        "max_tokens": 8,
    }
    assert ids["body"] == common | {
        "prompt": [5, 6, 7],
        "ignore_eos": True,
        "temperature": 0,
        "max_tokens": 2,
    }
    assert chat["path"] == "/v1/chat/completions"
    assert chat["body"] == common | {"messages": messages, "temperature": 0, "max_tokens": 8}
    assert all(seen["headers"]["authorization"] == "Bearer secret" for seen in server.seen)
    assert report["requests"][2]["text"] == "one two"
    assert "secret" not in json.dumps(report)


def test_text_survives_any_cut_of_the_bytes(server: Server, tmp_path: Path) -> None:
    code, report = run(server, tmp_path, [{"prompt": "cut anywhere"}])
    assert code == 0
    assert report["requests"][0]["text"] == "naïve 港"


def test_a_stream_without_text_has_no_first_token_time(server: Server, tmp_path: Path) -> None:
    code, report = run(server, tmp_path, [{"prompt": "empty"}], "--slo-ttft-ms", "1e6")
    assert code == 0
    assert report["requests"][0]["ttft_s"] is None
    assert report["totals"]["ttft_s"] is None
    assert report["totals"]["goodput_share"] == 0


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("refused", "HTTP 400: temperature must be at most 2"),
        ("error inside", "the worker is lost"),
        ("no end", "without [DONE]"),
        ("no usage", "without usage"),
        ("no finish", "without a finish reason"),
        ("dropped", "not completed"),
        ("odd", "shape"),
        ("no json", "not JSON"),
        ("hang", "not finished within 2 s"),
    ],
)
def test_a_failure_is_counted_shown_and_sets_the_exit_code(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], prompt: str, says: str
) -> None:
    workload = [{"prompt": "plain"}, {"prompt": prompt}]
    STREAMS["dropped"] = [event("one ")]
    code, report = run(server, tmp_path, workload, "--timeout-s", "2" if prompt == "hang" else "60")
    assert code == 1
    good, bad = report["requests"]
    assert good["error"] is None
    assert says in bad["error"]
    assert report["totals"]["failed"] == 1
    assert report["totals"]["output_tokens"] == 3
    assert f"failed 1×: {bad['error']}" in capsys.readouterr().out


def test_requests_go_out_when_they_should(server: Server, tmp_path: Path) -> None:
    workload = [{"prompt": "plain", "arrival_s": at} for at in (0.4, 0.0, 0.2)]
    code, report = run(server, tmp_path, workload)
    assert code == 0
    started = [request["started_s"] for request in report["requests"]]
    assert all(at <= s < at + 2 for at, s in zip([0.0, 0.2, 0.4], started, strict=True))
    sent = [seen["at"] - server.seen[0]["at"] for seen in server.seen]
    assert sent == pytest.approx([s - started[0] for s in started], abs=0.5)
    assert [request["id"] for request in report["requests"]] == ["r1", "r2", "r0"]


def test_concurrency_bounds_what_is_in_flight_and_the_delay_is_told(
    server: Server, tmp_path: Path
) -> None:
    code, report = run(server, tmp_path, [{"prompt": "plain"}] * 6, "--concurrency", "2")
    assert code == 0
    assert server.most_running == 2
    assert report["totals"]["send_delay_s"]["max"] > 2 * 3 * PIECE_S
    latencies = [request["e2e_s"] for request in report["requests"]]
    assert max(latencies) < report["totals"]["send_delay_s"]["max"]  # these exclude the wait


def test_goodput_counts_requests_within_all_objectives(server: Server, tmp_path: Path) -> None:
    workload = [{"prompt": "plain"}, {"prompt": "refused"}]
    loose = ["--slo-ttft-ms", "5000", "--slo-tpot-ms", "5000", "--slo-e2e-ms", "5000"]
    _, report = run(server, tmp_path, workload, *loose)
    assert report["totals"]["goodput_share"] == 0.5
    _, report = run(server, tmp_path, workload, *loose, "--slo-tpot-ms", "1")
    assert report["totals"]["goodput_share"] == 0
    assert report["totals"]["slo"] == {"ttft_ms": 5000, "tpot_ms": 1, "e2e_ms": 5000}


def test_nothing_to_talk_to_is_said_at_once(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = run(server, tmp_path, [])
    assert (code, report) == (2, None)
    assert "holds no requests" in capsys.readouterr().err
    code, report = run(server, tmp_path, [{"prompt": "plain"}], "--url", "http://127.0.0.1:1")
    assert (code, report) == (2, None)
    assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--concurrency", "--timeout-s", "--slo-ttft-ms"])
@pytest.mark.parametrize("value", ["0", "-1", "many", "nan"])
def test_odd_numbers_are_refused(server: Server, tmp_path: Path, flag: str, value: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run(server, tmp_path, [{"prompt": "plain"}], flag, value)
    assert ended.value.code == 2
