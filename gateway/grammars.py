"""Grammars of structured outputs, tried before they become jobs: away from the event loop, and within limits."""

import asyncio
import hashlib
import json
import os
import signal
import socket
from collections import OrderedDict
from types import TracebackType
from typing import Any, Self

import msgspec
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import QueueOverflowError, VLLMValidationError
from vllm.v1.structured_output import backend_xgrammar

from gateway.grammar_process import BAD, GOOD, fork_grammar_process
from gateway.settings import GatewaySettings

_AT_ONCE = 2
_KEPT = 1024
_WALL = 6.0  # a trial may take so many times its CPU time where the machine is busy


class Grammars:
    """Tries each grammar once and keeps the verdict. A context manager; to be entered before connections are made."""

    def __init__(self, config: VllmConfig, settings: GatewaySettings) -> None:
        self._config = config
        self._cpu_s = settings.grammar_cpu_s
        self._verdicts: OrderedDict[bytes, bytes] = OrderedDict()
        self._trials: set[asyncio.Task[bytes]] = set()
        self._slots = asyncio.Semaphore(_AT_ONCE)
        said = f"the grammar is too expensive to compile: it took over {self._cpu_s:g} s, or too much memory"
        self._too_expensive = BAD + said.encode()
        self._params = msgspec.msgpack.Decoder(SamplingParams)

    def __enter__(self) -> Self:
        self._pid, self._channel = fork_grammar_process(self._config, self._cpu_s, _WALL * self._cpu_s)
        # vLLM's handlers and parsers would compile on the event loop what is tried here once it is complete.
        backend_xgrammar.validate_xgrammar_grammar = _look_at
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for trial in self._trials:
            trial.cancel()
        self._channel.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    async def watch(self) -> None:
        """Ends only with the process that tries grammars, and then raises: it cannot be made again."""
        await asyncio.get_running_loop().sock_recv(self._channel, 1)
        raise ChildProcessError("the process that tries grammars is gone")

    async def check(self, params: SamplingParams) -> Any:
        """The structured outputs of `params` as a worker's engine takes them.

        Raises VLLMValidationError; QueueOverflowError where too many grammars are being tried.
        """
        request = msgspec.msgpack.encode(SamplingParams(structured_outputs=params.structured_outputs))
        key = hashlib.sha256(request).digest()
        verdict = self._verdicts.get(key) or await self._in_turn(key, request)
        if not verdict.startswith(GOOD):
            raise VLLMValidationError(verdict[1:].decode(), parameter="structured_outputs")
        return self._params.decode(verdict[1:]).structured_outputs

    async def _in_turn(self, key: bytes, request: bytes) -> bytes:
        try:
            async with asyncio.timeout(_WALL * self._cpu_s):
                await self._slots.acquire()
        except TimeoutError:
            raise QueueOverflowError from None
        if key in self._verdicts:  # meanwhile, for another request
            self._slots.release()
            return self._verdicts[key]
        # A trial goes on when its client has left: its process does, and is to be counted.
        trial = asyncio.get_running_loop().create_task(self._try(request))
        self._trials.add(trial)
        trial.add_done_callback(lambda ended: self._ended(key, ended))
        return await asyncio.shield(trial)

    def _ended(self, key: bytes, trial: "asyncio.Task[bytes]") -> None:
        self._trials.discard(trial)
        self._slots.release()
        if trial.cancelled() or trial.exception() is not None or trial.result() == self._too_expensive:
            return
        self._verdicts[key] = trial.result()
        if len(self._verdicts) > _KEPT:
            self._verdicts.popitem(last=False)

    async def _try(self, request: bytes) -> bytes:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._channel, [b"?"], [theirs.fileno()])
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            writer.write(request)
            writer.write_eof()
            verdict = await reader.read()
        finally:
            writer.close()
        return verdict or self._too_expensive


def _look_at(params: SamplingParams) -> None:
    """The part of vLLM's validation that costs nothing: what xgrammar is known not to do, so that parsers know."""
    schema = params.structured_outputs.json if params.structured_outputs is not None else None
    if schema:
        document = json.loads(schema) if isinstance(schema, str) else schema
        if backend_xgrammar.has_xgrammar_unsupported_json_features(document):
            raise VLLMValidationError("the JSON schema has features that xgrammar does not support")
