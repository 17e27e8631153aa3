"""How the commands reach a running Penstock."""

import argparse
import json
import os
from collections.abc import Iterator
from typing import Any

import httpx

from services.cli.running import find_running
from services.common.config import Settings


def connect(arguments: argparse.Namespace) -> httpx.Client:
    """Raises RuntimeError when there is nothing to talk to."""
    running = find_running(Settings())
    url = arguments.url or (running.url if running else None)
    if url is None:
        raise RuntimeError("no Penstock runs here: start one with `penstock up`, or give --url")
    key = arguments.key or os.environ.get("PENSTOCK_API_KEY") or (running.key if running else "")
    return open_client(url, key)


def open_client(url: str, key: str) -> httpx.Client:
    return httpx.Client(
        base_url=url.removesuffix("/v1").rstrip("/"),
        headers={"Authorization": f"Bearer {key}"},
        timeout=httpx.Timeout(30.0, read=600.0),
    )


def checked(answer: httpx.Response) -> Any:
    """The JSON of a good answer. Raises RuntimeError with the server's own words otherwise."""
    if answer.is_success:
        return answer.json()
    try:
        error = answer.json()["error"]
        told = f"{error['message']} ({error.get('code') or error.get('type')})"
    except (ValueError, KeyError, TypeError):
        told = answer.text[:200]
    raise RuntimeError(f"{answer.request.url.path}: {answer.status_code}: {told}")


def stream_chat(client: httpx.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed chat completion. Raises RuntimeError on an error, also midway."""
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        if not answer.is_success:
            answer.read()
            checked(answer)
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if data == line or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            yield chunk
