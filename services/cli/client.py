"""How the commands reach a running Penstock."""

import argparse
import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from services.cli.interruptible import run
from services.cli.laptop_key import key_file
from services.cli.running import find_running
from services.common.config import Settings


def connect(arguments: argparse.Namespace) -> httpx.Client:
    """Raises RuntimeError when there is nothing to talk to."""
    settings = Settings()
    running = find_running(settings)
    url = arguments.url or (running.url if running else _registered(settings))
    if not url:
        raise RuntimeError("no Penstock runs here: start one with `penstock up`, or give --url")
    key = arguments.key or os.environ.get("PENSTOCK_API_KEY")
    if not key and (running or not arguments.url):
        key = running.key if running else _kept(settings)
    return open_client(url, key or "", arguments.ca)


def _registered(settings: Settings) -> str:
    """A gateway of the Penstock whose Redis is named, as `penstock up --address --detach` leaves
    one; empty where none is."""
    if "redis_url" not in settings.model_fields_set:
        return ""
    from services.cli.registry import looked

    serving = run(looked(settings)).serving
    return next((r.facts["url"] for r in serving if r.service == "gateway"), "")


def _kept(settings: Settings) -> str:
    """The local tenant's key, if this host has it."""
    file = key_file(settings)
    return file.read_text().strip() if file.exists() else ""


def trusting(ca: Path) -> ssl.SSLContext:
    """Raises RuntimeError that names `--ca` when the file has no certificates."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise RuntimeError(f"--ca: {ca}: {error.strerror or error}") from error


def open_client(url: str, key: str, ca: Path | None = None) -> httpx.Client:
    return httpx.Client(
        verify=True if ca is None else trusting(ca),
        base_url=url.removesuffix("/v1").rstrip("/"),
        headers={"Authorization": f"Bearer {key}"} if key else {},  # without: its own words for it
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
