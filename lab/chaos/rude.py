"""Clients that nobody wishes for: they leave, do not read, never finish their sentence, or ask for too much at once."""

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from lab.chaos.client import Ask, Reply, encode, send
from lab.chaos.load import Address

_RECV_BYTES = 4096


async def leave(address: Address, ask: Ask, after_s: float) -> None:
    """Ask, and reset the connection after a while, whatever has come."""
    with suppress(OSError):
        _, writer = await asyncio.open_connection(*address)
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.write(encode(ask))
        await asyncio.sleep(after_s)
        writer.transport.abort()


async def never_read(address: Address, ask: Ask, seconds: float) -> None:
    """Ask for a stream and let it pile up at the server."""
    loop = asyncio.get_running_loop()
    with suppress(OSError), socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECV_BYTES)
        raw.setblocking(False)
        await loop.sock_connect(raw, address)
        await loop.sock_sendall(raw, encode(ask))
        await asyncio.sleep(seconds)


async def drip(address: Address, seconds: float) -> None:
    """A head that comes a byte a tenth of a second, and never ends."""
    with suppress(OSError):
        _, writer = await asyncio.open_connection(*address)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nX-Slow: ")
        for _ in range(int(seconds / 0.1)):
            writer.write(b"a")
            await asyncio.sleep(0.1)
        writer.transport.abort()


async def long_head(address: Address, size_bytes: int) -> int:
    """Headers without an end; how many bytes were taken before the server hung up."""
    sent, line = 0, b"X-Long: " + b"a" * 8000 + b"\r\n"
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(10.0):
            _, writer = await asyncio.open_connection(*address)
            try:
                writer.write(b"POST /v1/completions HTTP/1.1\r\n")
                while sent < size_bytes:
                    writer.write(line)
                    await writer.drain()
                    sent += len(line)
            finally:
                writer.transport.abort()
    return sent


def wanting(body: dict[str, Any], **more: Any) -> Ask:
    """A body of a steady user's request with other wishes."""
    return Ask("rude", "/v1/completions", {**body, **more})


async def body_of(address: Address, ask: Ask, seconds: float) -> Reply | None:
    """Its answer; None when there was none in that time, and then the client leaves."""
    try:
        async with asyncio.timeout(seconds):
            return await send(address, ask, hung_s=seconds + 1.0)
    except TimeoutError:
        return None


async def crowd(count: int, make: Callable[[int], Coroutine[Any, Any, Any]]) -> None:
    """So many of them at once."""
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(make(number))


def size_of(ask: Ask) -> int:
    """Bytes of a body."""
    return len(json.dumps(ask.body))
