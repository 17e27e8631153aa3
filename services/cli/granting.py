"""What the commands share that say who may what: straight in Redis, each change audited."""

import getpass
import json
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from services.cli.interruptible import run
from services.cli.running import find_running
from services.common.config import Settings
from services.common.discovery import Directory
from services.common.redis import OutOfMemoryError, ReadOnlyError, Redis, RedisAway, connect
from services.common.served_models import listed
from services.gateway.identity.audit import Actor, AuditLog
from services.gateway.identity.keys import KeyStore
from services.gateway.identity.limits import Limit
from services.gateway.identity.revoked_tokens import TokenRevocations
from services.gateway.identity.tenants import TenantStore

T = TypeVar("T")
ALL_MODELS = "*"


@dataclass(frozen=True)
class Stores:
    """Of the Penstock that runs here, or that the settings name."""

    redis: Redis
    settings: Settings
    audit: AuditLog
    keys: KeyStore
    tenants: TenantStore
    revoked_tokens: TokenRevocations
    by: Actor


def with_stores(work: Callable[[Stores], Awaitable[None]]) -> int:
    """Runs it; returns the exit code. Raises RuntimeError where Redis is away."""
    try:
        return run(_with_stores(work))
    except RedisAway as away:
        raise RuntimeError(_told(away)) from away
    except ValidationError as error:
        if error.title == Settings.__name__:
            raise
        problem = error.errors()[0]
        argument = str(problem["loc"][0]) if problem["loc"] else ""
        named = {
            "models": "--model: ",
            "scopes": "--scope: ",
            "limits": "--limit: ",
            "user_limits": "--each-limit: ",
            "": "",
            "name": "the name: ",
        }
        start = named.get(argument, f"--{argument.replace('_', '-')}: ")
        raise ValueError(start + problem["msg"].removeprefix("Value error, ")) from None


def _told(away: Exception) -> str:
    if isinstance(away, OutOfMemoryError | ReadOnlyError):
        return f"Redis takes no writes for now: {away}"
    return f"Redis cannot be reached: {away}; start a Penstock with `penstock up`"


async def _with_stores(work: Callable[[Stores], Awaitable[None]]) -> int:
    settings = Settings()
    running = find_running(settings)
    url, namespace = settings.redis_dsn, settings.namespace
    if running is not None and "redis_url" not in settings.model_fields_set:
        url, namespace = running.redis_url, running.namespace
    settings = settings.model_copy(update={"namespace": namespace})
    redis = connect(url)
    try:
        await redis.ping()  # what can be nothing's name is answered without asking
        audit = AuditLog(redis, namespace, settings.identity.audit_kept_days * 86_400)
        stores = Stores(
            redis,
            settings,
            audit,
            KeyStore(redis, namespace, audit, settings.identity.max_keys),
            TenantStore(redis, namespace, audit),
            TokenRevocations(redis, namespace, settings.identity, audit),
            actor(),
        )
        await work(stores)
        return 0
    finally:
        await redis.aclose()


def actor() -> Actor:
    """Who runs the command, as this machine says."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        user = "?"
    return Actor(f"cli:{user}", socket.gethostname())


async def models_given(names: list[str] | None, stores: Stores) -> tuple[str, ...] | None:
    """Those of --model; None: all. Raises ValueError for one that is not served, where it is
    known which are."""
    if names is None or names == [ALL_MODELS]:
        return None
    served = await _served(stores)
    if not served:
        tell("no Penstock runs with this Redis: whether these models are served is not known")
    elif unknown := [name for name in names if name not in served]:
        raise ValueError(
            f"--model: {', '.join(unknown)} is not served; these are: {', '.join(sorted(served))}"
        )
    return tuple(names)


async def limits_given(texts: Sequence[str], option: str, stores: Stores) -> tuple[Limit, ...]:
    """Those of --limit, each a JSON object. Raises ValueError that names the option."""
    found = []
    for text in texts:
        try:
            found.append(Limit.model_validate_json(text))
        except ValidationError as error:
            problem = error.errors()[0]
            path = "".join(f"{part}: " for part in problem["loc"])
            said = problem["msg"].removeprefix("Value error, ")
            raise ValueError(f"{option}: {path}{said}") from None
    await warn_of_unserved(found, stores)
    return tuple(found)


async def warn_of_unserved(limits: Sequence[Limit], stores: Stores) -> None:
    """Says which of their models are not served now: a limit may be there before its model is."""
    models = {one.model for one in limits if one.model is not None}
    served = await _served(stores) if models else set()
    if served and (unknown := models - served):
        tell(
            f"not served now: {', '.join(sorted(unknown))}; these are: {', '.join(sorted(served))}"
        )


async def _served(stores: Stores) -> set[str]:
    """The models of the Penstock that runs with this Redis, embeddings' too; empty if none does."""
    settings = stores.settings
    names = {served.model for served in await listed(stores.redis, settings)}
    view = Directory(stores.redis, settings.namespace, "retrieval", settings.lease_s)
    await view.refresh()
    for replica in view.replicas.values():
        embeds = replica.facts.get("embedding_model", "")
        names |= {*filter(None, [embeds]), *json.loads(replica.facts.get("embedders", "{}"))}
    return names


def found(thing: T | None, what: str, name: str) -> T:
    """Raises ValueError where there is none."""
    if thing is None:
        raise ValueError(f"there is no {what} {name!r}; `penstock {what}s list` shows all")
    return thing


def tell(line: str) -> None:
    """Beside the output that scripts read."""
    print(line, file=sys.stderr)


def local(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))
