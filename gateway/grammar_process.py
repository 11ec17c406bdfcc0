"""The processes in which grammars are tried: one that is forked once and stays small, and a child of it for each.

A grammar of 200 bytes can take minutes to compile, and nothing but its process can be ended. So a child tries what a
worker's engine will do with it, under limits that the kernel keeps: CPU time, time, memory.
"""

import gc
import os
import resource
import signal
import socket
from contextlib import suppress
from typing import Any, NoReturn

import msgspec
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output import backend_xgrammar

GOOD, BAD = b"+", b"-"
_MEMORY_BYTES = 1 << 30  # on top of what the process has
_NICE = 10  # who serves goes first
_validate_in_full = backend_xgrammar.validate_xgrammar_grammar
_params = msgspec.msgpack.Decoder(SamplingParams)


def fork_grammar_process(config: VllmConfig, cpu_s: float, wall_s: float) -> tuple[int, socket.socket]:
    """Its pid and the channel over which it takes sockets, one a grammar; it ends when the channel is closed.

    To be called before the process holds connections, which would stay open in it.
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
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    os.closerange(3, channel.fileno())
    os.closerange(channel.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    backend_xgrammar.validate_xgrammar_grammar = _validate_in_full
    trial = _Trial(config)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    while True:
        word, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        if not word:
            os._exit(0)
        if os.fork() == 0:
            channel.close()
            _child(trial, descriptors[0], cpu_s, wall_s)
        os.close(descriptors[0])


def _child(trial: "_Trial", descriptor: int, cpu_s: float, wall_s: float) -> NoReturn:
    try:
        for timer, alarm, seconds in (
            (signal.ITIMER_PROF, signal.SIGPROF, cpu_s),
            (signal.ITIMER_REAL, signal.SIGALRM, wall_s),
        ):
            signal.signal(alarm, signal.SIG_DFL)
            signal.setitimer(timer, seconds)
        os.nice(_NICE)
        with open("/proc/self/statm") as pages:
            has = int(pages.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (has + _MEMORY_BYTES, has + _MEMORY_BYTES))
        with socket.socket(fileno=descriptor) as channel, channel.makefile("rb") as reading:
            channel.sendall(trial.run(reading.read()))
    finally:
        os._exit(0)


class _Trial:
    """What a worker's engine will do with a grammar."""

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
        """Validates and compiles; GOOD with the parameters as validated, or BAD with what is wrong."""
        from vllm.v1.structured_output.request import get_structured_output_key

        try:
            params = _params.decode(request)
            params._validate_structured_outputs(
                self._config.model_config, self._config.structured_outputs_config, self._tokenizer
            )
            name = params.structured_outputs._backend
            backend = self._xgrammar if name == "xgrammar" and self._xgrammar else self._backend(self._kinds[name])
            backend.compile_grammar(*get_structured_output_key(params.structured_outputs))
        except Exception as error:  # the boundary: whatever a grammar brings about is the grammar's
            return BAD + str(error).encode()
        return GOOD + msgspec.msgpack.encode(params)

    def _backend(self, kind: Any) -> Any:
        return kind(self._config, tokenizer=self._tokenizer, vocab_size=self._vocab_size)
