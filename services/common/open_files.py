"""How many files a process may have open: each connection is one."""

import logging
import resource

log = logging.getLogger(__name__)

OTHER_FILES = 512  # open at once, beside the connections


def allow_connections(count: int) -> None:
    """Raises this process's limit of open files to what so many connections want, or as far as it
    may. The system's usual one is less than a server's bound, and whoever reaches a port would fill
    it."""
    needed = count + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        log.warning("%d connections want %d open files, %d are allowed", count, needed, allowed)
