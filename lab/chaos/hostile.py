"""Clients that nobody wishes for: they leave, do not read, never finish their sentence, or ask for too much at once."""

import asyncio
import json
import socket
import struct
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import msgspec
import zmq

from lab.chaos import framing
from lab.chaos.load import Address, Ask, Reply, encode, send
from lab.chaos.proxy import Port
from services.worker.kv import rank_links
from services.worker.kv.wire import protocol
from services.worker.kv.wire.tcp_framing import HEARTBEAT
from shared.domain.cluster import ClusterDelta
from shared.domain.instance import InstanceLoad, Role
from shared.domain.kv import Codec
from shared.wire.broadcast import sealed
from shared.wire.envelope import Envelope, Kind, encode_body, pack
from shared.wire.messages import Heartbeat

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


# MERGED garbage.py
# Input that no peer of ours sends: noise on a TCP port, and well-framed messages that mean nothing or lie.


_MARK = "AAAAAAAA"  # becomes bytes that are no UTF-8
_DEEP = b"\x91" * 50_000 + b"\xc0"
_DEEP_MAP = b"\x81\xa1a" * 30_000 + b"\xc0"


def noises(rng: Random) -> list[bytes]:
    """What a port scanner, another protocol, or nobody at all would send."""
    return [
        b"",
        b"\x00" * 4096,
        rng.randbytes(8192),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" + b"\x00" * 8 + b"\x7f\x03",
        struct.pack(">Q", 2**63),
        b"\xff" + b"\x00" * 7 + b"\x01\x7f\x03\x00NULL" + b"\x00" * 48 + b"\x02" * 64,
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n{",
        b"\x16\x03\x01" + rng.randbytes(300),
    ]


def messages(rng: Random) -> list[list[bytes]]:
    """Messages that arrive whole and must be dropped: of every protocol here, each with something wrong."""
    pull = protocol.encode_message(protocol.Pull(1, _MARK, 7, _MARK, Codec.RAW, 0, 1, 0, 40, 0, 4, 0, 1, 1, 1000, 5.0))
    control = protocol.encode_message(rank_links.Control(1, "no-such-key", rank_links.Release(_MARK)))
    confirm = protocol.encode_message(protocol.Confirm(_MARK, 2**62, -1, 10**9))
    deep_call = _call("prefill", msgspec.Raw(_DEEP))
    singles = [
        b"",
        b"\xc1",
        b"\xff" * 100,
        rng.randbytes(2000),
        _DEEP,
        _DEEP_MAP,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        pull,
        control,
        confirm,
        *(_spoilt(each) for each in (pull, control, confirm)),
        *(protocol.sealed(_spoilt(_body(each))) for each in (pull, control, confirm)),
        *(protocol.sealed(each) for each in (b"", b"\xc1", _body(pull)[:-3], _DEEP, _DEEP_MAP)),
        pull[:-3],
        deep_call,
        _call("no such method", encode_body(None)),
        _call("drain", encode_body({"timeout_s": "now"})),
        _call("prefill", encode_body({"job": 5})),
        _spoilt(_call("release", encode_body({"transfer_ids": [_MARK]}))),
        _call("release", encode_body({"transfer_ids": ["unknown"] * 1000})),
        b"\x93\x01\x02\x03",
        pack([Envelope(99, 1, "", 0.0, encode_body(1))]),
        sealed(msgspec.msgpack.encode(Heartbeat("nobody", 1, Role.DECODE, False, InstanceLoad()))),
        sealed(msgspec.msgpack.encode(ClusterDelta(2**62, 1e18, whole=True))),
    ]
    return [*([each] for each in singles), [], [b"a", b"b"], [b"x"] * 100, [b"\x00" * (1 << 20)]]


def _call(method: str, body: msgspec.Raw) -> bytes:
    return pack([Envelope(Kind.CALL, 1, method, 5.0, body)])


def _body(message: bytes) -> bytes:
    """A KV message without its seal."""
    return message[: -len(protocol.sealed(b""))]


def _spoilt(message: bytes) -> bytes:
    return message.replace(_MARK.encode(), b"\xff\xfe\xc0\xc1\xf5\xff\xfe\xff")


async def make_noise(ports: Iterable[Port], rng: Random) -> None:
    """All noises on all ports, one port after the other."""
    for port in ports:
        await asyncio.gather(*(_noise(port, noise) for noise in noises(rng)))


async def _noise(port: Port, noise: bytes) -> None:
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection(port.host, port.port)
            try:
                writer.write(noise)
                await writer.drain()
                async with asyncio.timeout(0.1):
                    await reader.read(1000)
            finally:
                writer.close()


async def say(ports: Sequence[Port], rng: Random) -> None:
    """All messages on all ports, from sockets of every kind that could be let in."""
    said = messages(rng)
    await asyncio.to_thread(_say, [f"tcp://{port.host}:{port.port}" for port in ports if port.scheme == "tcp"], said)
    await asyncio.to_thread(_say_over_tcp, [(port.host, port.port) for port in ports if port.scheme == "kv"], said)


def _say_over_tcp(places: list[tuple[str, int]], said: list[list[bytes]]) -> None:
    """Each message over a connection of its own: most of them end it."""
    for place in places:
        for parts in said:
            header, payload = (*parts, b"")[0], b"".join(parts[1:])
            with suppress(OSError), socket.create_connection(place, timeout=2.0) as made:  # emulated ones have no KV
                made.sendall(HEARTBEAT + framing.said(header, payload))
                made.shutdown(socket.SHUT_WR)
                while made.recv(4096):
                    pass


def _say(addresses: list[str], said: list[list[bytes]]) -> None:
    with zmq.Context() as context:
        sockets = []
        for address in addresses:
            for kind in (zmq.DEALER, zmq.PUB):
                made = context.socket(kind)
                made.linger = 1000
                made.connect(address)
                sockets.append(made)
        time.sleep(0.5)  # a PUB drops what it sends before its peer has subscribed
        for parts in said:
            for made in sockets:
                with suppress(zmq.ZMQError):
                    made.send_multipart(parts or [b""], zmq.NOBLOCK)
        for made in sockets:
            made.close()
