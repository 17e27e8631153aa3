"""Python's looks for garbage, kept short: while one lasts nothing else happens in the process.

A full look goes through every object there is. Most of a service's, some hundred thousand, are its
modules, and stay as long as it does: it took 30 to 100 ms, and came every few seconds.
"""

import functools
import gc


@functools.cache
def set_aside() -> None:
    """From now on no look goes through what is there now. Once in a process's life, when all that
    it needs is loaded."""
    gc.collect()
    gc.freeze()
