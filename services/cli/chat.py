"""`penstock chat`: a conversation in the terminal."""

import argparse
import sys
from typing import Any

from services.cli import client


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("--model", help="default: the first that is served")
    parser.add_argument("--system", help="a system message")
    parser.add_argument(
        "--store",
        action="append",
        default=[],
        metavar="VECTOR_STORE_ID",
        help="answer from this vector store's files, may be repeated",
    )
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("message", nargs="*", help="ask this once and leave")


def main(arguments: argparse.Namespace) -> int:
    with client.connect(arguments) as api:
        body: dict[str, Any] = {
            "model": arguments.model or client.checked(api.get("/v1/models"))["data"][0]["id"],
            "max_tokens": arguments.max_tokens,
            "temperature": arguments.temperature,
        }
        if arguments.store:
            body["tools"] = [{"type": "file_search", "vector_store_ids": arguments.store}]
        messages = []
        if arguments.system:
            messages.append({"role": "system", "content": arguments.system})
        questions = [" ".join(arguments.message)] if arguments.message else _typed()
        for question in questions:
            messages.append({"role": "user", "content": question})
            answer = _answer(api, {**body, "messages": messages})
            messages.append({"role": "assistant", "content": answer})
    return 0


def _typed() -> Any:
    """What the user types, line by line, until Ctrl-D or an empty line on a terminal."""
    while True:
        try:
            line = input("you> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line:
            yield line


def _answer(api: Any, body: dict[str, Any]) -> str:
    parts = []
    for chunk in client.stream_chat(api, body):
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or ""
            parts.append(text)
            print(text, end="", flush=True)
    print()
    return "".join(parts)
