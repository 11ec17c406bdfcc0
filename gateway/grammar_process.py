"""The processes in which grammars are tried: one that is forked once and stays small, and workers that it forks.

A grammar of 200 bytes can take minutes to compile, and nothing but its process can be ended. So a worker tries what
an instance's engine will do with it, under limits that the kernel keeps: CPU time, time, memory. A worker tries one
grammar after the other, as an engine does: most of a grammar's cost is in parts that other grammars share, which the
compiler keeps, and a process that has just been forked copies every page that it writes to.
"""

import gc
import os
import resource
import signal
import socket
import struct
from contextlib import suppress
from typing import Any, NoReturn

import msgspec
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output import backend_xgrammar

GOOD, BAD = b"+", b"-"
HELLO, LENGTH, REPLY = struct.Struct("<I"), struct.Struct("<I"), struct.Struct("<I?")
_MEMORY_BYTES = 1 << 30  # of a trial, on top of what the process has
_KEPT_BYTES = 256 << 20  # what trials may leave behind in a worker before another takes its place
_validate_in_full = backend_xgrammar.validate_xgrammar_grammar
_params = msgspec.msgpack.Decoder(SamplingParams)
# Has a new worker touch what nearly all trials need.
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
    """Its pid and the channel over which it takes sockets, one a worker; it ends when the channel is closed.

    A worker says HELLO with its pid. Each request is LENGTH and the bytes of SamplingParams; each answer is REPLY,
    which says whether the worker goes on, and the verdict. To be called before the process holds connections, which
    would stay open in it.
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
    backend_xgrammar.validate_xgrammar_grammar = _validate_in_full
    os.environ["VLLM_REGEX_COMPILATION_TIMEOUT_S"] = "0"  # the kernel's limits hold, and no thread is left behind
    trial = _Trial(config)
    gc.collect()
    gc.freeze()  # a collection in a worker would copy every page
    while True:
        word, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        if not word:
            os._exit(0)
        if os.fork() == 0:
            channel.close()
            _work(trial, descriptors[0], cpu_s, wall_s)
        os.close(descriptors[0])


def _work(trial: "_Trial", descriptor: int, cpu_s: float, wall_s: float) -> NoReturn:
    """Try one grammar after the other until the socket is closed, a limit ends the process, or it has grown."""
    try:
        for alarm in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(alarm, signal.SIG_DFL)
        trial.run(msgspec.msgpack.encode(SamplingParams(structured_outputs=_WARM_UP)))
        _, resident = _sizes()
        most, goes_on = resident + _KEPT_BYTES, True
        with socket.socket(fileno=descriptor) as channel, channel.makefile("rb") as reading:
            channel.sendall(HELLO.pack(os.getpid()))
            while goes_on and (length := reading.read(LENGTH.size)):
                request = reading.read(LENGTH.unpack(length)[0])
                verdict = _within_limits(trial, request, cpu_s, wall_s)
                _, resident = _sizes()
                goes_on = resident <= most
                channel.sendall(REPLY.pack(len(verdict), goes_on) + verdict)
    finally:
        os._exit(0)


def _within_limits(trial: "_Trial", request: bytes, cpu_s: float, wall_s: float) -> bytes:
    size, _ = _sizes()
    resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY_BYTES, resource.RLIM_INFINITY))
    timers = ((signal.ITIMER_PROF, cpu_s), (signal.ITIMER_REAL, wall_s))
    for timer, seconds in timers:
        signal.setitimer(timer, seconds)
    verdict = trial.run(request)
    for timer, _ in timers:
        signal.setitimer(timer, 0.0)
    return verdict


def _sizes() -> tuple[int, int]:
    """Bytes of the address space and in memory."""
    with open("/proc/self/statm") as pages:
        size, resident = map(int, pages.read().split()[:2])
    return size * resource.getpagesize(), resident * resource.getpagesize()


class _Trial:
    """What an instance's engine will do with a grammar."""

    def __init__(self, config: VllmConfig) -> None:
        # Imported at their first use, which takes seconds.
        from vllm.v1.structured_output import backend_guidance, backend_lm_format_enforcer, backend_outlines

        self._config = config
        self._tokenizer = cached_tokenizer_from_config(config.model_config)
        self._vocab_size = config.model_config.get_vocab_size()
        self._xgrammar: Any = None
        with suppress(Exception):  # a tokenizer that it does not know; the verdict on each grammar will say so
            self._xgrammar = self._backend(backend_xgrammar.XgrammarBackend)
        self._kinds: dict[str, Any] = {
            "xgrammar": backend_xgrammar.XgrammarBackend,
            "guidance": backend_guidance.GuidanceBackend,
            "outlines": backend_outlines.OutlinesBackend,
            "lm-format-enforcer": backend_lm_format_enforcer.LMFormatEnforcerBackend,
        }

    def run(self, request: bytes) -> bytes:
        """Validates and compiles; GOOD with the parameters as validated, or BAD with what is wrong. Empty where the
        memory did not suffice.
        """
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
        except Exception as error:  # the boundary: whatever a grammar brings about is the grammar's
            return BAD + str(error).encode()
        return GOOD + msgspec.msgpack.encode(params)

    def _backend(self, kind: Any) -> Any:
        return kind(self._config, tokenizer=self._tokenizer, vocab_size=self._vocab_size)
