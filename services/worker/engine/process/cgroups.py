"""The control groups that bound this process: so Kubernetes and Docker limit a container."""

from collections.abc import Iterator
from pathlib import Path

_OWN_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def settings(controller: str, one: str, two: str) -> Iterator[list[str]]:
    """Of the process's own groups and those above them: what the files say that versions 1 and 2
    call `one` and `two`, in words. Several names with a blank between them are read as one file."""
    for line in read(_OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _MOUNT / controllers
        own = root / path.lstrip("/")
        # In a container its own group is mounted as the root, and the path is the host's.
        for folder in {own, *own.parents, root} - set(root.parents):
            names = (one if controllers else two).split()
            yield [word for name in names for word in read(folder / name).split()]


def read(path: Path) -> str:
    """Empty where it cannot be."""
    try:
        return path.read_text()
    except OSError:
        return ""
