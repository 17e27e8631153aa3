"""`penstock index`: a folder's files into a vector store, once or as they change."""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from services.cli import client
from services.cli.indexing.folder import Found, look
from services.cli.indexing.remote_store import RemoteStore
from services.cli.indexing.taking import Report, Taken, Taking
from services.cli.plain import plain

_LOOK_EVERY_S = 1.0
_LOOKING_SHARE = 0.1  # of the time, at most
_AGAIN_S = 5.0  # after a server that was away


def main(arguments: argparse.Namespace) -> int:
    folder = arguments.folder.resolve()
    with client.connect(arguments) as api:
        store, made = RemoteStore.called(api, arguments.store, str(folder), arguments.embedder)
        _tell(f"· {'made' if made else 'into'} vector store {arguments.store} ({store.id})")
        found = look(folder)
        with _progress(len(found.files)) as report:
            taken = Taking(store, folder, arguments.prune, report).round(found)
        _conclude(store, found, taken, arguments.json)
        if not arguments.watch:
            return 1 if taken.failed else 0
        _tell(f"· watching {folder}; Ctrl-C ends it")
        _watch(Taking(store, folder, arguments.prune, _line), store, folder, found, arguments.json)
    return 0


def _watch(taking: Taking, store: RemoteStore, folder: Path, found: Found, as_json: bool) -> None:
    """Looks at files' marks again and again: so do changes count on a folder of another machine."""
    before: Found | None = found
    while True:
        try:
            before = found = _changed(folder, before)
            taken = taking.round(found)
        except (httpx.TransportError, OSError) as error:
            _tell(f"· {error}; tried again in {_AGAIN_S:.0f} s")
            before = None
            time.sleep(_AGAIN_S)
        else:
            if taken.did_something:
                _conclude(store, found, taken, as_json)


def _changed(folder: Path, before: Found | None) -> Found:
    """What is there once it is not what was there before."""
    while True:
        began = time.monotonic()
        now = look(folder)
        if now != before:
            return now
        time.sleep(max(_LOOK_EVERY_S, (time.monotonic() - began) / _LOOKING_SHARE))


@contextmanager
def _progress(files: int) -> Iterator[Report]:
    """A bar on a terminal; elsewhere a line for each file that was not as it is."""
    if not sys.stderr.isatty():
        yield _line
        return
    columns = (
        TextColumn("indexing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[path]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=files, path="")

        def report(what: str, path: str, why: str) -> None:
            bar.update(task, advance=what != "removed", path=plain(path))
            if what == "failed":
                bar.console.print(f"failed {plain(path)}: {plain(why)}", markup=False)

        yield report


def _line(what: str, path: str, why: str) -> None:
    if what != "unchanged":
        _tell(f"· {what} {path}" + (f": {why}" if why else ""))


def _conclude(store: RemoteStore, found: Found, taken: Taken, as_json: bool) -> None:
    if as_json:
        told = {"store": store.id, **asdict(taken), "skipped": found.skipped}
        print(json.dumps(told, ensure_ascii=False), flush=True)
        return
    counts = {name: len(paths) for name, paths in asdict(taken).items()}
    gone = counts.pop("gone")
    print(", ".join(f"{count} {name}" for name, count in counts.items()), flush=True)
    if gone:
        print(f"{gone} left the folder and stay in the store; --prune removes them")
    for why, count in Counter(found.skipped.values()).most_common():
        first = next(plain(path) for path, its in found.skipped.items() if its == why)
        print(f"not taken: {count} ({why}), such as {first}", flush=True)


def _tell(line: str) -> None:
    print(plain(line), file=sys.stderr, flush=True)
