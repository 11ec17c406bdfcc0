"""Checks the grammars of structured outputs before a request becomes a job.

A grammar of 200 bytes can take minutes to compile, and only the end of its process ends that. So worker processes do
what an instance's engine will do with a grammar, under limits that the kernel enforces: CPU time, time, memory. Workers
are forked from a small process, which is itself forked before the gateway holds connections.

Trials cost CPU time and their verdicts memory: trials take turns fairly between callers, equal grammars are one trial,
and verdicts are cached up to a number of bytes. The verdict that a grammar is too expensive depends on the machine's
load, and is cached for TOO_EXPENSIVE_S.
"""

import asyncio
import gc
import hashlib
import os
import resource
import signal
import socket
import struct
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn, Self

import msgspec
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import QueueOverflowError, VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output import backend_xgrammar

from gateway import vllm_patches
from gateway.admission import current_request
from gateway.settings import GatewaySettings
from shared.policy.fair_share import CallerQueue, TokenCounters

GOOD, BAD = b"+", b"-"
HELLO, LENGTH, REPLY = struct.Struct("<I"), struct.Struct("<I"), struct.Struct("<I?")
_MEMORY_BYTES = 1 << 30  # that a trial may add to the memory of its process
_MAX_GROWTH_BYTES = 256 << 20  # that trials may leave in a worker before another worker replaces it
_params = msgspec.msgpack.Decoder(SamplingParams)
# Has a new worker write to the pages that nearly all trials need.
_WARM_UP = StructuredOutputsParams(
    json={
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "number": {"type": "number"},
            "count": {"type": "integer"},
            "list": {"type": "array", "items": {"enum": ["a", True, None]}},
        },
        "required": ["text", "number", "count", "list"],
    }
)


def fork_grammar_process(config: VllmConfig, cpu_s: float, wall_s: float) -> tuple[int, socket.socket]:
    """Its pid, and the channel over which it receives a socket for each new worker; it ends when the channel is closed.

    A worker sends HELLO with its pid. A request is LENGTH and the bytes of SamplingParams; a reply is REPLY, which says
    whether the worker continues, and the verdict. Must be called before the process holds connections, which would stay
    open in the new process.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        ours.setblocking(False)
        return pid, ours
    try:
        _serve(config, theirs, cpu_s, wall_s)
    finally:
        os._exit(1)


def _serve(config: VllmConfig, channel: socket.socket, cpu_s: float, wall_s: float) -> NoReturn:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers leave no zombies
    os.closerange(3, channel.fileno())
    os.closerange(channel.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    backend_xgrammar.validate_xgrammar_grammar = vllm_patches.validate_grammar  # forked from a tested process
    os.environ["VLLM_REGEX_COMPILATION_TIMEOUT_S"] = "0"  # the kernel's limits hold, and no thread is left behind
    compiler = _Compiler(config)
    gc.collect()
    gc.freeze()  # a collection in a worker would copy every page
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            channel.close()
            _work(compiler, descriptors[0], cpu_s, wall_s)
        os.close(descriptors[0])


def _work(compiler: "_Compiler", descriptor: int, cpu_s: float, wall_s: float) -> NoReturn:
    """Try one grammar after the other until the socket is closed, a limit ends the process, or it has grown.

    One worker serves many grammars because most of the cost is in parts that grammars share, which the compiler keeps,
    and because a process that was just forked copies each page that it writes to.
    """
    try:
        for alarm in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(alarm, signal.SIG_DFL)
        compiler.run(msgspec.msgpack.encode(SamplingParams(structured_outputs=_WARM_UP)))
        _, resident = _sizes()
        max_resident, goes_on = resident + _MAX_GROWTH_BYTES, True
        with socket.socket(fileno=descriptor) as channel, channel.makefile("rb") as reading:
            channel.sendall(HELLO.pack(os.getpid()))
            while goes_on and (length := reading.read(LENGTH.size)):
                request = reading.read(LENGTH.unpack(length)[0])
                verdict = _within_limits(compiler, request, cpu_s, wall_s)
                _, resident = _sizes()
                goes_on = resident <= max_resident
                channel.sendall(REPLY.pack(len(verdict), goes_on) + verdict)
    finally:
        os._exit(0)


def _within_limits(compiler: "_Compiler", request: bytes, cpu_s: float, wall_s: float) -> bytes:
    size, _ = _sizes()
    resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY_BYTES, resource.RLIM_INFINITY))
    timers = ((signal.ITIMER_PROF, cpu_s), (signal.ITIMER_REAL, wall_s))
    for timer, seconds in timers:
        signal.setitimer(timer, seconds)
    verdict = compiler.run(request)
    for timer, _ in timers:
        signal.setitimer(timer, 0.0)
    return verdict


def _sizes() -> tuple[int, int]:
    """Bytes of the address space and in memory."""
    with open("/proc/self/statm") as pages:
        size, resident = map(int, pages.read().split()[:2])
    return size * resource.getpagesize(), resident * resource.getpagesize()


class _Compiler:
    """Does with a grammar what an instance's engine will do."""

    def __init__(self, config: VllmConfig) -> None:
        # These imports take seconds.
        from vllm.v1.structured_output import backend_guidance, backend_lm_format_enforcer, backend_outlines

        self._config = config
        self._tokenizer = cached_tokenizer_from_config(config.model_config)
        self._vocab_size = config.model_config.get_vocab_size()
        self._xgrammar: Any = None
        with suppress(Exception):  # an unsupported tokenizer, which the verdict on each grammar will name
            self._xgrammar = self._backend(backend_xgrammar.XgrammarBackend)
        self._kinds: dict[str, Any] = {
            "xgrammar": backend_xgrammar.XgrammarBackend,
            "guidance": backend_guidance.GuidanceBackend,
            "outlines": backend_outlines.OutlinesBackend,
            "lm-format-enforcer": backend_lm_format_enforcer.LMFormatEnforcerBackend,
        }

    def run(self, request: bytes) -> bytes:
        """Validate and compile: GOOD with the validated parameters, BAD with the error, empty without enough memory."""
        from vllm.v1.structured_output.request import get_structured_output_key

        try:
            params = _params.decode(request)
            params._validate_structured_outputs(
                self._config.model_config, self._config.structured_outputs_config, self._tokenizer
            )
            name = params.structured_outputs._backend
            backend = self._xgrammar if name == "xgrammar" and self._xgrammar else self._backend(self._kinds[name])
            backend.compile_grammar(*get_structured_output_key(params.structured_outputs))
        except MemoryError:
            return b""
        except Exception as error:  # a boundary: any error is caused by the grammar
            return BAD + str(error).encode()
        return GOOD + msgspec.msgpack.encode(params)

    def _backend(self, kind: Any) -> Any:
        return kind(self._config, tokenizer=self._tokenizer, vocab_size=self._vocab_size)


TOO_EXPENSIVE_S = 60.0
_WORKERS = 2
_ENTRY_BYTES = 512  # of a cached verdict besides its text: key, entry, objects
_WALL = 6.0  # the time limit of a trial, in multiples of its limit of CPU time, for busy machines
_LOWER_PRIORITY_S = 0.1  # a trial that takes longer gets a lower priority than the processes that serve
_NICE = 10


class _Verdicts:
    """An LRU cache of verdicts, up to a number of bytes. Times are of the monotonic clock."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes, now: float) -> bytes | None:
        verdict, until_mono = self._kept.get(key, (b"", 0.0))
        if now >= until_mono:
            self._forget(key)
            return None
        self._kept.move_to_end(key)
        return verdict

    def put(self, key: bytes, verdict: bytes, until_mono: float) -> None:
        self._forget(key)
        if len(verdict) + _ENTRY_BYTES > self._max_bytes:
            return
        self._kept[key] = (verdict, until_mono)
        self.total_bytes += len(verdict) + _ENTRY_BYTES
        while self.total_bytes > self._max_bytes:
            self._forget(next(iter(self._kept)))

    def _forget(self, key: bytes) -> None:
        if (kept := self._kept.pop(key, None)) is not None:
            self.total_bytes -= len(kept[0]) + _ENTRY_BYTES


class _Slots:
    """A fair semaphore: the next caller is the one whose trials have taken the least time."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._shares = TokenCounters()
        self._queue: CallerQueue[tuple[asyncio.Future[None], str]] = CallerQueue(self._shares)

    async def acquire(self, who: str) -> None:
        self._shares.came(who, time.monotonic())
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = (turn, who)
        self._queue.push(waiting, who)
        self._wake()
        try:
            await turn
        except asyncio.CancelledError:
            if not self._queue.remove(waiting, who):
                self._free += 1
            self._shares.left(who, time.monotonic())
            self._wake()
            raise

    def release(self, who: str, took_s: float) -> None:
        now = time.monotonic()
        self._shares.charge(who, max(1, int(took_s * 1e6)), 0)
        self._shares.left(who, now)
        self._free += 1
        self._wake()

    def _wake(self) -> None:
        while self._free and (head := self._queue.head()) is not None:
            self._queue.remove(head, head[1])
            if not head[0].done():
                self._free -= 1
                head[0].set_result(None)


@dataclass(slots=True, eq=False)
class _Trial:
    """The trial of one grammar, for all requests that have this grammar meanwhile."""

    waiters: int = 0
    begun: bool = False
    task: "asyncio.Task[bytes]" = field(init=False)


class _Worker:
    """A process that tries one grammar after the other. The constructor requests the fork."""

    def __init__(self, channel: socket.socket) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(channel, [b"?"], [theirs.fileno()])
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._pid = 0

    @property
    def gone(self) -> bool:
        """Whether its process has ended between two trials."""
        return self._streams is not None and self._streams[0].at_eof()

    async def run(self, request: bytes) -> tuple[bytes, bool]:
        """The verdict, and whether the worker continues. Raises IncompleteReadError or ConnectionError where its
        process ends because the grammar is too expensive.
        """
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._socket)
            (self._pid,) = HELLO.unpack(await self._streams[0].readexactly(HELLO.size))
        reader, writer = self._streams
        priority = os.getpriority(os.PRIO_PROCESS, 0)
        lowering = asyncio.get_running_loop().call_later(_LOWER_PRIORITY_S, self._prioritise, priority + _NICE)
        try:
            writer.write(LENGTH.pack(len(request)) + request)
            length, goes_on = REPLY.unpack(await reader.readexactly(REPLY.size))
            verdict = await reader.readexactly(length)
        finally:
            lowering.cancel()
        self._prioritise(priority)
        return verdict, goes_on

    def close(self) -> None:
        """The process ends after its trial."""
        if self._streams is not None:
            self._streams[1].close()
        else:
            self._socket.close()

    def _prioritise(self, nice: int) -> None:
        """Set the priority of all its threads. Without root a lowered priority cannot be raised again, and stays."""
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if os.getpriority(os.PRIO_PROCESS, self._pid) != nice:
                for thread in os.listdir(f"/proc/{self._pid}/task"):
                    os.setpriority(os.PRIO_PROCESS, int(thread), nice)


class Grammars:
    """Tries each grammar once and caches the verdict. A context manager; enter it before connections are made."""

    def __init__(self, config: VllmConfig, settings: GatewaySettings) -> None:
        self._config = config
        self._cpu_s = settings.grammar_cpu_s
        self._verdicts = _Verdicts(settings.grammar_cache_bytes)
        self._trials: dict[bytes, _Trial] = {}  # that wait or run
        self._slots = _Slots(_WORKERS)
        message = f"the grammar is too expensive to compile: it took over {self._cpu_s:g} s, or too much memory"
        self._too_expensive = BAD + message.encode()
        self._params = msgspec.msgpack.Decoder(SamplingParams)

    def __enter__(self) -> Self:
        self._pid, self._channel = fork_grammar_process(self._config, self._cpu_s, _WALL * self._cpu_s)
        self._idle = [_Worker(self._channel) for _ in range(_WORKERS)]
        vllm_patches.defer_grammars()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for trial in self._trials.values():
            trial.task.cancel()
        for worker in self._idle:
            worker.close()
        self._channel.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    async def watch(self) -> None:
        """Raises ChildProcessError when the process that forks workers has ended: it cannot be restarted."""
        with suppress(ConnectionResetError):  # where requested workers were not forked
            await asyncio.get_running_loop().sock_recv(self._channel, 1)
        raise ChildProcessError("the process that forks workers for grammars has ended")

    async def check(self, params: SamplingParams) -> Any:
        """The structured outputs of `params` in the form that engines accept.

        Raises VLLMValidationError, and QueueOverflowError where too many grammars wait for their trial.
        """
        request = msgspec.msgpack.encode(SamplingParams(structured_outputs=params.structured_outputs))
        key = hashlib.sha256(request).digest()
        verdict = self._verdicts.get(key, time.monotonic()) or await self._trial_of(key, request)
        if not verdict.startswith(GOOD):
            raise VLLMValidationError(verdict[1:].decode(), parameter="structured_outputs")
        return self._params.decode(verdict[1:]).structured_outputs

    async def _trial_of(self, key: bytes, request: bytes) -> bytes:
        """The verdict of the current trial of this grammar, or of a new one."""
        trial = self._trials.get(key)
        if trial is None:
            trial = self._trials[key] = _Trial()
            state = current_request.get(None)
            caller = state.caller if state is not None else ""
            trial.task = asyncio.get_running_loop().create_task(self._in_turn(trial, key, request, caller))
            trial.task.add_done_callback(lambda ended: self._ended(key, trial, ended))
        trial.waiters += 1
        try:
            return await asyncio.shield(trial.task)
        finally:
            trial.waiters -= 1
            # A trial that has begun continues without clients: so does its process, whose time must be counted.
            if not trial.waiters and not trial.begun and self._trials.get(key) is trial:
                del self._trials[key]
                trial.task.cancel()

    async def _in_turn(self, trial: _Trial, key: bytes, request: bytes, who: str) -> bytes:
        try:
            async with asyncio.timeout(_WALL * self._cpu_s):
                await self._slots.acquire(who)
        except TimeoutError:
            raise QueueOverflowError from None
        trial.begun = True
        began_mono = time.monotonic()
        try:
            verdict = await self._try(request)
        finally:
            self._slots.release(who, time.monotonic() - began_mono)
        until_mono = time.monotonic() + TOO_EXPENSIVE_S if verdict == self._too_expensive else float("inf")
        self._verdicts.put(key, verdict, until_mono)
        return verdict

    def _ended(self, key: bytes, trial: _Trial, task: "asyncio.Task[bytes]") -> None:
        if self._trials.get(key) is trial:
            del self._trials[key]
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the waiters have it, or all have left

    async def _try(self, request: bytes) -> bytes:
        worker = self._idle.pop() if self._idle else _Worker(self._channel)
        if worker.gone:
            worker.close()
            worker = _Worker(self._channel)
        verdict, goes_on = b"", False
        try:
            verdict, goes_on = await worker.run(request)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # a limit ended the process
        finally:
            if not goes_on:
                worker.close()
        self._idle.append(worker if goes_on else _Worker(self._channel))
        return verdict or self._too_expensive
