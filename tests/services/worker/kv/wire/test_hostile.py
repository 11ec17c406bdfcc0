"""What the endpoint does with input that no peer of ours sends: drop, count, and go on."""

import asyncio
import socket
import struct
import threading

import msgspec
import pytest
import torch
import zmq
import zmq.asyncio

from services.worker.kv.rank_links import (
    RankStats,
    SocketControl,
    StagedChunk,
    StagingFailed,
    Stats,
    _Answer,
    _Control,
    _controls,
)
from services.worker.kv.wire.importing import PullLimits
from services.worker.kv.wire.protocol import MAX_MESSAGE_BYTES, Unread, decode_reply, encode_message, opened, sealed
from services.worker.kv.wire.tcp_streams import host_and_port
from services.worker.kv.wire.tcp_transport import TcpTransport
from tests.services.worker.kv.rig import KEY, Rig, model_kv, stage
from tests.services.worker.kv.wire.hostile import (
    NESTED,
    NOT_UTF8,
    NOT_UTF8_REPLY,
    SEALED_NESTED,
    Stranger,
    assert_serves,
    next_pull,
    not_utf8,
    pull,
    renumbered,
    say,
    true_frame,
)


def test_garbage_is_dropped_and_counted(rig: Rig) -> None:
    exporter = rig.endpoint()
    garbage = [b"", b"\xff" * 100, b"\x93\x01\x02\x03", msgspec.msgpack.encode(pull())[:-3]]
    garbage += [*map(sealed, garbage), NOT_UTF8, SEALED_NESTED, encode_message(pull())[:-3]]
    messages = [each for each in garbage if each]  # an empty message is a heartbeat
    with Stranger(exporter.address) as peer:
        for message in messages:
            peer.send(message)
        peer.send(encode_message(pull(generation=1)))
        for _ in messages:
            assert isinstance(decode_reply(peer.recv_multipart()[0]), Unread)
        assert decode_reply(peer.recv_multipart()[0]).fault == "stale_generation"  # after the garbage, in order
    assert exporter.server_counters.dropped == len(messages)
    assert_serves(rig, exporter)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_start": 5, "token_end": 5},
        {"token_start": -1},
        {"layer_end": 4},
        {"layer_start": -1},
        {"layer_start": 2, "layer_end": 2},
        {"head_end": 5},
        {"head_start": -1},
        {"credit_bytes": 0},
        {"credit_bytes": 1 << 40},
        {"timeout_s": -1.0},
        {"timeout_s": 1e9},
    ],
)
def test_pulls_out_of_range_are_refused(rig: Rig, changes: dict[str, object]) -> None:
    exporter = rig.endpoint()
    with Stranger(exporter.address) as peer:
        peer.send(encode_message(pull(**changes)))
        assert decode_reply(peer.recv_multipart()[0]).fault == "invalid_request"


def test_oversized_messages_cost_their_sender_the_connection(rig: Rig) -> None:
    exporter = rig.endpoint()
    with Stranger(exporter.address) as peer:
        peer.send(b"x" * (MAX_MESSAGE_BYTES + 1))
        with pytest.raises(ConnectionError):
            peer.recv_multipart()
    assert_serves(rig, exporter)


def test_raw_bytes_on_the_port_do_no_harm(rig: Rig) -> None:
    exporter = rig.endpoint()
    host, port = host_and_port(exporter.address)
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, bytes(range(256)) * 64, struct.pack(">Q", 2**63)):
        with socket.create_connection((host, port)) as plain:
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
    transport = TcpTransport()
    listener = transport.listen(f"{rig.scheme}://127.0.0.1:*")
    exporter, importer = rig.endpoint(), rig.endpoint()
    handle = rig.handle([exporter], 40, endpoints=(listener.address,))
    frame = true_frame(rig, exporter)
    lies = [[b"\xff\xff"], [NOT_UTF8_REPLY], [SEALED_NESTED], [b"x" * (MAX_MESSAGE_BYTES + 1)]]
    lies += [[frame[0]], [frame[0], frame[1][:-4]], [frame[0], b""]]
    for lie in lies:
        got = rig.load(importer, handle, timeout_s=1.0)
        peer, request = next_pull(transport, listener)
        header = decode_reply(lie[0])
        parts = lie if header is None else [renumbered(header, request.pull_id), *lie[1:]]
        say(listener, peer, parts)
        result = rig.result()
        assert not result.ok
        assert not got.writes
    transport.close()
    assert_serves(rig, exporter)


async def test_garbage_answers_do_not_end_the_workers_own_side(rig: Rig) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as rank:
        port = rank.bind_to_random_port("tcp://127.0.0.1")
        async with SocketControl((f"tcp://127.0.0.1:{port}",), KEY) as control:
            waiting = asyncio.create_task(control.call(Stats(), timeout_s=10))
            peer, request = await rank.recv_multipart()
            control = opened(_controls, request)
            assert isinstance(control, _Control)
            call = control.call
            for garbage in (not_utf8(_Answer(call, "~~")), SEALED_NESTED, b"", sealed(b"")):
                await rank.send_multipart([peer, garbage])
            await rank.send_multipart([peer, b"a", b"b"])
            await rank.send_multipart([peer, encode_message(_Answer(call, "", RankStats(3)))])
            assert (await waiting)[0].rank == 3


async def test_garbage_events_are_dropped_and_counted(rig: Rig) -> None:
    async with rig.events() as events:
        with zmq.Context() as context, context.socket(zmq.PUSH) as rank:
            rank.connect(rig.events_address)
            for garbage in (
                msgspec.msgpack.encode(StagingFailed("~~", 0, "")).replace(b"~~", b"\xff\xfe"),
                NESTED,
                b"",
                b"\x81\xa4type\xa9PullEnded",
            ):
                rank.send(garbage)
            rank.send(msgspec.msgpack.encode(StagedChunk("t", 0, 1, True, 1)))
            assert await asyncio.wait_for(events.get(), 10) == StagedChunk("t", 0, 1, True, 1)
        assert events.dropped == 4


def test_a_flood_holds_up_nobody_else(rig: Rig) -> None:
    exporter, stop = rig.endpoint(), threading.Event()

    def flood() -> None:
        with Stranger(exporter.address) as peer:
            while not stop.is_set():
                peer.send(NOT_UTF8)

    flooder = threading.Thread(target=flood)
    flooder.start()
    try:
        assert_serves(rig, exporter)
    finally:
        stop.set()
        flooder.join()
