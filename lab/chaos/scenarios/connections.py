"""Connections that say nothing or too little, a gateway that ends under load, and numbers that are none."""

import asyncio
import json
from contextlib import suppress

from lab.chaos import rude
from lab.chaos.arena import Arena
from lab.chaos.load import Address, fresh
from lab.chaos.scenario import Scenario

SILENT = 2000
DRIPS = 100
HEAD_S = 10.0  # the default of `head_timeout_s`
_PATIENCE_S = 15.0  # beyond HEAD_S


async def silent(arena: Arena) -> None:
    """Connections that send nothing: each is closed, and clients are served meanwhile."""
    await _all_closed(arena, SILENT, b"")


async def slow_heads_end(arena: Arena) -> None:
    """Heads that never end: each is given up, however its bytes come."""
    await _all_closed(arena, DRIPS, b"POST /v1/completions HTTP/1.1\r\nX-Slow: ")


async def _all_closed(arena: Arena, count: int, head: bytes) -> None:
    closed = 0

    async def one(number: int) -> None:
        nonlocal closed
        gone = await _until_closed(arena.gateways[number % len(arena.gateways)], head)
        closed += gone

    await rude.crowd(count, one)
    if closed < count:
        raise AssertionError(f"{count - closed} of {count} connections were open after {HEAD_S + _PATIENCE_S:g} s")


async def _until_closed(address: Address, head: bytes) -> bool:
    with suppress(OSError):
        reader, writer = await asyncio.open_connection(*address)
        gone = asyncio.ensure_future(reader.read())
        try:
            async with asyncio.timeout(HEAD_S + _PATIENCE_S):
                writer.write(head)
                while not gone.done():
                    if head:
                        writer.write(b"a")
                    await asyncio.wait([gone], timeout=0.5)
        except TimeoutError:
            return False
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            writer.transport.abort()
    return True


async def drained_gateway(arena: Arena) -> None:
    """SIGTERM: what it has begun ends, and what comes meanwhile is refused with Retry-After."""
    (name, *_), address = arena.named("gateway"), arena.gateways[0]
    ask = fresh(rude.wanting(dict(arena.asks[0].body), max_tokens=30))
    streams = [asyncio.ensure_future(rude.body_of(address, ask, 30.0)) for _ in range(4)]
    await asyncio.sleep(0.2)
    old = arena.processes.stop(name)
    replies = await asyncio.gather(*streams)
    broken = [reply for reply in replies if reply is None or reply.status != 200 or not reply.finish_reason]
    await arena.processes.back(old)
    if broken:
        raise AssertionError(f"{len(broken)} of {len(streams)} streams did not end: {broken[0]}")


async def infinite_numbers(arena: Arena) -> None:
    """In bodies of clients and of operators: refused by a 4xx that names the field."""
    plain = {key: value for key, value in arena.asks[0].body.items() if key not in ("stream", "stream_options")}
    monitor = next(port for port in arena.ports if port.service == "monitor" and port.purpose == "http")
    placement = {"placement": {"name": "adaptive", "parameters": {"x": float("inf")}}}
    wrong = []
    for address, method, path, body in (
        *((arena.gateways[0], "POST", "/v1/completions", {**plain, "temperature": float(n)}) for n in ("inf", "nan")),
        (arena.gateways[0], "POST", "/v1/completions", {**plain, "repetition_penalty": float("nan")}),
        ((monitor.host, monitor.port), "PUT", "/policies", placement),
    ):
        status = await _status_of(address, method, path, json.dumps(body).encode())
        if not 400 <= status < 500:
            wrong.append(f"{method} {path}: {status}")
    if wrong:
        raise AssertionError("; ".join(wrong))


async def _status_of(address: Address, method: str, path: str, body: bytes) -> int:
    async with asyncio.timeout(10.0):
        reader, writer = await asyncio.open_connection(*address)
        try:
            head = f"{method} {path} HTTP/1.1\r\nhost: chaos\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
            return int((await reader.readline()).split()[1])
        finally:
            writer.transport.abort()


CONNECTIONS = (
    Scenario("silent-connections", f"{SILENT} connections that send nothing", silent, bound_s=60.0),
    Scenario("endless-heads", f"{DRIPS} request heads that never end", slow_heads_end, bound_s=60.0),
    Scenario("gateway-drain", "SIGTERM to a gateway with streams", drained_gateway, errors=True, breaks=True),
    Scenario("infinite-numbers", "NaN and infinity in bodies", infinite_numbers),
)
