"""A TCP proxy on 127.0.0.1 that can become a black hole: connections stay, nothing passes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_CHUNK = 64 * 2**10


class Proxy:
    """Forwards between its own port and a target address."""

    def __init__(self, target: str) -> None:
        self._host, port = target.rsplit(":", 1)
        self._port = int(port)
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""
        self.bytes_up = 0  # towards the target

    def pause(self) -> None:
        """From now on nothing is forwarded, and new connections are accepted all the same."""
        self._open.clear()

    def go_on(self) -> None:
        self._open.set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with suppress(OSError):
            await self._open.wait()
            there, back = await asyncio.open_connection(self._host, self._port)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pump(reader, back, up=True))
                    group.create_task(self._pump(there, writer, up=False))
            except* OSError:
                pass
            finally:
                back.close()
                writer.close()

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, up: bool
    ) -> None:
        while data := await source.read(_CHUNK):
            await self._open.wait()
            self.bytes_up += len(data) if up else 0
            sink.write(data)
            await sink.drain()
        sink.write_eof()


@asynccontextmanager
async def proxy_to(target: str) -> AsyncIterator[Proxy]:
    proxy = Proxy(target)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
