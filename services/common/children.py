"""Processes that end with the one that started them, however that one ends."""

import shutil


def dying_with_parent(signal: str = "TERM") -> list[str]:
    """What to put before a command so that a killed parent leaves no process behind: the kernel
    sends the signal when the thread that starts the command ends, whatever ended it.

    Not a `preexec_fn`: that forks with gRPC's fork handlers, which at times end the child.
    """
    setpriv = shutil.which("setpriv")  # util-linux
    return [setpriv, "--pdeathsig", signal, "--"] if setpriv else []
