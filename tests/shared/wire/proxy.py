"""TCP between two addresses, to be held, cut or spoiled."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tests.ports import free_address

Change = Callable[[bytes], bytes]
_HEARTBEAT = 12  # bytes at most


def _unchanged(data: bytes) -> bytes:
    return data


class Proxy:
    """What passes on of that which the client says is `up` of it, of what the server says `down`.

    `hold` lets nothing pass, and nothing end.
    """

    def __init__(self, target: str) -> None:
        self.address = free_address()
        self.hold = False
        self.up: Change = _unchanged
        self.down: Change = _unchanged
        self._target = target
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def spoil_next(self, side: str, change: Change) -> None:
        """Change the next piece that is more than a heartbeat."""

        def once(data: bytes) -> bytes:
            if len(data) <= _HEARTBEAT:
                return data
            setattr(self, side, _unchanged)
            return change(data)

        setattr(self, side, once)

    def cut(self) -> None:
        """End all connections rudely."""
        for writer in self._writers:
            writer.transport.abort()

    @asynccontextmanager
    async def running(self) -> "AsyncIterator[Proxy]":
        host, port = self.address.removeprefix("tcp://").split(":")
        server = await asyncio.start_server(self._accept, host, int(port))
        try:
            yield self
        finally:
            server.close()
            self.cut()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._target.removeprefix("tcp://").split(":")
        try:
            there_reader, there_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._writers += [writer, there_writer]
        for source, sink, side in ((reader, there_writer, "up"), (there_reader, writer, "down")):
            self._tasks.add(asyncio.create_task(self._pass(source, sink, side)))

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, side: str) -> None:
        try:
            while data := await source.read(65536):
                while self.hold:
                    await asyncio.sleep(0.01)
                sink.write(getattr(self, side)(data))
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            while self.hold:
                await asyncio.sleep(0.01)
            sink.close()
