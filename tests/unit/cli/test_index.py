"""`penstock index`: what of a folder goes into a store, what stays, what leaves."""

import json
import re
import time
from email.parser import BytesParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from services.cli import client
from services.cli.commands import index
from services.cli.indexing import remote_store
from services.cli.main import main


class Server:
    """The public API's files and vector stores, as far as the command asks for them."""

    def __init__(self) -> None:
        self.stores: dict[str, str] = {}  # names by id
        self.made: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.attached: dict[str, dict[str, Any]] = {}  # of all stores, by file id
        self.unreadable: set[bytes] = set()  # contents that fail to be indexed
        self.refused: set[bytes] = set()  # contents that are not taken
        self.taken_away: set[bytes] = set()  # contents that others delete as they are indexed
        self.busy = 0  # answers to come that there is no room
        self.calls: list[str] = []
        self.per_page = 2
        self._ids = 0

    def connect(self, _: Any) -> httpx.Client:
        return httpx.Client(base_url="http://penstock", transport=httpx.MockTransport(self.answer))

    def answer(self, request: httpx.Request) -> httpx.Response:
        method, path = request.method, request.url.path
        self.calls.append(f"{method} {path}")
        if self.busy and method == "POST":
            self.busy -= 1
            return self._error(429, "too many of your files wait", {"retry-after": "0"})
        parts = path.removeprefix("/v1/").split("/")
        if parts == ["vector_stores"]:
            return self._stores(request)
        if parts == ["files"]:
            return self._upload(request)
        if parts[0] == "files":
            known = self.files.pop(parts[1], None)
            self.attached.pop(parts[1], None)
            return httpx.Response(200, json={}) if known else self._error(404, "no such file")
        if len(parts) == 3:
            return self._attach(request, parts[1]) if method == "POST" else self._list(request)
        if self.files.get(parts[3]) in self.taken_away:
            del self.files[parts[3]], self.attached[parts[3]]
        if parts[3] not in self.attached:
            return self._error(404, "no such file")
        self._settle(parts[3])
        return httpx.Response(200, json=self.attached[parts[3]])

    def holds(self) -> dict[str, bytes]:
        """What searches find, by path."""
        found = {}
        for id, told in self.attached.items():
            if told["status"] == "completed":
                assert told["attributes"]["path"] not in found
                found[told["attributes"]["path"]] = self.files[id]
        return found

    def _stores(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            id = self._id("vs")
            self.made.append(json.loads(request.content))
            self.stores[id] = self.made[-1]["name"]
            return httpx.Response(200, json={"id": id})
        told = [{"id": i, "name": n, "embedding_model": "m"} for i, n in self.stores.items()]
        return self._page(told, request)

    def _upload(self, request: httpx.Request) -> httpx.Response:
        head = f"content-type: {request.headers['content-type']}\r\n\r\n".encode()
        (file,) = (
            part
            for part in BytesParser().parsebytes(head + request.content).get_payload()
            if part.get_filename()
        )
        content = file.get_payload(decode=True)
        if content in self.refused:
            return self._error(400, "it is not text")
        id = self._id("file")
        self.files[id] = content
        return httpx.Response(200, json={"id": id})

    def _attach(self, request: httpx.Request, store: str) -> httpx.Response:
        body = json.loads(request.content)
        told = {"id": body["file_id"], "store": store, "status": "in_progress", "last_error": None}
        self.attached[body["file_id"]] = told | {"attributes": body["attributes"]}
        return httpx.Response(200, json=told)

    def _list(self, request: httpx.Request) -> httpx.Response:
        return self._page(list(reversed(self.attached.values())), request)

    def _page(self, items: list[dict[str, Any]], request: httpx.Request) -> httpx.Response:
        ids, after = [one["id"] for one in items], request.url.params.get("after")
        rest = items[ids.index(after) + 1 :] if after else items
        shown = rest[: self.per_page]
        last = shown[-1]["id"] if shown else None
        more = len(rest) > len(shown)
        return httpx.Response(200, json={"data": shown, "has_more": more, "last_id": last})

    def _settle(self, id: str) -> None:
        told = self.attached[id]
        if self.files[id] in self.unreadable:
            told |= {"status": "failed", "last_error": {"message": "it is encrypted"}}
        else:
            told["status"] = "completed"

    def _id(self, kind: str) -> str:
        self._ids += 1
        return f"{kind}_{self._ids}"

    def _error(self, status: int, words: str, headers: Any = None) -> httpx.Response:
        error = {"message": words, "code": "c"}
        return httpx.Response(status, json={"error": error}, headers=headers)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(client, "connect", server.connect)
    return server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    write(folder, "a.md", "alpha")
    write(folder, "deep/er/b.txt", "beta")
    write(folder, "c.md", "gamma")
    return folder


def write(folder: Path, path: str, text: str) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)


def run(folder: Path, *options: str) -> int:
    return main(["index", str(folder), "--store", "guides", *options])


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])  # type: ignore[no-any-return]


WHOLE = {"a.md": b"alpha", "deep/er/b.txt": b"beta", "c.md": b"gamma"}


def test_a_folder_goes_into_a_new_store(server, folder, capsys):
    assert run(folder) == 0
    assert list(server.stores.values()) == ["guides"]
    assert server.holds() == WHOLE
    said = capsys.readouterr()
    assert "3 added, 0 changed, 0 unchanged, 0 removed, 0 failed" in said.out
    assert re.search(r"· made vector store guides \(vs_1\)\n", said.err)
    assert "· added deep/er/b.txt\n" in said.err


def test_what_is_there_is_not_sent_again(server, folder, capsys):
    run(folder)
    server.calls.clear()
    assert run(folder, "--json") == 0
    assert not [call for call in server.calls if not call.startswith("GET")]
    assert told(capsys)["unchanged"] == ["a.md", "c.md", "deep/er/b.txt"]
    assert len(server.stores) == 1


def test_a_change_of_the_same_size_is_seen(server, folder, capsys):
    run(folder)
    write(folder, "a.md", "ALPHA")
    assert run(folder, "--json") == 0
    assert server.holds() == WHOLE | {"a.md": b"ALPHA"}
    assert len(server.files) == 3
    said = told(capsys)
    assert (said["changed"], said["added"]) == (["a.md"], [])


def test_the_earlier_version_stays_until_the_new_one_is_found(server, folder):
    run(folder)
    write(folder, "a.md", "new")
    server.calls.clear()
    run(folder)
    looked = max(n for n, c in enumerate(server.calls) if re.match(r"GET .*/files/file", c))
    dropped = next(n for n, c in enumerate(server.calls) if c.startswith("DELETE"))
    assert looked < dropped


def test_a_new_version_that_fails_leaves_the_earlier_one(server, folder, capsys):
    run(folder)
    write(folder, "a.md", "locked")
    server.unreadable.add(b"locked")
    assert run(folder, "--json") == 1
    assert told(capsys)["failed"] == {"a.md": "it is encrypted"}
    assert server.holds() == WHOLE
    assert len(server.files) == 3  # nothing of the failed one is left


def test_a_file_that_is_refused_keeps_no_other_back(server, folder, capsys):
    server.refused.add(b"alpha")
    assert run(folder) == 1
    assert sorted(server.holds()) == ["c.md", "deep/er/b.txt"]
    assert "· failed a.md: /v1/files: 400: it is not text (c)\n" in capsys.readouterr().err


def test_a_file_that_others_delete_as_it_is_indexed_keeps_no_other_back(server, folder, capsys):
    server.taken_away.add(b"alpha")
    assert run(folder, "--json") == 1
    assert sorted(server.holds()) == ["c.md", "deep/er/b.txt"]
    assert told(capsys)["failed"] == {"a.md": "was taken out of the store while it was indexed"}


def test_what_left_the_folder_stays_unless_it_is_asked_for(server, folder, capsys):
    run(folder)
    (folder / "c.md").unlink()
    assert run(folder) == 0
    assert server.holds() == WHOLE
    assert "1 left the folder and stay in the store; --prune removes" in capsys.readouterr().out
    assert run(folder, "--prune", "--json") == 0
    assert sorted(server.holds()) == ["a.md", "deep/er/b.txt"]
    assert told(capsys)["removed"] == ["c.md"]


def test_pruning_touches_nothing_that_others_put_there(server, folder, tmp_path):
    write(tmp_path / "others", "z.md", "zeta")
    run(tmp_path / "others")
    server.files["by_hand"] = b"own"
    server.attached["by_hand"] = {"id": "by_hand", "status": "completed", "attributes": {}}
    assert run(folder, "--prune") == 0
    assert "by_hand" in server.attached
    paths = [told["attributes"].get("path") for told in server.attached.values()]
    assert paths.count("z.md") == 1


def test_hidden_empty_linked_and_foreign_files_are_left_out_in_words(server, folder, capsys):
    write(folder, ".git/HEAD.md", "hidden")
    write(folder, ".draft.md", "hidden")
    write(folder, "empty.md", "")
    write(folder, "tool.exe", "MZ")
    (folder / "link.md").symlink_to(folder / "a.md")
    assert run(folder) == 0
    assert server.holds() == WHOLE
    said = capsys.readouterr().out
    assert "not taken: 2 (hidden), such as .draft.md" in said
    for why in ("a .exe file), such as tool.exe", "empty), such as", "a link), such as link.md"):
        assert f"not taken: 1 ({why}" in said


def test_a_folder_that_cannot_be_read_prunes_nothing(server, folder, monkeypatch, capsys):
    run(folder)

    def unreadable(_: Path) -> None:
        raise PermissionError(13, "Permission denied", "deep")

    monkeypatch.setattr("services.cli.indexing.folder.os.scandir", unreadable)
    assert run(folder, "--prune") == 1
    assert "Permission denied" in capsys.readouterr().err
    assert server.holds() == WHOLE


def test_a_full_queue_is_waited_for(server, folder):
    server.busy = 5
    assert run(folder) == 0
    assert server.holds() == WHOLE


def test_what_was_broken_off_is_gone_on_with(server, folder, monkeypatch, capsys):
    def gone(*_: Any) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(remote_store.RemoteStore, "outcome", gone)
        assert run(folder) == 130
    on_the_way = set(server.files)
    assert len(on_the_way) == 3
    assert run(folder, "--json") == 0
    assert set(server.files) == on_the_way  # none was sent twice
    assert server.holds() == WHOLE
    assert told(capsys)["added"] == ["a.md", "c.md", "deep/er/b.txt"]


def test_a_change_that_was_broken_off_leaves_one_version(server, folder, monkeypatch):
    run(folder)
    write(folder, "a.md", "new")
    with monkeypatch.context() as patched:
        patched.setattr(remote_store.RemoteStore, "drop", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(folder)
    assert len(server.files) == 4
    assert run(folder) == 0
    assert server.holds() == WHOLE | {"a.md": b"new"}


def test_a_store_by_its_id_and_names_that_are_not_one(server, folder, capsys):
    server.stores = {"vs_a": "guides", "vs_b": "guides"}
    assert run(folder) == 1
    assert "--store: 2 are called 'guides', give an id: vs_a, vs_b" in capsys.readouterr().err
    assert main(["index", str(folder), "--store", "vs_b"]) == 0
    assert {told["store"] for told in server.attached.values()} == {"vs_b"}


def test_a_store_on_a_later_page_is_found(server, folder):
    server.stores = {f"vs_{name}": name for name in ("x", "y", "guides")}
    assert run(folder) == 0
    assert len(server.stores) == 3


def test_watching_takes_what_changes(server, folder, monkeypatch, capsys):
    """Also where the server is away for a moment after each change."""
    changes = iter(
        [
            lambda: write(folder, "new.md", "delta"),
            lambda: write(folder, "a.md", "ALPHA"),
            lambda: (folder / "c.md").unlink(),
        ]
    )
    away, answer = [], server.answer

    def sleep(seconds: float) -> None:
        if seconds == index._AGAIN_S:
            return
        change = next(changes, None)
        if change is None:
            raise KeyboardInterrupt
        change()
        away.append(1)

    def sometimes_away(request: httpx.Request) -> httpx.Response:
        if away:
            away.clear()
            raise httpx.ConnectError("refused", request=request)
        return answer(request)

    monkeypatch.setattr(server, "answer", sometimes_away)
    monkeypatch.setattr(index, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    assert run(folder, "--watch", "--prune", "--json") == 130
    assert server.holds() == {"a.md": b"ALPHA", "deep/er/b.txt": b"beta", "new.md": b"delta"}
    said = capsys.readouterr()
    assert said.err.count("refused; tried again in 5 s") == 3
    rounds = [json.loads(line) for line in said.out.splitlines()]
    assert [one["added"] for one in rounds[1:]] == [["new.md"], [], []]
    assert [one["changed"] for one in rounds[1:]] == [[], ["a.md"], []]
    assert [one["removed"] for one in rounds[1:]] == [[], [], ["c.md"]]


def test_a_terminal_has_a_bar(server, folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    server.refused.add(b"alpha")
    assert run(folder) == 1
    assert "failed a.md" in capsys.readouterr().err


def test_no_folder_is_wrong_usage(server, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        run(tmp_path / "none")
    assert left.value.code == 2
    assert "there is no folder" in capsys.readouterr().err


def test_a_server_that_is_down_is_told(folder, capsys):
    assert main(["index", str(folder), "--store", "s", "--url", "http://127.0.0.1:1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("penstock: http://127.0.0.1:1/v1/vector_stores")


def test_a_store_has_a_name(server, folder, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["index", str(folder), "--store", " "])
    assert "--store: it is empty" in capsys.readouterr().err
    assert not server.stores


def test_a_new_store_has_the_embedder_that_is_named_and_one_that_is_there_must(
    server, folder, capsys
):
    assert run(folder, "--embedder", "wide") == 0
    assert server.made == [{"name": "guides", "embedding_model": "wide"}]
    assert run(folder, "--embedder", "wide") == 1
    assert "--embedder: 'guides' is indexed with 'm'" in capsys.readouterr().err
    assert run(folder, "--embedder", "m") == 0
