"""What the workers of each checkpoint can take: how long a prompt, and how many sequences.

This is the one place where the tokenizer looks past its next service, the router. A prompt is cut
to the window, and tokenized for a checkpoint, here or not at all, so both must be known before the
prompt goes on. They are facts of the registry, which is there for all; no worker is spoken to, and
the router, which gets prompts that are ready, does not have to carry figures that it does not use.
"""

from typing import NamedTuple

from services.common.config import Settings
from services.common.discovery import Directory, Replica
from services.common.redis import Redis

_DECODE_ROLES = ("decode", "both")


class Standing(NamedTuple):
    """The greater one's checkpoint gets the new requests."""

    decoding: int = 0  # sequences that its workers decode at once
    at_all: int = 0  # those that only prefill included
    began: float = 0.0  # its last worker, Unix seconds


class Pools:
    """A live view of the registered workers, by model and digest of checkpoint."""

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._workers = Directory(
            redis, settings.namespace, "worker", settings.lease_s, self._changed
        )
        self._standings: dict[tuple[str, str], Standing] = {}
        self._rooms: dict[tuple[str, str], int] = {}  # of those that have no worker now, too

    async def start(self) -> None:
        """Looks once; goes on in the background."""
        await self._workers.start()

    async def stop(self) -> None:
        await self._workers.stop()

    def standing(self, model: str, checkpoint: str) -> Standing:
        return self._standings.get((model, checkpoint), Standing())

    def room(self, model: str, checkpoint: str) -> int | None:
        """Tokens that all of its workers have room for: any of them may get the prompt, so the
        smallest counts. While none is registered, the last known figure stands: workers come back
        as they were. None: not known."""
        return self._rooms.get((model, checkpoint))

    def forget(self, model: str, checkpoint: str) -> None:
        """It is not served any more."""
        self._rooms.pop((model, checkpoint), None)

    def _changed(self, _added: list[Replica], _removed: list[Replica]) -> None:
        self._standings = {}
        rooms: dict[tuple[str, str], int] = {}
        for worker in self._workers.replicas.values():
            facts = worker.facts
            served = facts.get("model", ""), facts.get("digest", "")
            slots = _number(facts, "max_running") or 1
            before = self.standing(*served)
            decodes = facts.get("role", "both") in _DECODE_ROLES
            self._standings[served] = Standing(
                before.decoding + slots * decodes,
                before.at_all + slots,
                max(before.began, _seconds(facts)),
            )
            if room := _number(facts, "max_model_len"):
                rooms[served] = min(room, rooms.get(served, room))
        self._rooms |= rooms


def _number(facts: dict[str, str], name: str) -> int:
    """0 for what another version says otherwise, or not at all."""
    told = facts.get(name, "")
    return int(told) if told.isdecimal() else 0


def _seconds(facts: dict[str, str]) -> float:
    try:
        return float(facts.get("began", ""))
    except ValueError:
        return 0.0
