"""Chats by plain HTTP, and how a tokenizer fails them."""

import asyncio
from typing import Any

import httpx

from services.common.errors import PenstockError
from services.common.link import LinkCall
from tests.support.gateway_rig import (
    MODEL,
    Rig,
    plan,
    send,
)

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def ask(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, **more}


def raising(error: PenstockError, after: tuple[str, ...] = ()):
    async def script(call: LinkCall, request: Any) -> None:
        for word in after:
            send(call, word, plan=plan(request))
        await asyncio.sleep(0.05 if after else 0)
        raise error

    return script


async def silent(call: LinkCall, request: Any) -> None:
    await asyncio.Event().wait()


def events(body: str) -> list[str]:
    blocks = body.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


async def store_of(rig: Rig, http: httpx.AsyncClient) -> str:
    return str((await http.post("/v1/vector_stores", json={"name": "s"})).json()["id"])
