"""Streamed completions that a test watches while it does something to the servers."""

import asyncio
import json
import time
from typing import Any

import httpx

from tests.support.inside import check


async def complete(api: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """The text of one completion, not streamed; fails the test on an error."""
    answer = await api.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


async def lasting(
    api: httpx.AsyncClient, body: dict[str, Any], seconds: float, at_least: int, at_most: int
) -> int:
    """Tokens of which an answer takes so long: what happens amid it finds it under way on a fast
    machine, too."""
    began = time.monotonic()
    await complete(api, {**body, "max_tokens": 500})
    return min(max(at_least, round(500 / (time.monotonic() - began) * seconds)), at_most)


class Stream:
    """One streamed completion, read in the background."""

    def __init__(self, api: httpx.AsyncClient, body: dict[str, Any]) -> None:
        self._api = api
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        self._texts: list[str] = []
        self._error: dict[str, Any] | None = None
        self._moved = asyncio.Condition()
        self._over = False
        self._last_s = 0.0
        self.longest_pause_s = 0.0  # between two chunks of text
        self.request_id = ""
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None
        self.plan: dict[str, Any] | None = None
        self._task = asyncio.create_task(self._read_to_its_end())

    @property
    def chunks(self) -> int:
        """How many with text have come so far."""
        return len(self._texts)

    @property
    def running(self) -> bool:
        """More may come."""
        return not self._task.done()

    @property
    def text(self) -> str:
        """What has come so far."""
        return "".join(self._texts)

    async def reached(self, chunks: int, timeout_s: float = 30.0) -> None:
        """Returns once so many chunks of text have come; fails if the stream ended before."""
        async with asyncio.timeout(timeout_s), self._moved:
            await self._moved.wait_for(lambda: len(self._texts) >= chunks or self._over)
        assert len(self._texts) >= chunks, f"ended after {len(self._texts)} chunks: {self._error}"

    async def finished(self, timeout_s: float = 60.0) -> str:
        """The whole text; fails the test if the stream ended with an error or was cut."""
        await asyncio.wait_for(asyncio.shield(self._task), timeout_s)
        assert self._error is None, self._error
        assert self.finish_reason is not None, "the stream was cut"
        return self.text

    async def error(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """The error that ended the stream; fails the test if there was none."""
        await asyncio.wait_for(asyncio.shield(self._task), timeout_s)
        assert self._error is not None, "the stream ended without an error"
        check(json.dumps(self._error))
        return self._error

    async def record(self) -> dict[str, Any]:
        """The request's record."""
        answer = await self._api.get(f"/v1/requests/{self.request_id}")
        assert answer.status_code == 200, answer.text
        check(answer.text)
        record: dict[str, Any] = answer.json()
        return record

    def disconnect(self) -> None:
        """Goes away as a client does."""
        self._task.cancel()

    async def _read_to_its_end(self) -> None:
        try:
            await self._read()
        finally:
            self._over = True
            async with self._moved:  # whoever waits for more hears that there is none
                self._moved.notify_all()

    async def _read(self) -> None:
        async with self._api.stream("POST", "/v1/completions", json=self._body) as answer:
            self.request_id = answer.headers["x-request-id"]
            if answer.status_code != 200:
                await answer.aread()
                self._error = answer.json()["error"]
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    await self._take(json.loads(line.removeprefix("data: ")))

    def _note_pause(self) -> None:
        now = time.monotonic()
        if self._last_s:
            self.longest_pause_s = max(self.longest_pause_s, now - self._last_s)
        self._last_s = now

    async def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self._error = chunk["error"]
        self.usage = chunk.get("usage") or self.usage
        self.plan = chunk.get("penstock", {}).get("plan") or self.plan
        for choice in chunk.get("choices", []):
            if choice["text"]:
                self._texts.append(choice["text"])
                self._note_pause()
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        async with self._moved:
            self._moved.notify_all()
