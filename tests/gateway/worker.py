"""An instance without an engine: it follows the protocol on a real socket, and fails when told to."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from shared.domain.kv import KvHandle, TransferOutcome, TransferReport
from shared.domain.prompt import unpacked
from shared.domain.route import InstanceRef
from shared.errors import NoRoom
from shared.wire.messages import (
    DECODE,
    EXPECT,
    PREDICTED,
    PREFETCH,
    PREFILL,
    RELEASE,
    DecodeReply,
    DecodeRequest,
    ExpectRequest,
    Predicted,
    PrefetchRequest,
    PrefillReply,
    PrefillRequest,
    PrefillStarted,
    ReleaseRequest,
    Reused,
    TokenStep,
)
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Sockets
from tests.ports import free_address


def next_token(tokens: list[int]) -> int:
    """The "model": what follows depends on everything before it."""
    return (sum(tokens) * 31 + len(tokens) * 7) % 1000


def answer(prompt: list[int], count: int) -> list[int]:
    """What an undisturbed run gives."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


async def listen(server: RpcServer) -> RpcServer:
    """Start a server; libzmq frees the address of a closed socket a little later."""
    async with asyncio.timeout(5):
        while True:
            try:
                return await server.__aenter__()
            except zmq.ZMQError:
                await asyncio.sleep(0.02)


@dataclass
class Worker:
    """One instance. `before_token(n)` runs before the n-th token of each decode and may raise or wait.

    `dispatches`: it names a decode instance. `stubborn`: it replies to a prefill that was cancelled. `full`: it refuses
    decodes that want to know whether there is room.
    """

    name: str
    sockets: Sockets
    address: str = field(default_factory=free_address)
    decode_at: "Worker | None" = None
    refuse: Exception | None = None
    full: bool = False
    chunked: bool = False
    dispatches: bool = True
    stubborn: bool = False
    fetching: "asyncio.Event | None" = None  # until then prefetches last
    stop_token: int | None = None
    twist: int = 0  # its arithmetic is a little unlike that of others
    before_token: "Callable[[int], object] | None" = None
    held: "int | None" = None  # tokens of each prompt in its prefix cache; None: it says nothing of them
    prefills: list[PrefillRequest] = field(default_factory=list)
    decodes: list[DecodeRequest] = field(default_factory=list)
    calls: list[ServerCall] = field(default_factory=list)  # of these
    prefetched: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # prefetches that were cancelled
    timeouts: list[float] = field(default_factory=list)  # of each call
    wanted_room: list[bool] = field(default_factory=list)  # of each decode that came
    expected: list[ExpectRequest] = field(default_factory=list)
    told: list[Predicted] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    server: RpcServer | None = None

    @property
    def ref(self) -> InstanceRef:
        return InstanceRef(self.name, 1, self.address)

    def renew(self) -> None:
        """Forget what was, and behave."""
        self.before_token = self.refuse = self.stop_token = None
        self.chunked = self.stubborn = False
        self.dispatches = True
        self.fetching = self.held = None
        for seen in (
            self.prefills,
            self.decodes,
            self.calls,
            self.prefetched,
            self.released,
            self.dropped,
            self.timeouts,
        ):
            seen.clear()
        self.cancelled.clear()

    async def start(self) -> None:
        handlers = {
            PREFILL: self.prefill,
            PREDICTED: self.predicted,
            DECODE: self.decode,
            EXPECT: self.expect,
            PREFETCH: self.prefetch,
            RELEASE: self.release,
        }
        self.server = await listen(RpcServer(self.sockets, self.address, handlers))

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.__aexit__(None, None, None)
            self.server = None

    async def prefill(self, request: PrefillRequest, call: ServerCall) -> PrefillReply:
        queued_s = time.time()
        if self.refuse:
            raise self.refuse
        self.prefills.append(request)
        self.timeouts.append(call.timeout_s)
        dispatched = self.decode_at.ref if self.dispatches and self.decode_at else None
        target = request.decode or dispatched
        handle = KvHandle(request.transfer_id, self.name, 1, "f", (), request.prompt_tokens, "bfloat16")
        started_s = time.time()
        try:
            if self.chunked and target is not None:
                call.send(PrefillStarted(target, handle))
            await self._wait(0)
        except asyncio.CancelledError:
            self.cancelled.set()
            if not self.stubborn:
                raise
        token = next_token(unpacked(request.prompt))
        finish = "stop" if request.want_token and token == self.stop_token else ""
        return PrefillReply(
            [token] if request.want_token else [],
            target,
            handle,
            finish,
            queued_s=queued_s,
            started_s=started_s,
            ended_s=time.time(),
            reused=self._reused(request.prompt_tokens, None),
        )

    def _reused(self, prompt: int, handle: KvHandle | None) -> Reused | None:
        if self.held is None:
            return None
        held = min(self.held, prompt)
        tokens = max(held, handle.tokens) if handle is not None else held
        return Reused(tokens, prompt - tokens, tokens - held)

    async def decode(self, request: DecodeRequest, call: ServerCall) -> DecodeReply:
        queued_s, started_s = time.time(), 0.0
        if self.refuse:
            raise self.refuse
        self.wanted_room.append(request.if_room)
        if self.full and request.if_room:
            raise NoRoom(f"{self.name} is full")
        self.decodes.append(request)
        self.calls.append(call)
        self.timeouts.append(call.timeout_s)
        tokens, known = unpacked(request.prompt), unpacked(request.known)
        try:
            for count in range(request.job.max_tokens):
                await self._wait(count)
                started_s = started_s or time.time()
                if count < len(known):
                    tokens.append(known[count])
                    continue
                tokens.append(next_token(tokens) + self.twist)
                last = count + 1 == request.job.max_tokens
                reused = None if count else self._reused(request.prompt_tokens, request.handle)
                call.send(TokenStep([tokens[-1]], "length" if last else "", reused=reused))
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        outcome = TransferOutcome.PULLED if request.handle else TransferOutcome.LOCAL
        return DecodeReply(TransferReport(outcome, tokens=request.prompt_tokens), queued_s, started_s, time.time())

    async def _wait(self, count: int) -> None:
        if self.before_token is not None:
            result = self.before_token(count)
            if asyncio.iscoroutine(result) or isinstance(result, asyncio.Future):
                await result
        else:
            await asyncio.sleep(0)

    async def expect(self, request: ExpectRequest, _: ServerCall) -> None:
        self.expected.append(request)

    async def predicted(self, said: Predicted, _: ServerCall) -> None:
        self.told.append(said)

    async def prefetch(self, request: PrefetchRequest, call: ServerCall) -> None:
        self.prefetched.append(request.handle.transfer_id)
        self.timeouts.append(call.timeout_s)
        try:
            if self.fetching is not None:
                await self.fetching.wait()
        except asyncio.CancelledError:
            self.dropped.append(request.handle.transfer_id)
            raise

    async def release(self, request: ReleaseRequest, _: ServerCall) -> None:
        self.released += request.transfer_ids

    async def releases(self, count: int) -> None:
        """Wait until so many transfers were released, each once."""
        async with asyncio.timeout(2):
            while len(self.released) < count:
                await asyncio.sleep(0.005)
        assert len(self.released) == count
