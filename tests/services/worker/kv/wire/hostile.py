"""What a stranger sends to KV sockets, and what one that serves still does."""

import msgspec
import torch
import zmq
import zmq.asyncio

from services.worker.kv.wire.endpoint import KvEndpoint
from services.worker.kv.wire.frames import Confirm, Failed, Frame, Message, Pull, decode_request, encode_message, sealed
from services.worker.kv.wire.transport import ZmqListener, ZmqTransport
from shared.domain.kv import Codec
from tests.services.worker.kv.rig import Rig, model_kv, stage


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


def dealer(context: zmq.Context, endpoint: KvEndpoint) -> zmq.Socket:  # type: ignore[type-arg]
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 1000)
    made.connect(endpoint.address)
    return made


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
    with zmq.Context() as context, dealer(context, exporter) as peer:
        peer.send(encode_message(pull(credit_bytes=1 << 20)))
        return peer.recv_multipart()


def next_pull(transport: ZmqTransport, listener: ZmqListener) -> tuple[bytes, Pull]:
    for _ in range(200):
        transport.wait(0.1)
        while (message := listener.receive()) is not None:
            request = decode_request(message[1][0])
            if isinstance(request, Pull):
                return message[0], request
    raise AssertionError("no pull came")
