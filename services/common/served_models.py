"""The served models, in the registry beside the replicas: what their workers say of them.

An entry is a model's name with the digest of a checkpoint: while another checkpoint takes the place
of one, there are two of a name. Each worker renews its entry as it renews its own lease, but the
entry outlives it. While its last worker restarts, by `model_memory_s`: requests wait instead of
hearing that there is no such model. When workers are lost rather than stopped, for as long as
somebody may wonder where they are. Who removes a model for good ends its entries (`forget`).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b

from services.common.config import ModelSpec, Settings
from services.common.discovery import Directory, Registration, Replica, end
from services.common.fresh_look import FreshLook
from services.common.redis import Redis

log = logging.getLogger(__name__)

READING = "reading"  # listed under it is what each tokenizer has of them: entry → why not read
_MODEL = "model"  # what the registry calls them
_LOOK_EVERY_S = 0.2  # at most, however many unknown names are asked for
_LOST_FOR_S = 86_400.0
_ENDED_FOR_S = 60.0  # it is told: longer than any view or worker looks away


@dataclass(frozen=True)
class Checkpoint:
    """What workers serve under a model's name."""

    model: str
    digest: str
    text_digest: str  # of what a tokenizer reads of it (services/common/checkpoints/checkpoint.py)
    path: str  # where the workers have it
    parent: str = ""  # of an adapter: the model that it belongs to, whose path that is
    base: str = ""  # and that one's digest

    def __str__(self) -> str:
        return f"{self.model}@{self.digest}"


def adapted(base: Checkpoint, name: str, adapter: str) -> Checkpoint:
    """What is served under an adapter's name: `adapter` is its digest. It has a digest of its own,
    of both, so that nothing made with it is taken for the base's, or another adapter's."""
    both = blake2b(f"{base.digest} {adapter}".encode(), digest_size=8).hexdigest()
    return replace(base, model=name, digest=both, parent=base.model, base=base.digest)


def wanted_key(namespace: str) -> str:
    """Of the hash of models that an install is to serve: name → ModelSpec as JSON."""
    return f"{namespace}:{{models}}:wanted"


def failures_key(namespace: str) -> str:
    """Of the hash of those that are not served, and adapters: name → why."""
    return f"{namespace}:{{models}}:failures"


def entry(redis: Redis, settings: Settings, served: Checkpoint) -> Registration:
    """For a worker to keep."""
    facts = {
        "model": served.model,
        "digest": served.digest,
        "text_digest": served.text_digest,
        "path": served.path,
    }
    if served.parent:
        facts |= {"parent": served.parent, "base": served.base}
    return Registration(
        redis,
        settings.namespace,
        Replica(_MODEL, str(served), address="", host_id="", pid=0, facts=facts),
        settings.lease_s,
        outlives_loss_s=max(_LOST_FOR_S, settings.model_memory_s),
        outlives_stop_s=settings.model_memory_s,
    )


async def forget(redis: Redis, settings: Settings, gone: Callable[[Checkpoint], bool]) -> None:
    """Ends all entries that are `gone`, also those that a worker still renews: one that begins to
    serve it lists it anew. Raises one of `RedisAway`."""
    for served in await listed(redis, settings):
        if gone(served):
            await end(redis, settings.namespace, _MODEL, str(served), _ENDED_FOR_S)


async def listed(redis: Redis, settings: Settings) -> list[Checkpoint]:
    """One look. Raises ConnectionError while Redis is away."""
    view = Directory(redis, settings.namespace, _MODEL, settings.lease_s)
    await view.refresh()
    if not view.reachable:
        raise ConnectionError("Redis is away: which models are served is not known")
    return [served for one in view.replicas.values() if (served := _read(one)) is not None]


class ServedModels:
    """A live view of them. `on_change` is called on the event loop after each change."""

    def __init__(
        self, redis: Redis, settings: Settings, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._directory = Directory(
            redis, settings.namespace, _MODEL, settings.lease_s, self._changed
        )
        self._served: dict[str, Checkpoint] = {}
        self._seen = False
        self._on_change = on_change
        self.look = FreshLook(self._directory.refresh, _LOOK_EVERY_S)

    async def start(self) -> None:
        """Looks once; goes on in the background."""
        await self._directory.start()

    async def stop(self) -> None:
        await self.look.stop()
        await self._directory.stop()

    @property
    def seen(self) -> bool:
        """Whether it was looked into once: without Redis its last view stands."""
        self._seen = self._seen or self._directory.reachable
        return self._seen

    def all(self) -> list[Checkpoint]:
        return list(self._served.values())

    def of(self, name: str) -> list[Checkpoint]:
        return [served for served in self._served.values() if served.model == name]

    def names(self) -> set[str]:
        return {served.model for served in self.all()}

    def with_workers(self) -> set[str]:
        """Those that are no adapters, which have their models' workers. May be called in any
        thread."""
        return {served.parent or served.model for served in self.all()}

    async def has(self, name: str) -> bool:
        """Looks into the registry anew for one that is not known."""
        if not self.of(name):
            await self.look()
        return bool(self.of(name))

    def _changed(self, added: list[Replica], removed: list[Replica]) -> None:
        for gone in removed:
            self._served.pop(gone.id, None)
        for listed in added:
            if (served := _read(listed)) is not None:
                self._served[listed.id] = served
        self._on_change()


def _read(listed: Replica) -> Checkpoint | None:
    """None: it has ended, or is junk; whoever wrote that, the other models are served on."""
    facts = listed.facts
    if not facts:
        return None
    try:
        spec = ModelSpec(name=facts["model"], path=facts["path"])
        own = facts["digest"], facts["text_digest"], spec.path
        return Checkpoint(spec.name, *own, facts.get("parent", ""), facts.get("base", ""))
    except (KeyError, ValueError):
        log.warning("an entry in the registry is no model: %.100r", listed.id)
        return None
