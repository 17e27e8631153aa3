"""Processes that end with the one that started them, however that one ends, and what they are told
of its environment."""

import os
import shutil
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_PLAIN = ("PATH", "LD_LIBRARY_PATH", "TMPDIR", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
_INTERPRETERS = "PYTHON"  # how the names of its own variables begin


def dying_with_parent(signal: str = "TERM") -> list[str]:
    """What to put before a command so that a killed parent leaves no process behind: the kernel
    sends the signal when the thread that starts the command ends, whatever ended it.

    Not a `preexec_fn`: that forks with gRPC's fork handlers, which at times end the child.
    """
    setpriv = shutil.which("setpriv")  # util-linux
    return [setpriv, "--pdeathsig", signal, "--"] if setpriv else []


def plain_environment() -> dict[str, str]:
    """What a process of Penstock needs to run at all. Keys and passwords of services are not in it:
    it is for processes that work on what users sent."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name in _PLAIN or name.startswith(_INTERPRETERS)
    }
    path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return own | {"PYTHONPATH": os.pathsep.join(path)}
