"""What the endpoint does with input that no peer of ours sends: drop, count, and go on."""

import socket
import struct

import msgspec
import pytest
import torch
import zmq
from kv_rig import Rig, model_kv, stage

from services.worker.kv.wire.endpoint import KvEndpoint
from services.worker.kv.wire.frames import MAX_MESSAGE_BYTES, Frame, Pull, decode_reply, decode_request, encode_message
from services.worker.kv.wire.importing import PullLimits
from services.worker.kv.wire.transport import ZmqListener, ZmqTransport


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
        "pull_id": 1, "transfer_id": "t", "generation": 7, "fingerprint": "model", "token_start": 0, "token_end": 40,
        "head_start": 0, "head_end": 4, "rank": 0, "ranks": 1, "consumers": 1, "credit_bytes": 1000, "timeout_s": 5.0,
    }  # fmt: skip
    return Pull(**(fields | changes))  # type: ignore[arg-type]


def test_garbage_is_dropped_and_counted(rig: Rig) -> None:
    exporter = rig.endpoint()
    garbage = [[b""], [b"\xff" * 100], [b"a", b"b"], [b"\x93\x01\x02\x03"], [encode_message(pull())[:-3]]]
    with zmq.Context() as context, dealer(context, exporter) as peer:
        for parts in garbage:
            peer.send_multipart(parts)
        peer.send(encode_message(pull(generation=1)))
        assert decode_reply(peer.recv()).fault == "stale_generation"  # after the garbage, in order
    assert exporter.server_counters.dropped == len(garbage)
    assert_serves(rig, exporter)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_start": 5, "token_end": 5}, {"token_start": -1}, {"head_end": 5}, {"head_start": -1},
        {"credit_bytes": 0}, {"credit_bytes": 1 << 40}, {"timeout_s": -1.0}, {"timeout_s": 1e9},
    ],
)  # fmt: skip
def test_pulls_out_of_range_are_refused(rig: Rig, changes: dict[str, object]) -> None:
    exporter = rig.endpoint()
    with zmq.Context() as context, dealer(context, exporter) as peer:
        peer.send(encode_message(pull(**changes)))
        assert decode_reply(peer.recv()).fault == "invalid_request"


def test_oversized_messages_cost_their_sender_the_connection(rig: Rig) -> None:
    exporter = rig.endpoint()
    with zmq.Context() as context, dealer(context, exporter) as peer:
        monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        peer.send(b"x" * (MAX_MESSAGE_BYTES + 1))
        assert monitor.poll(5000)
        peer.disable_monitor()
    assert_serves(rig, exporter)


def test_raw_bytes_on_the_port_do_no_harm(rig: Rig) -> None:
    exporter = rig.endpoint()
    host, _, port = exporter.address.removeprefix("tcp://").rpartition(":")
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, bytes(range(256)) * 64, struct.pack(">Q", 2**63)):
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(noise)
    assert_serves(rig, exporter)


def test_with_curve_only_holders_of_the_key_get_anything(rig: Rig) -> None:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    exporter, importer = rig.endpoint(curve=(public, secret)), rig.endpoint(curve=(public, secret))
    stranger = rig.endpoint(limits=PullLimits(connect_timeout_s=0.5))
    kv = model_kv(40)
    stage(exporter, kv)
    rig.load(stranger, rig.handle([exporter], 40))
    assert not rig.result().ok
    got = rig.load(importer, rig.handle([exporter], 40))
    assert rig.result().ok
    assert torch.equal(got.kv, kv)


def test_an_exporter_that_lies_fails_the_pull_only(rig: Rig) -> None:
    """Headers without payload, frames of another transfer, text: the import fails closed, the puller lives."""
    transport = ZmqTransport()
    listener = transport.listen("tcp://127.0.0.1:*")
    exporter, importer = rig.endpoint(), rig.endpoint()
    handle = rig.handle([exporter], 40, endpoints=(listener.address,))
    frame = _true_frame(rig, exporter)
    lies = [[b"\xff\xff"], [frame[0]], [frame[0], frame[1][:-4]], [frame[0], frame[1], b"more"]]
    for number, lie in enumerate(lies):
        got = rig.load(importer, handle, timeout_s=1.0)
        peer, request = _next_pull(transport, listener)
        header = decode_reply(lie[0]) if number else None
        parts = lie if header is None else [_renumbered(header, request.pull_id), *lie[1:]]
        listener._router.send_multipart([peer, *parts])
        result = rig.result()
        assert not result.ok
        assert not got.writes
    transport.close()
    assert_serves(rig, exporter)


def _renumbered(header: Frame, pull_id: int) -> bytes:
    return encode_message(msgspec.structs.replace(header, pull_id=pull_id))


def _true_frame(rig: Rig, exporter: KvEndpoint) -> list[bytes]:
    stage(exporter, model_kv(40))
    with zmq.Context() as context, dealer(context, exporter) as peer:
        peer.send(encode_message(pull(credit_bytes=1 << 20)))
        return peer.recv_multipart()


def _next_pull(transport: ZmqTransport, listener: ZmqListener) -> tuple[bytes, Pull]:
    for _ in range(200):
        transport.wait(0.1)
        while (message := listener.receive()) is not None:
            request = decode_request(message[1][0])
            if isinstance(request, Pull):
                return message[0], request
    raise AssertionError("no pull came")
