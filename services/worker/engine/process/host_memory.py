"""How much memory this process may use at most."""

import os

from services.worker.engine.process import cgroups


def usable_memory() -> int:
    """Bytes: the host's or, if that is less, what its cgroups are limited to. Free or not."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = cgroups.settings("memory", "memory.limit_in_bytes", "memory.max")
    return min([host, *(int(words[0]) for words in limits if words and words[0].isdigit())])
