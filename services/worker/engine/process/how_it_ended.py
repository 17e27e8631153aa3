"""A process's end, in words."""

import signal


def how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    told = f"was ended by signal {-status} ({signal.strsignal(-status)})"
    return f"{told}, the kernel's where memory runs out" if status == -signal.SIGKILL else told
