"""A TCP proxy between two processes, with the verbs of a bad network.

What is written on one side comes out on the other; a connection that ends on one side ends on the other. `cut`,
`stall`, `slow`, `corrupt`, `lose`, `swap` and `replay` change that until `heal`.
"""

import asyncio
import json
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from random import Random

from lab.chaos.framing import Framing, KvSplitter, Piece, RawSplitter, Splitter, ZmtpSplitter
from services.launcher.spec import Plan, ProcessSpec

_READ_BYTES = 1 << 16
_WAITING = 64  # pieces under way in one direction; then the sender has to wait
_KEPT = 64  # messages remembered for a replay
_KEPT_BYTES = 1 << 16  # longer ones are not


@dataclass(slots=True)
class Weather:
    """How the link is at the moment."""

    open: asyncio.Event = field(default_factory=asyncio.Event)  # clear: nothing moves, and nobody is told
    refusing: bool = False  # connections are reset as soon as they are made
    latency_s: float = 0.0
    bytes_per_s: float = 0.0  # 0: as fast as it goes
    corrupt: float = 0.0  # share of messages in which a bit is flipped,
    lose: float = 0.0  # that do not arrive,
    swap: float = 0.0  # and that arrive after the next one


class Proxy:
    """One link: whoever connects to `port` is connected to `target`. Use as an async context manager."""

    def __init__(self, target: tuple[str, int], rng: Random, framing: Framing = ZmtpSplitter) -> None:
        """`framing`: what is spoken, so that whole messages can be corrupted, lost, swapped and replayed."""
        self.target = target
        self.port = 0
        self.corrupted = 0
        self.replayed = 0
        self.lost = 0
        self.swapped = 0
        self.weather = Weather()
        self.weather.open.set()
        self._rng = rng
        self._framing = framing
        self._pipes: set[_Pipe] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=_READ_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._pipes) // 2

    def cut(self, *, refuse: bool = False) -> None:
        """Reset every connection; with `refuse` new ones too, until `heal`."""
        self.weather.refusing = refuse
        for pipe in list(self._pipes):
            pipe.reset()

    def stall(self) -> None:
        """From now on nothing comes out: a network that drops everything."""
        self.weather.open.clear()

    def slow(self, *, latency_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        """Each piece takes so much longer, and each direction carries no more than that."""
        self.weather.latency_s, self.weather.bytes_per_s = latency_s, bytes_per_s

    def corrupt(self, share: float) -> None:
        """Flip one bit in this share of all messages, both ways."""
        self.weather.corrupt = share

    def lose(self, share: float) -> None:
        """Let this share of all messages, both ways, go nowhere."""
        self.weather.lose = share

    def swap(self, share: float) -> None:
        """Let this share of all messages, both ways, pass after the next one."""
        self.weather.swap = share

    def replay(self, *, back: bool = True, changed: Callable[[bytes], bytes] = bytes) -> int:
        """Send again, in order, what went there lately, and with `back` what came back; how many messages that were.

        changed: what becomes of each message, framing included.
        """
        count = sum(pipe.replay(changed) for pipe in list(self._pipes) if back or pipe.onward)
        self.replayed += count
        return count

    def heal(self) -> None:
        """Everything as it should be. Connections that were cut stay so; whoever needs them connects again."""
        self.weather.refusing = False
        self.weather.latency_s = self.weather.bytes_per_s = 0.0
        self.weather.corrupt = self.weather.lose = self.weather.swap = 0.0
        self.weather.open.set()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        except OSError:  # nobody listens there
            _reset(writer)
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.weather.open.wait()
        if self.weather.refusing:
            _reset(writer)
            return
        onward_reader, onward_writer = await asyncio.open_connection(*self.target, limit=_READ_BYTES)
        there = _Pipe(reader, onward_writer, self, onward=True)
        back = _Pipe(onward_reader, writer, self, onward=False)
        self._pipes |= {there, back}
        try:
            running = {asyncio.ensure_future(pipe.run()) for pipe in (there, back)}
            try:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                await self.weather.open.wait()  # who hangs up is not heard either
            finally:
                for each in running:
                    each.cancel()
                await asyncio.gather(*running, return_exceptions=True)
        finally:
            self._pipes -= {there, back}
            onward_writer.close()

    def splitter(self) -> Splitter:
        """For one direction of a connection."""
        return self._framing()

    def touched(self, piece: Piece) -> Piece:
        """What becomes of it on the way."""
        if not self._hit(self.weather.corrupt):
            return piece
        self.corrupted += 1
        return piece.flipped(self._rng)

    def loses(self) -> bool:
        """Whether the present message is lost."""
        lost = self._hit(self.weather.lose)
        self.lost += lost
        return lost

    def swaps(self) -> bool:
        """Whether the present message goes after the next one."""
        swapped = self._hit(self.weather.swap)
        self.swapped += swapped
        return swapped

    def _hit(self, share: float) -> bool:
        return share > 0.0 and self._rng.random() < share


class _Pipe:
    """One direction of one connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, proxy: Proxy, *, onward: bool
    ) -> None:
        self.onward = onward  # from who connected to whom it wanted
        self._reader = reader
        self._writer = writer
        self._proxy = proxy
        self._weather = proxy.weather
        self._splitter = proxy.splitter()
        self._due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_WAITING)
        self._sent: deque[bytes] = deque(maxlen=_KEPT)
        self._parts: list[Piece] = []  # of a message that is not complete yet
        self._held = b""  # a message that goes after the next one

    async def run(self) -> None:
        """Until one side ends."""
        reading, writing = asyncio.ensure_future(self._read()), asyncio.ensure_future(self._write())
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and not writing.done():
                await self._due.join()
        finally:
            for each in (reading, writing):
                each.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)

    def reset(self) -> None:
        """End the connection rudely."""
        _reset(self._writer)

    def replay(self, changed: Callable[[bytes], bytes]) -> int:
        """Send the remembered messages again, between two others."""
        if self._due.full():
            return 0
        again = b"".join(changed(message) for message in self._sent)
        if again:
            self._due.put_nowait((0.0, again))
        return len(self._sent)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while data := await self._reader.read(_READ_BYTES):
                if out := self._pass(data):
                    await self._due.put((loop.time() + self._weather.latency_s, out))

    def _pass(self, data: bytes) -> bytes:
        greeting, pieces = self._splitter.feed(data)
        return greeting + b"".join(self._pass_piece(piece) for piece in pieces)

    def _pass_piece(self, piece: Piece) -> bytes:
        if piece.is_command:
            return piece.encode() + self._let_go()
        self._parts.append(piece)
        if not piece.ends_message:
            return b""
        parts, self._parts = self._parts, []
        whole = b"".join(part.encode() for part in parts)
        if len(whole) <= _KEPT_BYTES:
            self._sent.append(whole)
        return self._pass_message(parts)

    def _pass_message(self, parts: list[Piece]) -> bytes:
        if self._proxy.loses():
            return b""
        out = b"".join(self._proxy.touched(part).encode() for part in parts)
        if not self._held and self._proxy.swaps():
            self._held = out
            return b""
        return out + self._let_go()

    def _let_go(self) -> bytes:
        held, self._held = self._held, b""
        return held

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while True:
                due_s, data = await self._due.get()
                try:
                    await asyncio.sleep(max(0.0, due_s - loop.time()))
                    await self._weather.open.wait()
                    await self._paced(data)
                finally:
                    self._due.task_done()

    async def _paced(self, data: bytes) -> None:
        rate = self._weather.bytes_per_s
        step = max(1, int(rate / 20)) if rate else len(data)
        for start in range(0, len(data), step):
            self._writer.write(data[start : start + step])
            await self._writer.drain()
            if rate:
                await asyncio.sleep(step / rate)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a RST in place of a FIN."""
    raw = writer.get_extra_info("socket")
    if raw is not None:
        with suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


# MERGED wires.py
# Proxies between the processes of a plan: found from its ports, put in place by the environments of its processes.
#
# A process's own addresses stay as they are; only whom it connects to is answered by a proxy. Addresses of ZeroMQ
# and KV are swapped at the moment of connecting (`inject/sitecustomize.py`), so that those which travel in messages
# are covered; HTTP addresses are swapped in the environment.


_SERVICES = {
    "gateway": "gateway",
    "services.cluster_monitor": "monitor",
    "services.global_scheduler": "scheduler",
    "services.worker": "worker",
    "services.planner": "planner",
    "predictor": "predictor",
}
_PORTS = {  # what a service's ports are for, in the order of the plan
    "gateway": ("http",),
    "monitor": ("http", "heartbeats", "broadcasts"),
    "scheduler": ("http", "rpc"),
    "worker": ("rpc", "http", "kv"),
    "planner": ("http",),
    "predictor": ("http",),
}
_TALK = {  # who connects to whom, and to what
    ("gateway", "scheduler"): ("rpc",),
    ("gateway", "worker"): ("rpc",),
    ("monitor", "worker"): ("rpc",),
    ("worker", "monitor"): ("http", "heartbeats", "broadcasts"),
    ("worker", "worker"): ("kv",),
    ("scheduler", "monitor"): ("http", "broadcasts"),
    ("planner", "monitor"): ("http", "broadcasts"),
    ("worker", "predictor"): ("http",),
    ("scheduler", "predictor"): ("http",),
}
ALL_LINKS = frozenset(purpose for purposes in _TALK.values() for purpose in purposes)
_FRAMINGS: dict[str, Framing] = {"http": RawSplitter, "tcp": ZmtpSplitter, "kv": KvSplitter}  # by scheme


@dataclass(frozen=True, slots=True)
class Port:
    """A port that a process of the plan listens on."""

    process: str
    service: str
    purpose: str  # "http", "rpc", "kv", "heartbeats", "broadcasts"
    host: str
    port: int
    scheme: str = "tcp"  # how it is spoken to: "http", "tcp" (ZeroMQ), "kv"


@dataclass(frozen=True, slots=True)
class Wire:
    """The way from one process to a port of another."""

    source: str
    port: Port
    proxy: Proxy

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.source} → {self.port.process} ({self.port.purpose})"


class Wires:
    """All ways between the processes of a plan."""

    def __init__(self, wires: Iterable[Wire]) -> None:
        self.all = tuple(wires)

    def between(self, source: str = "", target: str = "", purpose: str = "") -> tuple[Wire, ...]:
        """Those from `source` to `target` for that purpose; an empty word is any. Raises LookupError if none."""
        found = tuple(
            wire
            for wire in self.all
            if source in ("", wire.source) and target in ("", wire.port.process) and purpose in ("", wire.port.purpose)
        )
        if not found:
            raise LookupError(f"no link from {source or 'any'} to {target or 'any'} ({purpose or 'any'})")
        return found

    def touching(self, process: str) -> tuple[Wire, ...]:
        """Every way to or from a process."""
        return tuple(wire for wire in self.all if process in (wire.source, wire.port.process))

    def heal(self) -> None:
        """All of them as they should be."""
        for wire in self.all:
            wire.proxy.heal()


def service_of(spec: ProcessSpec) -> str:
    """What a process of the plan is."""
    return _SERVICES.get(spec.argv[-1], "other")


def ports_of(plan: Plan) -> tuple[Port, ...]:
    """Every port that somebody of the plan listens on."""
    found = []
    for spec in plan.processes:
        service = service_of(spec)
        purposes = _PORTS.get(service, ())
        for number, use in enumerate(spec.ports):
            purpose = purposes[min(number, len(purposes) - 1)]  # one KV port a rank
            found.append(Port(spec.name, service, purpose, use.host, use.port, _scheme(purpose)))
    return tuple(found)


def _scheme(purpose: str) -> str:
    return purpose if purpose in ("kv", "http") else "tcp"


@asynccontextmanager
async def wired(plan: Plan, rng: Random, purposes: frozenset[str] = ALL_LINKS) -> AsyncIterator[tuple[Plan, Wires]]:
    """The plan with a proxy on every way of those purposes, for the block's length."""
    async with AsyncExitStack() as stack:
        ports, wires, specs = ports_of(plan), [], []
        for spec in plan.processes:
            mine = []
            for port in _reached_by(spec, ports, purposes):
                proxy = Proxy((port.host, port.port), Random(rng.getrandbits(64)), _FRAMINGS[port.scheme])
                mine.append(Wire(spec.name, port, await stack.enter_async_context(proxy)))
            wires += mine
            specs.append(replace(spec, env=_by_proxies(spec.env, mine)))
        yield replace(plan, processes=tuple(specs)), Wires(wires)


def _reached_by(spec: ProcessSpec, ports: Iterable[Port], purposes: frozenset[str]) -> list[Port]:
    return [
        port
        for port in ports
        if port.process != spec.name
        and port.purpose in purposes
        and port.purpose in _TALK.get((service_of(spec), port.service), ())
    ]


def _by_proxies(env: dict[str, str], wires: list[Wire]) -> dict[str, str]:
    links = {}
    for wire in wires:
        port, proxied = wire.port, f"{wire.port.host}:{wire.proxy.port}"
        direct = f"{port.host}:{port.port}"
        if port.purpose == "http":
            env = {key: value.replace(f"http://{direct}", f"http://{proxied}") for key, value in env.items()}
        else:
            links[f"{port.scheme}://{direct}"] = f"{port.scheme}://{proxied}"
    return {**env, "CHAOS_LINKS": json.dumps(links)}
