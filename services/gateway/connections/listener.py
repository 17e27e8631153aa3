"""Where clients connect: accepted by ourselves, in the loop's turn in which the kernel tells.

The loop's own server has turns between the accept and the connection. One that closes in between
loses who was accepted: asyncio's transports refuse a server that is closed, and a cancelled
`sock_accept` keeps the socket.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

log = logging.getLogger(__name__)

_BACKLOG = 2048
_AT_ONCE = 100  # connections in one turn of the loop, which has others to serve
_PAUSE_S = 0.1  # when no more can be accepted: too many files are open


class Listener:
    """Binds on construction, so that port 0 is known before it listens; a taken port is OSError.

    `take` is given each accepted connection, which does not block, and its peer's address.
    """

    def __init__(self, host: str, port: int, take: Callable[[socket.socket, str], None]) -> None:
        self._socket = _bound(host, port)
        self._take = take
        self._pause: asyncio.TimerHandle | None = None

    @property
    def listens(self) -> bool:
        """Or will, once it is started."""
        return self._socket.fileno() != -1

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def start(self) -> None:
        """On the running loop."""
        self._socket.listen(_BACKLOG)
        self._attend()

    def close(self) -> None:
        """Takes in first who has connected already."""
        self._rest()
        with contextlib.suppress(OSError):  # BlockingIOError when there is no more
            while True:
                self._accept()
        self._socket.close()

    def stop(self) -> None:
        """Takes in nobody any more."""
        self._rest()
        self._socket.close()

    def _attend(self) -> None:
        asyncio.get_running_loop().add_reader(self._socket, self._come)

    def _rest(self) -> None:
        if self.listens:
            asyncio.get_running_loop().remove_reader(self._socket)
        if self._pause is not None:
            self._pause.cancel()

    def _come(self) -> None:
        try:
            for _ in range(_AT_ONCE):
                self._accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("no connection can be accepted: %s", error)
            self._rest()
            self._pause = asyncio.get_running_loop().call_later(_PAUSE_S, self._attend)

    def _accept(self) -> None:
        connection, address = self._socket.accept()
        connection.setblocking(False)
        self._take(connection, str(address[0]))


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is named: without it the first events of an
    # answer wait up to 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # with its neighbours
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener
