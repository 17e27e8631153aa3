"""A vector store of a running Penstock, and which files of a folder it holds.

Each file that a folder gave has attributes that say which: `folder`, its `path` in it, and the
`sha256` of its bytes. What else the store holds is nobody's here to touch.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import httpx

from services.cli import client

_PER_PAGE = 100
_LOOK_EVERY_S = 0.2
_PATIENCE_S = 1800.0  # for room in limits and queues, and for one file
_FOR_NOW = (429, 503)


class Held(NamedTuple):
    """A file in the store."""

    id: str
    sha256: str
    status: str


class RemoteStore:
    """Methods raise RuntimeError with the server's words, httpx.HTTPError where it is away."""

    def __init__(self, api: httpx.Client, id: str, folder: str) -> None:
        self._api = api
        self.id = id
        self._folder = folder

    @classmethod
    def called(
        cls, api: httpx.Client, name: str, folder: str, embedder: str = ""
    ) -> tuple["RemoteStore", bool]:
        """The one of this name or id, and whether it was made just now; `embedder`: the embedding
        model that it has, or gets. Raises ValueError where several have the name, or this one has
        another model."""
        found = [
            store
            for store in _all(api, "/v1/vector_stores")
            if name in (store["id"], store["name"])
        ]
        ids = [store["id"] for store in found]
        if len(ids) > 1:
            raise ValueError(
                f"--store: {len(ids)} are called {name!r}, give an id: {', '.join(ids)}"
            )
        made = not ids
        if made:
            about = {"name": name, **({"embedding_model": embedder} if embedder else {})}
            ids = [_sent(lambda: api.post("/v1/vector_stores", json=about))["id"]]
        elif embedder and found[0]["embedding_model"] != embedder:
            raise ValueError(
                f"--embedder: {name!r} is indexed with {found[0]['embedding_model']!r}; "
                "an update of the store's embedding_model has it indexed anew"
            )
        return cls(api, ids[0], folder), made

    def held(self) -> dict[str, list[Held]]:
        """By path, the newest first: several where a change was broken off."""
        found: dict[str, list[Held]] = defaultdict(list)
        for file in _all(self._api, f"/v1/vector_stores/{self.id}/files"):
            told = file["attributes"] or {}
            if told.get("folder") == self._folder and "path" in told:
                found[told["path"]].append(Held(file["id"], told.get("sha256", ""), file["status"]))
        return dict(found)

    def add(self, path: str, content: bytes) -> str:
        """Begins to index a file; returns its id."""
        upload = {"file": (path, content, "application/octet-stream")}
        purpose = {"purpose": "assistants"}
        id: str = _sent(lambda: self._api.post("/v1/files", files=upload, data=purpose))["id"]
        told = {"folder": self._folder, "path": path, "sha256": digest(content)}
        body = {"file_id": id, "attributes": told}
        try:
            _sent(lambda: self._api.post(f"/v1/vector_stores/{self.id}/files", json=body))
        except RuntimeError:
            self.drop(id)
            raise
        return id

    def outcome(self, id: str) -> str:
        """Waits for it: empty when it is searchable, else why it is not."""
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            path = f"/v1/vector_stores/{self.id}/files/{id}"
            told = _sent(partial(self._api.get, path), gone=True)
            if told is None:
                return "was taken out of the store while it was indexed"
            if told["status"] != "in_progress":
                return str((told["last_error"] or {}).get("message", ""))
            time.sleep(_LOOK_EVERY_S)
        return f"is still being indexed after {_PATIENCE_S:.0f} s"

    def drop(self, id: str) -> None:
        """A file, out of the store and altogether."""
        _sent(lambda: self._api.delete(f"/v1/files/{id}"), gone=True)


def digest(content: bytes) -> str:
    return sha256(content).hexdigest()


def _all(api: httpx.Client, path: str) -> Iterator[dict[str, Any]]:
    """Each of a list's items, over its pages."""
    query: dict[str, Any] = {"limit": _PER_PAGE}
    while True:
        told = _sent(lambda: api.get(path, params=query))
        yield from told["data"]
        if not told["has_more"]:
            return
        query["after"] = told["last_id"]


def _sent(send: Callable[[], httpx.Response], gone: bool = False) -> Any:
    """Its answer, once there is room for the request where there is none for now. `gone`: what is
    not there any more is well."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        answer = send()
        after = answer.headers.get("retry-after", "")
        is_for_now = answer.status_code in _FOR_NOW and after.isdecimal()
        if not is_for_now or time.monotonic() + int(after) > until:
            return None if gone and answer.status_code == 404 else client.checked(answer)
        time.sleep(int(after))
