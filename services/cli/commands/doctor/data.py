"""The data directory: writable, with room, and its owner's alone."""

import os
import shutil
import stat
from pathlib import Path

from services.cli.commands.doctor.findings import Finding, aside, failed, ok, warning
from services.cli.commands.doctor.installation import Installation, kept
from services.cli.stack.data_directory import FULL_BYTES
from services.common.config import is_loopback

_SECRETS = ("internal-secret", "key", "ray-token", "running.json", "redis/password")
_LOW_BYTES = 2 * 2**30


async def check(it: Installation) -> list[Finding]:
    return await aside(_check, it)


def _check(it: Installation) -> list[Finding]:
    folder = it.settings.data_dir
    if not folder.exists():
        above = next(path for path in folder.resolve().parents if path.exists())
        if not os.access(above, os.W_OK):
            told = f"{folder} cannot be made: {above} is not writable"
            return [failed("data directory", told, "choose another PENSTOCK_DATA_DIR"), _secret(it)]
        return [_room(above, f"{folder} is made at the first start"), _secret(it)]
    if not folder.is_dir():
        told = f"{folder} is not a folder"
        return [failed("data directory", told, "choose another PENSTOCK_DATA_DIR")]
    return [_own(folder), _room(folder, str(folder)), _modes(folder), _secret(it)]


def _own(folder: Path) -> Finding:
    about, found = "data directory", folder.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid():
        told = f"{folder} belongs to user {found.st_uid}, this is user {os.geteuid()}"
        return failed(
            about, told, "chown it, run as that user, or choose another PENSTOCK_DATA_DIR"
        )
    if found.st_mode & stat.S_ISVTX:
        told = f"{folder} is shared by design, as /tmp is"
        return failed(about, told, "choose a folder below it as PENSTOCK_DATA_DIR")
    if not os.access(folder, os.W_OK | os.X_OK):
        return failed(about, f"{folder} is not writable", f"chmod 700 {folder}")
    if mode & 0o077:
        told = f"{folder} is open to other users (mode {mode:03o})"
        return warning(about, told, f"chmod 700 {folder}")
    return ok(about, f"{folder} is this user's alone")


def _room(folder: Path, told: str) -> Finding:
    about, free = "disk", shutil.disk_usage(folder).free
    text = f"{free / 2**30:.1f} GiB free, {told}"
    if free < FULL_BYTES:
        return failed(
            about,
            text,
            "make room: on a full disk Redis takes no writes, and nothing starts",
        )
    if free < _LOW_BYTES:
        return warning(about, text, "make room, or choose another PENSTOCK_DATA_DIR")
    return ok(about, text)


def _modes(folder: Path) -> Finding:
    """Of the secrets in it."""
    there = [path for name in _SECRETS if (path := folder / name).exists()]
    open_ones = [path for path in there if path.stat().st_mode & 0o077]
    if open_ones:
        names = " ".join(map(str, open_ones))
        told = f"others may read {names}"
        return failed("secrets", told, f"chmod 600 {names}, then make them anew: who knows who has")
    empty = [path for path in there if path.stat().st_size == 0]
    if empty:
        return failed("secrets", f"{empty[0]} is empty", f"remove it: rm {empty[0]}")
    return ok("secrets", f"{len(there)} files, for this user alone")


def _secret(it: Installation) -> Finding:
    """What services show each other."""
    about, own = "internal secret", it.settings
    also = " (a second one is taken as well)" if own.internal_secret_also.get_secret_value() else ""
    if own.internal_secret.get_secret_value():
        return ok(about, f"set{also}")
    if not is_loopback(own.bind_host):
        told = f"not set, and services listen on {own.bind_host}: each host would make its own"
        return failed(about, told, "set the same PENSTOCK_INTERNAL_SECRET everywhere")
    if kept(it.secret_file):
        return ok(about, f"kept in {it.secret_file}{also}")
    if it.replicas:
        told = f"neither set nor kept in {it.secret_file}, and services run"
        return failed(about, told, "set PENSTOCK_INTERNAL_SECRET, or PENSTOCK_DATA_DIR, as there")
    return ok(about, "is made at the first start")
