"""The verbs of a bad network, over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

import pytest
import zmq
import zmq.asyncio

from benchmarks.chaos.framing import RawSplitter
from benchmarks.chaos.proxy import Proxy

SOON_S = 5.0
SILENCE_S = 0.3


@asynccontextmanager
async def echoing() -> AsyncIterator[Proxy]:
    """A proxy before a server that sends back what it gets."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    target = server.sockets[0].getsockname()[1]
    async with server, Proxy(("127.0.0.1", target), Random(1), RawSplitter) as proxy:
        yield proxy


async def connect(proxy: Proxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", proxy.port)


async def echoed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    writer.write(data)
    async with asyncio.timeout(SOON_S):
        return await reader.readexactly(len(data))


async def test_it_passes_everything_on() -> None:
    async with echoing() as proxy:
        reader, writer = await connect(proxy)
        data = Random(2).randbytes(1 << 20)
        sending = asyncio.create_task(writer.drain())
        writer.write(data)
        async with asyncio.timeout(SOON_S):
            assert await reader.readexactly(len(data)) == data
        await sending
        writer.close()


async def test_the_end_of_one_side_ends_the_other() -> None:
    async with echoing() as proxy:
        reader, writer = await connect(proxy)
        await echoed(reader, writer, b"here")
        writer.write_eof()
        async with asyncio.timeout(SOON_S):
            assert await reader.read() == b""


async def test_cut_resets_and_lets_connect_again() -> None:
    async with echoing() as proxy:
        reader, writer = await connect(proxy)
        await echoed(reader, writer, b"here")
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(SOON_S):
                await reader.readexactly(1)
        assert await echoed(*await connect(proxy), b"again") == b"again"


async def test_refused_until_healed() -> None:
    async with echoing() as proxy:
        proxy.cut(refuse=True)
        reader, _ = await connect(proxy)
        with pytest.raises(OSError, match="reset"):
            async with asyncio.timeout(SOON_S):
                assert not await reader.readexactly(1)
        proxy.heal()
        assert await echoed(*await connect(proxy), b"again") == b"again"


async def test_a_stalled_link_says_nothing_and_then_everything() -> None:
    async with echoing() as proxy:
        reader, writer = await connect(proxy)
        await echoed(reader, writer, b"here")
        proxy.stall()
        writer.write(b"kept")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(SILENCE_S):
                await reader.readexactly(1)
        proxy.heal()
        async with asyncio.timeout(SOON_S):
            assert await reader.readexactly(4) == b"kept"


async def test_a_stalled_link_hides_that_the_other_side_is_gone() -> None:
    async with echoing() as proxy:
        reader, writer = await connect(proxy)
        await echoed(reader, writer, b"here")
        proxy.stall()
        writer.write_eof()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(SILENCE_S):
                await reader.read()
        proxy.heal()
        async with asyncio.timeout(SOON_S):
            assert await reader.read() == b""


async def test_slow_takes_its_time() -> None:
    async with echoing() as proxy:
        reader, writer = await connect(proxy)
        proxy.slow(latency_s=0.1, bytes_per_s=10_000)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await echoed(reader, writer, b"x" * 2_000)
        assert loop.time() - began >= 0.1 + 0.1 + 0.15  # there, back, and all pieces but the last


@asynccontextmanager
async def talking() -> AsyncIterator[tuple[Proxy, "zmq.asyncio.Socket", "zmq.asyncio.Socket"]]:
    """A DEALER that reaches a ROUTER by a proxy."""
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        async with Proxy(("127.0.0.1", port), Random(3)) as proxy:
            dealer.linger = router.linger = 0
            dealer.connect(f"tcp://127.0.0.1:{proxy.port}")
            yield proxy, dealer, router


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.01)


async def received(router: "zmq.asyncio.Socket") -> bytes:
    async with asyncio.timeout(SOON_S):
        return bytes((await router.recv_multipart())[1])


async def test_messages_pass_a_framed_proxy() -> None:
    async with talking() as (proxy, dealer, router):
        for body in (b"short", b"x" * 100_000):
            await dealer.send(body)
            assert await received(router) == body
        assert proxy.connections == 1


async def test_corruption_flips_a_bit_and_keeps_the_framing() -> None:
    async with talking() as (proxy, dealer, router):
        await dealer.send(b"whole")
        assert await received(router) == b"whole"
        proxy.corrupt(1.0)
        await dealer.send(b"\x00" * 50)
        got = await received(router)
        assert len(got) == 50
        assert sum(byte.bit_count() for byte in got) == 1
        assert proxy.corrupted == 1
        proxy.heal()
        await dealer.send(b"whole")
        assert await received(router) == b"whole"


async def test_lost_messages_do_not_arrive() -> None:
    async with talking() as (proxy, dealer, router):
        await dealer.send(b"one")
        assert await received(router) == b"one"
        proxy.lose(1.0)
        await dealer.send_multipart([b"two", b"and more"])
        await until(lambda: proxy.lost == 1)
        proxy.heal()
        await dealer.send(b"three")
        assert await received(router) == b"three"


async def test_swapped_messages_come_after_the_next_one() -> None:
    async with talking() as (proxy, dealer, router):
        await dealer.send(b"one")
        assert await received(router) == b"one"
        proxy.swap(1.0)
        await dealer.send(b"two")
        await until(lambda: proxy.swapped == 1)
        await dealer.send(b"three")
        assert [await received(router), await received(router)] == [b"three", b"two"]


async def test_replay_sends_whole_messages_again_in_order() -> None:
    async with talking() as (proxy, dealer, router):
        for body in (b"one", b"two"):
            await dealer.send(body)
            assert await received(router) == body
        assert proxy.replay() == 2
        assert [await received(router), await received(router)] == [b"one", b"two"]
        await dealer.send(b"three")
        assert await received(router) == b"three"
        assert proxy.replay(changed=lambda message: message.replace(b"o", b"0")) == 3
        assert [await received(router) for _ in range(3)] == [b"0ne", b"tw0", b"three"]
