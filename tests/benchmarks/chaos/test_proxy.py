"""The faults of a bad network, over real sockets; and splitters, for which any pieces of a stream are the same."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chaos.proxy import GREETING_BYTES, KvSplitter, Piece, Proxy, Splitter, ZmtpSplitter
from services.worker.kv.wire.tcp_streams import Outbound
from tests.services.worker.kv.wire.test_tcp import Pipe

SOON_S = 5.0
SILENCE_S = 0.3


def split(splitter: Splitter, data: bytes, size: int) -> list[Piece]:
    return [piece for start in range(0, len(data), size) for piece in splitter.feed(data[start : start + size])]


def framed(flags: int, body: bytes) -> bytes:
    if len(body) > 255:
        return bytes((flags | 2,)) + len(body).to_bytes(8, "big") + body
    return bytes((flags, len(body))) + body


@given(st.lists(st.tuples(st.sampled_from([0, 1, 4]), st.binary(max_size=700))), st.integers(1, 97))
def test_any_pieces_of_a_zmtp_stream_give_its_frames(frames: list[tuple[int, bytes]], size: int) -> None:
    stream = bytes(range(GREETING_BYTES)) + b"".join(framed(*frame) for frame in frames)
    found = split(ZmtpSplitter(), stream, size)
    assert b"".join(piece.encode() for piece in found) == stream
    assert [piece.body for piece in found][len(found) - len(frames) :] == [body for _, body in frames]
    # Each side sends the rest of its greeting only when it has seen the beginning of the other's.
    assert ZmtpSplitter().feed(stream[:10]) == [Piece(stream[:10], b"", is_command=True)]


MESSAGES = st.lists(st.tuples(st.binary(min_size=1, max_size=60), st.binary(max_size=3000)), min_size=1, max_size=6)


@given(MESSAGES, st.integers(1, 900), st.integers())
def test_any_pieces_of_a_kv_stream_give_its_messages(messages: list[tuple[bytes, bytes]], size: int, seed: int) -> None:
    pipe, outbound = Pipe([1 << 20]), Outbound()
    for header, payload in messages:
        outbound.put(header, payload or None)
        outbound.heartbeat()
    outbound.flush(pipe)
    found = split(KvSplitter(), bytes(pipe.data), size)
    assert b"".join(piece.encode() for piece in found) == bytes(pipe.data)
    whole = [piece for piece in found if not piece.is_command]
    assert len(whole) == len(found) - len(whole) == len(messages)
    assert all(
        piece.body.startswith(header + payload) for piece, (header, payload) in zip(whole, messages, strict=True)
    )
    flipped = whole[0].flipped(Random(seed))
    assert flipped.head == whole[0].head
    assert sum((a ^ b).bit_count() for a, b in zip(whole[0].body, flipped.body, strict=True)) == 1


@given(st.binary(max_size=200), st.integers(1, 50))
def test_bytes_of_another_framing_pass_as_read(data: bytes, size: int) -> None:
    strange = b"\x16\x03\x01" + data  # TLS
    assert b"".join(piece.encode() for piece in split(KvSplitter(), strange, size)) == strange


@asynccontextmanager
async def echoing() -> AsyncIterator[Proxy]:
    """A proxy before a server that sends back what it gets."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    target = server.sockets[0].getsockname()[1]
    async with server, Proxy(("127.0.0.1", target), Random(1), Splitter) as proxy, asyncio.timeout(4 * SOON_S):
        yield proxy


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connected(proxy: Proxy) -> Streams:
    """A connection on which an echo has come back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"here")
    assert await reader.readexactly(4) == b"here"
    return reader, writer


async def silent(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(SILENCE_S):
            await reader.read(1)
    except TimeoutError:
        return True
    return False


async def test_everything_passes_and_the_end_of_one_side_ends_the_other() -> None:
    async with echoing() as proxy:
        reader, writer = await connected(proxy)
        data = Random(2).randbytes(1 << 20)
        writer.write(data)
        assert await reader.readexactly(len(data)) == data
        writer.write_eof()
        assert await reader.read() == b""


@pytest.mark.parametrize("refuse", [False, True])
async def test_cut_resets_and_refuses_until_healed(refuse: bool) -> None:
    async with echoing() as proxy:
        reader, _ = await connected(proxy)
        proxy.cut(refuse=refuse)
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        if refuse:
            with pytest.raises((OSError, EOFError)):
                await connected(proxy)
        proxy.heal()
        await connected(proxy)


async def test_a_stalled_link_hides_data_and_the_end_until_it_is_healed() -> None:
    async with echoing() as proxy:
        reader, writer = await connected(proxy)
        proxy.stall()
        writer.write(b"kept")
        writer.write_eof()
        assert await silent(reader)
        proxy.heal()
        assert await reader.read() == b"kept"


async def test_slow_takes_its_time() -> None:
    async with echoing() as proxy:
        reader, writer = await connected(proxy)
        proxy.slow(latency_s=0.1, bytes_per_s=10_000)
        loop = asyncio.get_running_loop()
        began = loop.time()
        writer.write(b"x" * 2_000)
        await reader.readexactly(2_000)
        assert loop.time() - began >= 0.1 + 0.1 + 0.15  # there, back, and all pieces but the last


Talk = tuple[Proxy, "zmq.asyncio.Socket", Callable[[], "asyncio.Future[bytes]"]]


@asynccontextmanager
async def talking() -> AsyncIterator[Talk]:
    """A DEALER that reaches a ROUTER by a proxy, over which a message has gone; and what reads the next message."""
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        async with Proxy(("127.0.0.1", port), Random(3)) as proxy, asyncio.timeout(4 * SOON_S):
            dealer.linger = router.linger = 0
            dealer.connect(f"tcp://127.0.0.1:{proxy.port}")

            async def received() -> bytes:
                return bytes((await router.recv_multipart())[1])

            await dealer.send(b"x" * 100_000)
            assert await received() == b"x" * 100_000
            yield proxy, dealer, received  # type: ignore[misc]


async def counted(proxy: Proxy, fault: str) -> None:
    while proxy.counts[fault] != 1:
        await asyncio.sleep(0.01)


async def test_corruption_flips_a_bit_and_keeps_the_framing() -> None:
    async with talking() as (proxy, dealer, received):
        proxy.spoil("corrupted", 1.0)
        await dealer.send(b"\x00" * 50)
        got = await received()
        assert (len(got), sum(byte.bit_count() for byte in got), proxy.counts["corrupted"]) == (50, 1, 1)
        proxy.heal()
        await dealer.send(b"whole")
        assert await received() == b"whole"


@pytest.mark.parametrize(("fault", "arrive"), [("lost", [b"three"]), ("swapped", [b"three", b"two"])])
async def test_messages_are_lost_or_come_after_the_next_one(fault: str, arrive: list[bytes]) -> None:
    async with talking() as (proxy, dealer, received):
        proxy.spoil(fault, 1.0)
        await dealer.send_multipart([b"two", b"and more"])
        await counted(proxy, fault)
        proxy.heal()
        await dealer.send(b"three")
        assert [await received() for _ in arrive] == arrive


async def test_replay_sends_whole_messages_again_in_order() -> None:
    async with talking() as (proxy, dealer, received):
        for body in (b"one", b"two"):
            await dealer.send(body)
            assert await received() == body
        assert proxy.replay(changed=lambda message: message.replace(b"o", b"0")) == 2
        assert [await received(), await received()] == [b"0ne", b"tw0"]
