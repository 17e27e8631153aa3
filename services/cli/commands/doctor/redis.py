"""Redis: whether it can be reached and by whom, keeps what it is told, and tells our time; and the
API keys in it."""

import time
from typing import Any
from urllib.parse import urlsplit

from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from services.cli.commands.doctor.findings import Finding, failed, ok, warning
from services.cli.commands.doctor.installation import Installation
from services.common.config import is_loopback
from services.common.locks.secrets import redacted
from services.common.redis import Redis, RedisAway, RedisError, connect
from services.gateway.identity.keys import KeyStore

_OLDEST = (6, 2)
_CLOCK_S = 1.0
_FULL = 0.9  # of maxmemory


async def check(it: Installation) -> list[Finding]:
    if it.redis is None:
        return [_embedded()]
    shown = redacted(it.settings.redis_dsn)
    try:
        took_ms = await _fastest_ms(it.redis)
        info: dict[str, Any] = await it.redis.info("everything")
    except (*RedisAway, RedisError) as error:
        return [_no_answer(shown, error)]
    config = await _config(it.redis)
    url = it.settings.redis_dsn
    return [
        _version(info, shown, took_ms),
        _writable(info),
        *_persistence(info, config),
        _memory(info, it.settings.gateway.max_file_bytes),
        await _locked(it, url),
        _encrypted(url),
        await _clock(it.redis),
        await _keys(it),
    ]


def _no_answer(shown: str, error: Exception) -> Finding:
    said = redacted(str(error))
    if _refused(error):
        advice = "correct the user and the password in PENSTOCK_REDIS_URL"
        return failed("redis", f"{shown} refuses us: {said}", advice)
    advice = "start it, or correct PENSTOCK_REDIS_URL, PENSTOCK_REDIS_CA and the way to it"
    return failed("redis", f"{shown} does not answer: {said}", advice)


def _refused(error: Exception) -> bool:
    """Whether it asked for another user or password; on connecting, that is a cause only."""
    kinds = (AuthenticationError, NoPermissionError)
    return isinstance(error, kinds) or isinstance(error.__cause__, kinds)


async def _fastest_ms(redis: Redis) -> float:
    """Of three pings: what else runs here now is not Redis' fault."""
    took = []
    for _ in range(3):
        began = time.perf_counter()
        await redis.ping()
        took.append(time.perf_counter() - began)
    return min(took) * 1e3


def _embedded() -> Finding:
    from services.common.embedded_redis import binary

    try:
        return ok("redis", f"is to be started by `penstock up`: {binary()}")
    except (FileNotFoundError, ImportError) as error:
        return failed("redis", str(error), "install redis-server, or set PENSTOCK_REDIS_URL")


def _version(info: dict[str, Any], shown: str, took_ms: float) -> Finding:
    version = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        return failed("redis", f"{version} at {shown} is too old", "take 6.2 or newer")
    return ok("redis", f"{version} at {shown} answers in {took_ms:.1f} ms")


def _writable(info: dict[str, Any]) -> Finding:
    if info.get("role") != "master":
        return failed(
            "redis role", "a read-only replica answers", "point PENSTOCK_REDIS_URL to the primary"
        )
    for part, what in (
        ("aof_last_write_status", "append-only file"),
        ("rdb_last_bgsave_status", "snapshot"),
        ("aof_last_bgrewrite_status", "append-only file's rewriting"),
    ):
        if info.get(part, "ok") != "ok":
            return failed(
                "redis role",
                f"its last writing of the {what} failed",
                "see its log: most likely its disk is full",
            )
    return ok("redis role", "primary, writes succeed")


async def _config(redis: Redis) -> dict[str | None, str | None]:
    """Empty where it may not be read, as with most services that one rents."""
    try:
        return dict(await redis.config_get("save"))
    except (ResponseError, NoPermissionError):
        return {}


def _persistence(info: dict[str, Any], config: dict[str | None, str | None]) -> list[Finding]:
    about = "redis persistence"
    if info.get("aof_enabled"):
        return [ok(about, "append-only file: at most the last second is lost with the machine")]
    lost = "API keys, files and vector stores"
    if config.get("save"):
        return [
            warning(
                about,
                f"snapshots only (save {config['save']}): a crash loses {lost} made since",
                "set `appendonly yes`",
            )
        ]
    if not config:
        return [
            warning(
                about,
                "no append-only file; whether it makes snapshots may not be asked",
                "see with whoever runs it that a restart keeps data",
            )
        ]
    return [
        failed(
            about,
            f"none: a restart loses all {lost}",
            "set `appendonly yes` (CONFIG SET appendonly yes, then in its configuration)",
        )
    ]


def _memory(info: dict[str, Any], files: int) -> Finding:
    """`files`: bytes that those of all tenants may take."""
    about, policy = "redis memory", str(info.get("maxmemory_policy", "noeviction"))
    used, limit = int(info["used_memory"]), int(info.get("maxmemory", 0))
    told = (
        f"{_mib(used)} used" + (f" of {_mib(limit)}" if limit else ", no maxmemory") + f", {policy}"
    )
    if policy != "noeviction":
        return failed(
            about,
            f"{told}: a full Redis forgets keys, leases and places in the queue",
            "set `maxmemory-policy noeviction`",
        )
    if limit and used >= limit:
        return failed(about, f"{told}: it is full and takes no writes", "raise maxmemory")
    if limit and used > _FULL * limit:
        return warning(
            about,
            told,
            "raise maxmemory; when it is full, nothing new is admitted in order nor stored",
        )
    if limit and 2 * files > limit:
        return warning(
            about,
            f"{told}; tenants' files alone may take {_mib(files)} of it",
            "lower PENSTOCK_GATEWAY__MAX_FILE_BYTES to half of maxmemory, or raise that",
        )
    return ok(about, told)


async def _locked(it: Installation, url: str) -> Finding:
    """Whether strangers are served."""
    about, split = "redis password", urlsplit(url)
    if split.scheme == "unix":
        return ok(about, "a socket of this user's" + (", and a password" if split.password else ""))
    stranger = connect(_without_user(it.settings.redis_dsn))
    try:
        await stranger.ping()
    except (*RedisAway, RedisError) as error:
        how = "are refused" if _refused(error) else f"get no connection: {redacted(str(error))}"
        return ok(about, f"strangers {how}")
    finally:
        await stranger.aclose()
    told, advice = (
        "whoever reaches it may read and write everything",
        "set `requirepass` or an ACL, and the password in PENSTOCK_REDIS_URL",
    )
    return (warning if is_loopback(split.hostname or "") else failed)(about, told, advice)


def _without_user(url: str) -> str:
    split = urlsplit(url)
    return split._replace(netloc=split.netloc.rpartition("@")[2]).geturl()


def _encrypted(url: str) -> Finding:
    about, split = "redis TLS", urlsplit(url)
    if split.scheme == "rediss":
        return ok(about, "the server's certificate was verified")
    if split.scheme == "unix" or is_loopback(split.hostname or ""):
        return ok(about, "not needed: it is on this machine")
    return warning(
        about,
        "the password and all data travel in the clear",
        "use rediss:// and PENSTOCK_REDIS_CA, or a network that encrypts",
    )


async def _clock(redis: Redis) -> Finding:
    began, ours = time.monotonic(), time.time()
    seconds, micros = await redis.time()
    apart = seconds + micros / 1e6 - (ours + (time.monotonic() - began) / 2)
    return clock("redis clock", apart, _CLOCK_S)


def clock(about: str, apart_s: float, allowed_s: float) -> Finding:
    """Of a clock that is so far ahead of ours."""
    if abs(apart_s) <= allowed_s:
        return ok(about, f"agrees with ours within {allowed_s:g} s")
    how = "ahead of" if apart_s > 0 else "behind"
    return warning(
        about,
        f"{abs(apart_s):.1f} s {how} ours: traces and certificates' ends are off",
        "run NTP (chrony, systemd-timesyncd) on all hosts",
    )


async def _keys(it: Installation) -> Finding:
    assert it.redis is not None
    try:
        records = await KeyStore(it.redis, it.settings.namespace).list()
    except (*RedisAway, RedisError) as error:
        return failed("API keys", f"cannot be read: {redacted(str(error))}", "see redis")
    valid = sum(record.holds for record in records)
    if valid:
        return ok("API keys", f"{valid} valid, {len(records) - valid} revoked or expired")
    return failed("API keys", "there is none that is valid", "penstock keys create --tenant NAME")


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
