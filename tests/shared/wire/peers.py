"""Both ends of the RPC for tests; as a process of its own, to be killed and frozen: `python peers.py call ADDRESS`."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from shared.errors import Busy, PolyphaseError
from shared.wire.messages import Method
from shared.wire.rpc_client import RpcClient
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Curve, Sockets
from tests.ports import free_address

ROOT = Path(__file__).resolve().parents[3]


class Ask(msgspec.Struct):
    number: int
    padding: bytes = b""


class Answer(msgspec.Struct):
    number: int
    padding: bytes = b""


ECHO = Method("echo", Ask, Answer, Answer)
COUNT = Method("count", Ask, Answer, Answer)
WAIT = Method("wait", Ask, Answer, Answer)
FLOOD = Method("flood", Ask, Answer, Answer)
REFUSE = Method("refuse", Ask, Answer, Answer)
CRASH = Method("crash", Ask, Answer, Answer)


class Peer:
    """A server with every kind of handler, and what it saw."""

    def __init__(self) -> None:
        self.waiting = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.seen: list[int] = []
        self.callers: list[bytes] = []
        self.gone: list[bytes] = []

    async def echo(self, ask: Ask, call: ServerCall) -> Answer:
        self.seen.append(ask.number)
        self.callers.append(call.peer)
        return Answer(ask.number)

    async def count(self, ask: Ask, call: ServerCall) -> Answer:
        for number in range(ask.number):
            call.send(Answer(number))
        return Answer(ask.number)

    async def wait(self, ask: Ask, call: ServerCall) -> Answer:
        """Say nothing until cancelled."""
        self.waiting.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.cancelled.set()
        raise AssertionError

    async def flood(self, ask: Ask, call: ServerCall) -> Answer:
        """One message after another of `number` bytes, until cancelled."""
        self.waiting.set()
        try:
            while True:
                call.send(Answer(0, bytes(ask.number)))
                for _ in range(4):
                    await asyncio.sleep(0)
        finally:
            self.cancelled.set()

    async def refuse(self, ask: Ask, _: ServerCall) -> Answer:
        raise Busy("come back later")

    async def crash(self, ask: Ask, _: ServerCall) -> Answer:
        raise ZeroDivisionError("a bug")

    def server(self, sockets: Sockets, address: str) -> RpcServer:
        handlers = {
            ECHO: self.echo,
            COUNT: self.count,
            WAIT: self.wait,
            FLOOD: self.flood,
            REFUSE: self.refuse,
            CRASH: self.crash,
        }
        return RpcServer(sockets, address, handlers, self.gone.append)


@asynccontextmanager
async def connected(curve: Curve | None = None) -> AsyncIterator[tuple[Peer, RpcServer, RpcClient, Sockets]]:
    sockets, peer, address = Sockets(curve), Peer(), free_address()
    try:
        async with peer.server(sockets, address) as server:
            client = RpcClient(sockets, address)
            try:
                yield peer, server, client, sockets
            finally:
                client.close()
    finally:
        sockets.close()


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Poll a condition with a bound."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def caller(address: str, method: Method[Ask, Answer, Answer], *, stuck: bool = False) -> "AsyncIterator[Child]":
    """A process that makes one call and says how it ended; `stuck` blocks it in its first item until told to go on."""
    words = (__file__, address, method.name, "stuck" if stuck else "")
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


Child = asyncio.subprocess.Process


async def _call(address: str, method: str, stuck: str) -> None:
    def item(_: Answer) -> None:
        if stuck:
            sys.stdin.read(1)

    sockets = Sockets()
    client = RpcClient(sockets, address)
    known = {each.name: each for each in (ECHO, WAIT, FLOOD)}
    try:
        await client.call(known[method], Ask(100_000), timeout_s=60, on_item=item)
        print("answered", flush=True)
    except PolyphaseError as error:
        print(error.code, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_call(*sys.argv[1:]))
