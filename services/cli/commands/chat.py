"""`penstock chat`: a conversation in the terminal."""

import argparse
import sys
from typing import Any

from services.cli import client
from services.cli.plain import plain

COMMANDS = """\
/help   this
/new    begin a new conversation
/quit   leave, as Ctrl-D does
A message that begins with a slash is sent with two: //etc is a folder, is it not?"""


def main(arguments: argparse.Namespace) -> int:
    asked_once = " ".join(arguments.message)
    if asked_once == "/help":
        print(COMMANDS)
        return 0
    with client.connect(arguments) as api:
        body: dict[str, Any] = {
            "model": arguments.model or client.checked(api.get("/v1/models"))["data"][0]["id"],
            "max_tokens": arguments.max_tokens,
            "temperature": arguments.temperature,
        }
        if arguments.store:
            body["tools"] = [{"type": "file_search", "vector_store_ids": arguments.store}]
        system = [{"role": "system", "content": arguments.system}] if arguments.system else []
        messages = list(system)
        for line in [asked_once] if asked_once else _typed():
            if line == "/quit":
                break
            if line == "/new":
                messages = list(system)
                continue
            if _is_command(line):
                if asked_once:
                    raise ValueError(_unknown(line))
                print(COMMANDS if line == "/help" else _unknown(line))
                continue
            question = line[1:] if line.startswith("//") else line
            messages.append({"role": "user", "content": question})
            answer = _answer(api, {**body, "messages": messages})
            messages.append({"role": "assistant", "content": answer})
    return 0


def _is_command(line: str) -> bool:
    return line.startswith("/") and not line.startswith("//")


def _unknown(line: str) -> str:
    return f"there is no command {line.split()[0]}; /help shows those there are"


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
            print(plain(text), end="", flush=True)
    print()
    return "".join(parts)
