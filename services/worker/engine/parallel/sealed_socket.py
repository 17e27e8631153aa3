"""A connection without TLS on which nobody on the way says anything: each record has a proof.

    record = u32 size | payload | HMAC-SHA256(key, u64 number | payload)        (little-endian)

Either end has a key of its own, and numbers its records from 0: what is made up, altered, left out,
told again or sent back ends the connection before anybody reads it. It can be read by others.
"""

import hmac
import socket
import struct

from services.worker.engine.parallel.tls_socket import send_all

_SIZE, _NUMBER = struct.Struct("<I"), struct.Struct("<Q")
_PROOF = 32
_LARGEST = 1 << 16


class SealedSocket:
    """Never waits but in `sendall`, and has the methods of a socket that `Channel` uses. Frames are
    read to their end, and each begins a record: so what poll does not see, in the record that came
    last, is never a frame's beginning."""

    def __init__(self, inner: socket.socket, own_key: bytes, their_key: bytes) -> None:
        inner.setblocking(False)
        self._inner = inner
        self._own_key, self._their_key = own_key, their_key
        self._sent, self._seen = 0, 0
        self._leaving, self._leaving_size = memoryview(b""), 0
        self._coming, self._has = bytearray(_SIZE.size), 0
        self._open = memoryview(b"")

    def fileno(self) -> int:
        return self._inner.fileno()

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        """0 at the end. Raises BlockingIOError, and ConnectionResetError."""
        if not self._open and not self._take():
            return 0
        count = min(nbytes or len(buffer), len(self._open))
        buffer[:count] = self._open[:count]
        self._open = self._open[count:]
        return count

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:
        """Raises BlockingIOError, behind which the same data has to come again, and OSError."""
        if not self._leaving:
            payload = bytes(memoryview(data).cast("B")[:_LARGEST])
            proof = _proof(self._own_key, self._sent, payload)
            self._leaving = memoryview(_SIZE.pack(len(payload)) + payload + proof)
            self._leaving_size = len(payload)
            self._sent += 1
        while self._leaving:
            self._leaving = self._leaving[self._inner.send(self._leaving) :]
        return self._leaving_size

    def sendall(self, data: bytes | memoryview) -> None:
        """Waits for the other end to take it. Raises OSError."""
        send_all(self, data)

    def close(self) -> None:
        self._inner.close()

    def _take(self) -> bool:
        """Reads a record; whether there is one."""
        if self._has < _SIZE.size and not self._fill():
            return False
        if len(self._coming) == _SIZE.size:
            (size,) = _SIZE.unpack(self._coming)
            if not 0 < size <= _LARGEST:
                raise ConnectionResetError("what has come is no record")
            self._coming = self._coming + bytes(size + _PROOF)
        if not self._fill():
            return False
        payload = bytes(memoryview(self._coming)[_SIZE.size : -_PROOF])
        proof = _proof(self._their_key, self._seen, payload)
        if not hmac.compare_digest(proof, self._coming[-_PROOF:]):
            raise ConnectionResetError("what has come is not the other end's")
        self._seen += 1
        self._coming, self._has = bytearray(_SIZE.size), 0
        self._open = memoryview(payload)
        return True

    def _fill(self) -> bool:
        rest = memoryview(self._coming)[self._has :]
        while rest:
            count = self._inner.recv_into(rest)
            if not count:
                return False
            self._has += count
            rest = rest[count:]
        return True


def _proof(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + payload, "sha256")
