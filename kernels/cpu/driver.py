"""The thread that runs steps, one after the other (native/driver.cc), and the ways to it and back.

The interpreter is not needed in between: whoever launches goes on, and may launch the next step
while one runs.
"""

import ctypes
import os
import struct

from kernels.cpu.library import Library

_ADDRESS = struct.Struct("P")


class Driver:
    """Drives a team of threads, itself among them. What is given to it must outlive it."""

    def __init__(
        self,
        library: Library,
        threads: int,
        program: ctypes.Structure,
        tasks: "ctypes.Array[ctypes.c_int]",
        number_format: int,
    ) -> None:
        """Raises MemoryError where no thread can be made."""
        self._library = library
        self._taken, self._launches = os.pipe2(os.O_CLOEXEC)
        self.ended = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        """Counts the launches that have ended and were not waited for."""
        self._driver = library.start_driver(
            threads,
            ctypes.addressof(program),
            ctypes.addressof(tasks),
            number_format,
            self._taken,
            self.ended,
        )
        if not self._driver:
            self._close(self._taken, self._launches, self.ended)
            raise MemoryError(f"{threads} threads cannot be made")

    def launch(self, launch: ctypes.Structure) -> None:
        """`launch` must live until it was waited for."""
        os.write(self._launches, _ADDRESS.pack(ctypes.addressof(launch)))

    def wait(self) -> None:
        """Until the launch has ended that is the first of those not waited for."""
        os.eventfd_read(self.ended)

    def end(self) -> None:
        """What was launched ends first."""
        self._close(self._launches)
        self._library.end_driver(self._driver)
        self._close(self._taken, self.ended)

    @staticmethod
    def _close(*descriptors: int) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
