"""Hostile clients of the API: they leave, do not read, send incomplete requests or too many at once."""

import asyncio
import socket
from collections.abc import Callable, Container, Coroutine, Sequence
from contextlib import suppress
from random import Random
from typing import Any

from benchmarks.chaos.load import fresh
from benchmarks.chaos.proxy import reset
from tools.client import COMPLETIONS, Address, Ending, Request, Response, send

_RECV_BYTES = 4096


async def leave(address: Address, request: Request, after_s: float) -> None:
    """Send a request, and reset the connection after a while."""
    with suppress(OSError):
        _, writer = await asyncio.open_connection(*address)
        writer.write(request.encode())
        await asyncio.sleep(after_s)
        reset(writer)


async def leaving_clients(
    addresses: Sequence[Address], requests: Sequence[Request], count: int, seconds: float, rng: Random
) -> None:
    """Clients that come within some seconds, and leave while their requests are queued, computed or transferred."""

    async def client(number: int) -> None:
        await asyncio.sleep(rng.uniform(0.0, seconds))
        await leave(addresses[number % len(addresses)], fresh(rng.choice(requests)), rng.uniform(0.0, 0.8))

    await crowd(count, client)


async def never_read(address: Address, request: Request, seconds: float) -> None:
    """Request a stream and read nothing of it, so that it piles up at the server."""
    loop = asyncio.get_running_loop()
    with suppress(OSError), socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECV_BYTES)
        raw.setblocking(False)
        await loop.sock_connect(raw, address)
        await loop.sock_sendall(raw, request.encode())
        await asyncio.sleep(seconds)


async def hold_open(address: Address, head: bytes, seconds: float, beat_s: float = 0.5) -> bool:
    """Send the beginning of a request head, and a byte more each beat; without a head nothing.

    Returns whether the server closed the connection in that time.
    """
    with suppress(OSError):
        reader, writer = await asyncio.open_connection(*address)
        gone = asyncio.ensure_future(reader.read())
        try:
            async with asyncio.timeout(seconds):
                writer.write(head)
                while not gone.done():
                    writer.write(b"a" if head else b"")
                    await asyncio.wait([gone], timeout=beat_s)
        except TimeoutError:
            return False
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            writer.transport.abort()
    return True


async def long_head(address: Address, size_bytes: int) -> int:
    """Send headers without an end; returns the bytes that the server accepted before it closed the connection."""
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


def changed(request: Request, **more: Any) -> Request:
    """A completion with the body of a steady user's request and other fields."""
    return Request(COMPLETIONS, {**request.body, **more}, key="hostile")


async def body_of(address: Address, request: Request, seconds: float) -> Response:
    """The answer; one that has hung when it did not end in that time, after which the client leaves."""
    try:
        async with asyncio.timeout(seconds):
            return await send(address, request, hung_s=seconds + 1.0)
    except TimeoutError:
        return Response(Ending.HUNG)


async def require(
    address: Address, request: Request, statuses: Container[int], reason: str = "", seconds: float = 15.0
) -> None:
    """Send a request and leave after that time. Raises AssertionError unless the answer has one of the statuses.

    0 stands for no answer. An answer with status 400 has to give the reason.
    """
    answer = await body_of(address, request, seconds)
    status = answer.status if answer.ending in (Ending.DONE, Ending.ERROR) else 0
    if status not in statuses or (status == 400 and reason not in answer.error):
        got = f"{answer.status or answer.ending} {answer.error[:200]}"
        raise AssertionError(f"{request.method} {request.path} of {str(request.body)[:80]}… was answered by {got}")


async def crowd(count: int, client: Callable[[int], Coroutine[Any, Any, Any]]) -> None:
    """Run `count` clients at once; each gets its number."""
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(client(number))
