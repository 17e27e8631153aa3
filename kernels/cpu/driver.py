"""The thread that runs steps, one after the other (native/driver.cc), and the ways to it and back.

The interpreter is not needed in between: whoever launches goes on, and may launch the next step
while one runs.
"""

import ctypes
import os
import struct

from kernels.cpu import structures as c
from kernels.cpu.library import Library

_ADDRESS = struct.Struct("P")


class Driver:
    """Drives a team of threads, itself among them. What is given to it must outlive it."""

    def __init__(
        self,
        library: Library,
        threads: int,
        program: ctypes.Structure,
        number_format: int,
    ) -> None:
        """Raises MemoryError where no thread can be made."""
        self._library = library
        self._taken, self._launches = os.pipe2(os.O_CLOEXEC)
        self._ended = os.eventfd(0, os.EFD_CLOEXEC)
        """Grows with each end."""
        self._driver = library.start_driver(
            threads,
            ctypes.addressof(program),
            number_format,
            self._taken,
            self._ended,
        )
        if not self._driver:
            self._close(self._taken, self._launches, self._ended)
            raise MemoryError(f"{threads} threads cannot be made")

    def launch(self, launch: c.Launch) -> None:
        """`launch` must live until it has ended."""
        os.write(self._launches, _ADDRESS.pack(ctypes.addressof(launch)))

    def wait(self, launch: c.Launch) -> None:
        """Until it has ended. A signal's handler that raises leaves it before, and harms no other
        wait: the launch itself says whether it has ended, the eventfd only wakes."""
        while not launch.ended_ns:
            os.read(self._ended, 8)

    def end(self) -> None:
        """What was launched ends first."""
        self._close(self._launches)
        self._library.end_driver(self._driver)
        self._close(self._taken, self._ended)

    @staticmethod
    def _close(*descriptors: int) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
