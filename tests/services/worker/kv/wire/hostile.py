"""What a stranger sends to KV sockets, and what one that serves still does."""

import socket
from collections.abc import Sequence

import msgspec
import torch

from services.worker.kv.wire.endpoint import KvEndpoint
from services.worker.kv.wire.protocol import (
    Confirm,
    Failed,
    Frame,
    Listener,
    Message,
    Pull,
    Transport,
    checksum,
    decode_reply,
    decode_request,
    encode_message,
    sealed,
)
from services.worker.kv.wire.tcp_framing import HEARTBEAT
from services.worker.kv.wire.tcp_streams import host_and_port
from shared.domain.kv import Codec
from tests.services.worker.kv.rig import Rig, model_kv, stage
from tests.services.worker.kv.wire.proxy import framed, read_message


# Well-framed messages on which msgspec raises what is no error of its own.
def not_utf8(message: Message) -> bytes:
    return sealed(msgspec.msgpack.encode(message).replace(b"~~", b"\xff\xfe"))


NOT_UTF8 = not_utf8(Confirm("~~", 7, 0, 1))
NOT_UTF8_REPLY = not_utf8(Failed(1, "~~", ""))
NESTED = b"\x93\xa6Cancel\x01" + b"\x91" * 60_000 + b"\xc0"
SEALED_NESTED = sealed(NESTED)


def assert_serves(rig: Rig, exporter: KvEndpoint) -> None:
    """It still does its work."""
    kv = model_kv(40)
    stage(exporter, kv, "after")
    got = rig.load(rig.endpoint(), rig.handle([exporter], 40, "after"))
    assert rig.result().ok
    assert torch.equal(got.kv, kv)


class Stranger:
    """A plain socket that frames what it sends as an importer does."""

    def __init__(self, address: str) -> None:
        self.socket = socket.create_connection(host_and_port(address), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(HEARTBEAT)

    def __enter__(self) -> "Stranger":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, message: bytes) -> None:
        self.send_multipart([message])

    def send_multipart(self, parts: Sequence[bytes]) -> None:
        self.socket.sendall(framed(list(parts)))

    def recv_multipart(self) -> list[bytes]:
        while not (parts := read_message(self.socket)):
            pass
        return parts[:2]


def pull(**changes: object) -> Pull:
    fields = {
        "pull_id": 1,
        "transfer_id": "t",
        "generation": 7,
        "fingerprint": "model",
        "codec": Codec.RAW,
        "layer_start": 0,
        "layer_end": 3,
        "token_start": 0,
        "token_end": 40,
        "head_start": 0,
        "head_end": 4,
        "rank": 0,
        "ranks": 1,
        "consumers": 1,
        "credit_bytes": 1000,
        "timeout_s": 5.0,
    }
    return Pull(**(fields | changes))  # type: ignore[arg-type]


def renumbered(header: Frame, pull_id: int) -> bytes:
    return encode_message(msgspec.structs.replace(header, pull_id=pull_id))


def true_frame(rig: Rig, exporter: KvEndpoint) -> list[bytes]:
    stage(exporter, model_kv(40))
    with Stranger(exporter.address) as peer:
        peer.send(encode_message(pull(credit_bytes=1 << 20)))
        header, payload = peer.recv_multipart()
    frame = decode_reply(header)
    assert isinstance(frame, Frame)
    return [encode_message(msgspec.structs.replace(frame, checksum=checksum(payload))), payload]


def say(listener: Listener, peer: bytes, parts: list[bytes]) -> None:
    """To an importer that has connected to this listener."""
    listener.send(peer, parts[0], parts[1] if len(parts) > 1 else None)


def next_pull(transport: Transport, listener: Listener) -> tuple[bytes, Pull]:
    for _ in range(200):
        transport.wait(0.1)
        while (message := listener.receive()) is not None:
            request = decode_request(message[1][0])
            if isinstance(request, Pull):
                return message[0], request
    raise AssertionError("no pull came")
