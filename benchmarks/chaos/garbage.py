"""Garbage for all ports of a suite, from a process that does not belong to it: noise, and messages that are framed well
and whose content is invalid or false.
"""

import asyncio
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from random import Random

import msgspec
import zmq

from benchmarks.chaos.wires import Port
from services.worker.kv import rank_messages
from services.worker.kv.wire import protocol
from services.worker.kv.wire.tcp_streams import DIGEST_BYTES, HEARTBEAT, prefix
from shared.domain.cluster import ClusterDelta
from shared.domain.instance import InstanceLoad, Role
from shared.domain.kv import Codec
from shared.wire.broadcast import sealed
from shared.wire.envelope import Envelope, Kind, encode_body, pack
from shared.wire.messages import Heartbeat
from shared.wire.rpc_client import RpcClients
from shared.wire.sockets import Sockets
from tools.client import Address


@contextmanager
def rpc_clients() -> Iterator[RpcClients]:
    """Clients of a process that does not belong to the suite, without its key."""
    sockets = Sockets()
    try:
        with RpcClients(sockets) as clients:
            yield clients
    finally:
        sockets.close()


_MARK = "AAAAAAAA"  # replaced by bytes that are not UTF-8
_DEEP = b"\x91" * 50_000 + b"\xc0"
_DEEP_MAP = b"\x81\xa1a" * 30_000 + b"\xc0"


def noises(rng: Random) -> list[bytes]:
    """Bytes of port scanners and of other protocols."""
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
    """Messages of all protocols of the suite that arrive whole and must be dropped."""
    pull = protocol.encode_message(
        protocol.Pull(
            pull_id=1,
            transfer_id=_MARK,
            generation=7,
            fingerprint=_MARK,
            codec=Codec.RAW,
            layer_start=0,
            layer_end=1,
            token_start=0,
            token_end=40,
            head_start=0,
            head_end=4,
            rank=0,
            ranks=1,
            consumers=1,
            credit_bytes=1000,
            timeout_s=5.0,
        )
    )
    control = protocol.encode_message(rank_messages.Control(1, "no-such-key", rank_messages.Release(_MARK)))
    confirm = protocol.encode_message(protocol.Confirm(_MARK, 2**62, -1, 10**9))
    kv = (pull, control, confirm)
    singles = [
        b"",
        b"\xc1",
        b"\xff" * 100,
        rng.randbytes(2000),
        _DEEP,
        _DEEP_MAP,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        *kv,
        *(_not_utf8(each) for each in kv),
        *(protocol.sealed(_not_utf8(_unsealed(each))) for each in kv),
        *(protocol.sealed(each) for each in (b"", b"\xc1", _unsealed(pull)[:-3], _DEEP, _DEEP_MAP)),
        pull[:-3],
        _call("prefill", msgspec.Raw(_DEEP)),
        _call("no such method", encode_body(None)),
        _call("drain", encode_body({"timeout_s": "now"})),
        _call("prefill", encode_body({"job": 5})),
        _not_utf8(_call("release", encode_body({"transfer_ids": [_MARK]}))),
        _call("release", encode_body({"transfer_ids": ["unknown"] * 1000})),
        b"\x93\x01\x02\x03",
        pack([Envelope(99, 1, "", 0.0, encode_body(1))]),
        sealed(msgspec.msgpack.encode(Heartbeat("unknown", 1, Role.DECODE, False, InstanceLoad()))),
        sealed(msgspec.msgpack.encode(ClusterDelta(2**62, 1e18, whole=True))),
    ]
    return [*([each] for each in singles), [], [b"a", b"b"], [b"x"] * 100, [b"\x00" * (1 << 20)]]


def _call(method: str, body: msgspec.Raw) -> bytes:
    return pack([Envelope(Kind.CALL, 1, method, 5.0, body)])


def _unsealed(message: bytes) -> bytes:
    return message[: -len(protocol.sealed(b""))]


def _not_utf8(message: bytes) -> bytes:
    return message.replace(_MARK.encode(), b"\xff\xfe\xc0\xc1\xf5\xff\xfe\xff")


async def make_noise(ports: Iterable[Port], rng: Random) -> None:
    """Send all noises to all ports, one port after the other."""

    async def send_noise(port: Port, noise: bytes) -> None:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(2.0):
                reader, writer = await asyncio.open_connection(*port.address)
                try:
                    writer.write(noise)
                    await writer.drain()
                    async with asyncio.timeout(0.1):
                        await reader.read(1000)
                finally:
                    writer.close()

    for port in ports:
        await asyncio.gather(*(send_noise(port, noise) for noise in noises(rng)))


async def send_messages(ports: Sequence[Port], rng: Random) -> None:
    """Send all messages to all ports, by ZeroMQ or by the framing of KV over TCP."""
    invalid = messages(rng)
    await asyncio.to_thread(_send_by_zmq, [port.url for port in ports if port.scheme == "tcp"], invalid)
    await asyncio.to_thread(_send_by_tcp, [port.address for port in ports if port.scheme == "kv"], invalid)


def _send_by_tcp(addresses: list[Address], invalid: list[list[bytes]]) -> None:
    """Each message has a connection of its own, because most of them end it."""
    for address in addresses:
        for parts in invalid:
            header, payload = (*parts, b"")[0], b"".join(parts[1:])
            digest = protocol.checksum(payload).to_bytes(DIGEST_BYTES, "little") if payload else b""
            with suppress(OSError), socket.create_connection(address, timeout=2.0) as peer:  # emulated: no KV port
                peer.sendall(HEARTBEAT + prefix(len(header), len(payload)) + header + payload + digest)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(4096):
                    pass


def _send_by_zmq(urls: list[str], invalid: list[list[bytes]]) -> None:
    with zmq.Context() as context:
        sockets = []
        for url in urls:
            for kind in (zmq.DEALER, zmq.PUB):
                peer = context.socket(kind)
                peer.linger = 1000
                peer.connect(url)
                sockets.append(peer)
        time.sleep(0.5)  # a PUB drops messages before its peer has subscribed
        for parts in invalid:
            for peer in sockets:
                with suppress(zmq.ZMQError):
                    peer.send_multipart(parts or [b""], zmq.NOBLOCK)
        for peer in sockets:
            peer.close()
