"""Both ends of the RPC for tests. `connected` opens them in this process, `caller_process` a client in another one."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import zmq

from shared.errors import Busy, PolyphaseError
from shared.wire.envelope import Envelope, Kind, encode_body, pack, unpack
from shared.wire.messages import Method
from shared.wire.rpc_client import RpcClient
from shared.wire.rpc_server import Handlers, RpcServer, ServerCall
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
    """The handlers of a server, and what they saw."""

    def __init__(self) -> None:
        self.waiting = asyncio.Event()  # a call of WAIT or FLOOD has begun
        self.cancelled = asyncio.Event()  # such a call was cancelled
        self.seen: list[int] = []  # the numbers of the calls of ECHO
        self.callers: list[bytes] = []  # the connections of these calls
        self.gone: list[bytes] = []  # the connections that were reported as lost or given up

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
                await next_message()
        finally:
            self.cancelled.set()

    async def refuse(self, ask: Ask, _: ServerCall) -> Answer:
        raise Busy("come back later")

    async def crash(self, ask: Ask, _: ServerCall) -> Answer:
        raise ZeroDivisionError("a bug")

    def server(self, sockets: Sockets, address: str, replaced: Handlers | None = None) -> RpcServer:
        """A server with these handlers, but for those that are `replaced`."""
        handlers = {
            ECHO: self.echo,
            COUNT: self.count,
            WAIT: self.wait,
            FLOOD: self.flood,
            REFUSE: self.refuse,
            CRASH: self.crash,
            **(replaced or {}),
        }
        return RpcServer(sockets, address, handlers, self.gone.append)


async def next_message() -> None:
    """Let the server send what is queued: the items of one turn of the loop leave as one message."""
    for _ in range(4):
        await asyncio.sleep(0)


class Loopback:
    """A server and a client of it on loopback. `connected` makes one, and closes what a test opens through it."""

    peer: Peer  # the handlers of the server
    server: RpcServer
    client: RpcClient

    def __init__(self, sockets: Sockets) -> None:
        self.sockets = sockets
        self.address = free_address()  # of the server
        self._raw_context = zmq.Context()
        self._raw_sockets: list[zmq.Socket[bytes]] = []  # a socket without a reference would be closed
        self._running_server = AsyncExitStack()
        self._clients: list[RpcClient] = []

    async def start_server(self, peer: Peer, handlers: Handlers | None = None) -> None:
        server = peer.server(self.sockets, self.address, handlers)
        self.peer, self.server = peer, await self._running_server.enter_async_context(server)

    async def stop_server(self) -> None:
        await self._running_server.aclose()

    def connect(self, address: str) -> RpcClient:
        """Another client, with the keys of this end."""
        client = RpcClient(self.sockets, address)
        self._clients.append(client)
        return client

    def raw_socket(self, kind: int) -> zmq.Socket[bytes]:
        """A socket without any of our code, neither connected nor bound."""
        socket: zmq.Socket[bytes] = self._raw_context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        self._raw_sockets.append(socket)
        return socket

    async def close(self) -> None:
        """Close everything. A context that stays open would end in another test, and block it."""
        for client in self._clients:
            client.close()
        self._raw_context.destroy(linger=0)
        await self.stop_server()
        self.sockets.close()


@asynccontextmanager
async def connected(sockets: Sockets | None = None, handlers: Handlers | None = None) -> AsyncIterator[Loopback]:
    """A running server and a client of it; `handlers` replace those of `Peer`."""
    loopback = Loopback(sockets or Sockets())
    try:
        await loopback.start_server(Peer(), handlers)
        client = loopback.client = loopback.connect(loopback.address)
        await until(lambda: client.connected)
        yield loopback
    finally:
        await loopback.close()


def new_curve() -> Curve:
    public, secret = zmq.curve_keypair()
    return Curve(public.decode(), secret.decode())


def call_message(method: Method[Ask, Answer, Answer], call: int, ask: Ask) -> bytes:
    """One call, as a client sends it."""
    return pack([Envelope(Kind.CALL, call, method.name, 30.0, encode_body(ask))])


async def receive(socket: zmq.Socket[bytes]) -> list[Envelope]:
    """The envelopes of the next message."""
    await until(lambda: socket.poll(0))
    return unpack(socket.recv())


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Poll a condition with a bound."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def until_disconnected(client: RpcClient) -> None:
    await until(lambda: not client.connected)


class CallerProcess:
    """A process that makes one call."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child

    async def outcome(self) -> str:
        """How its call ended: `answered`, or the code of the error."""
        assert self._child.stdout is not None
        return (await asyncio.wait_for(self._child.stdout.readline(), 90)).decode().strip()

    def kill(self) -> None:
        self._child.kill()

    def freeze(self) -> None:
        self._child.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._child.send_signal(signal.SIGCONT)

    def unblock(self) -> None:
        """Let a process go on that `blocks`."""
        assert self._child.stdin is not None
        self._child.stdin.write(b"x" * 100_000)  # one byte for each item


@asynccontextmanager
async def caller_process(
    address: str, method: Method[Ask, Answer, Answer], *, blocks: bool = False
) -> AsyncIterator[CallerProcess]:
    """A process that makes one call; if it `blocks`, its interpreter stands still at the first item."""
    words = [__file__, address, method.name]
    if blocks:
        words.append("blocks")
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield CallerProcess(child)
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def _call(address: str, method: str, *words: str) -> None:
    def item(_: Answer) -> None:
        if "blocks" in words:
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


if __name__ == "__main__":  # python peers.py ADDRESS METHOD [blocks]
    asyncio.run(_call(*sys.argv[1:]))
