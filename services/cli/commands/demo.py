"""`penstock demo`: one question from the shipped documents, and its whole way shown."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import httpx

from services.cli import client
from services.cli.commands.up import local_stack, report, supervised
from services.cli.commands.waterfall import print_record
from services.cli.console import console
from services.cli.plain import plain
from services.retrieval.documents.kinds import SUFFIXES

_QUESTIONS = "questions.jsonl"


def main(arguments: argparse.Namespace) -> int:
    documents = sorted(p for p in arguments.documents.glob("*") if _is_document(p))
    if not documents:
        raise ValueError(f"--documents: no document in {arguments.documents}")
    question = arguments.question or _first_question(arguments.documents)
    supervised()
    began = time.monotonic()
    with local_stack(arguments, port=0) as running:
        report(f"up after {time.monotonic() - began:.1f} s")
        with client.open_client(running.url, running.key) as api:
            _ask(api, _index(api, documents), question)
    report(f"stopped; {time.monotonic() - began:.1f} s in all")
    return 0


def _is_document(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def _first_question(folder: Path) -> str:
    path = folder.parent / _QUESTIONS
    if not path.exists():
        raise ValueError(f"--question is needed: there is no {path}")
    with path.open(encoding="utf-8") as lines:
        question: str = json.loads(next(lines))["question"]
    return question


def _index(api: httpx.Client, documents: list[Path]) -> str:
    """A new vector store with the documents; returns its id."""
    store = client.checked(api.post("/v1/vector_stores", json={"name": "demo"}))["id"]
    for path in documents:
        upload = {"file": (path.name, path.read_bytes(), "text/plain")}
        file = client.checked(api.post("/v1/files", files=upload, data={"purpose": "assistants"}))
        attached = client.checked(
            api.post(f"/v1/vector_stores/{store}/files", json={"file_id": file["id"]})
        )
        while attached["status"] == "in_progress":
            time.sleep(0.1)
            attached = client.checked(api.get(f"/v1/vector_stores/{store}/files/{file['id']}"))
        if attached["status"] != "completed":
            raise RuntimeError(f"{path.name} was not indexed: {attached['last_error']}")
    report(f"indexed {len(documents)} documents from {documents[0].parent}/")
    return str(store)


def _ask(api: httpx.Client, store: str, question: str) -> None:
    out = console()
    out.print(f"\n[bold]Question[/]  {question}")
    out.print("[bold]Answer[/]    ", end="")
    body: dict[str, Any] = {
        "model": client.checked(api.get("/v1/models"))["data"][0]["id"],
        "messages": [{"role": "user", "content": question}],
        "tools": [{"type": "file_search", "vector_store_ids": [store]}],
        "temperature": 0,
        "max_tokens": 128,
        "stream_options": {"include_usage": True},
    }
    seen: dict[str, Any] = {}
    answer: list[str] = []
    cited: list[dict[str, Any]] = []
    for chunk in client.stream_chat(api, body):
        seen.update(chunk.get("penstock") or {})
        seen.update(usage=chunk["usage"] if chunk.get("usage") else seen.get("usage"))
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or ""
            answer.append(text)
            print(plain(text), end="", flush=True)
            cited += choice["delta"].get("annotations") or []
    print()
    if not "".join(answer).strip():
        raise RuntimeError("the answer is empty")
    for citation in {c["filename"]: c for c in cited}.values():
        out.print(f"[bold]Cites[/]     {citation['filename']}")
    out.print(f"[bold]Usage[/]     {_usage(seen['usage'])}\n")
    record = client.checked(api.get(f"/v1/requests/{seen['request_id']}"))
    print_record(out, record)


def _usage(usage: dict[str, Any]) -> str:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return (
        f"{usage['prompt_tokens']} prompt tokens ({cached} cached), "
        f"{usage['completion_tokens']} completion tokens"
    )
