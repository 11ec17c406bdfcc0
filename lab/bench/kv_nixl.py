"""NIXL itself over TCP, without anything of ours around it: what a transport of ours over TCP is measured against.

One registered block on each side and one read of all that is wanted: nothing is cut into frames and nothing is checked.
Both sides look ten thousand times a second how far it is. Looking without a pause takes cores from the kernel, which
copies: on two busy ones a third of the rate was left.
"""

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing.connection import Connection

import numpy as np

from services.worker.kv.arena import Bytes
from services.worker.kv.wire.nixl_agent import NixlAgent, installed

_PAUSE_S = 0.0001
NOT_INSTALLED = "NIXL is not installed (pip install 'polyphase[nixl]'): nothing is measured against it"


def note() -> str:
    """What is measured, or why it is not."""
    return f"NIXL {version('nixl')} over UCX's TCP" if installed() else NOT_INSTALLED


class PlainNixl:
    """Reads of another process's memory."""

    def __init__(self, pipe: Connection, size: int) -> None:
        self._pipe = pipe
        self._agent, self._block = _agent(size)
        metadata, self._address = pipe.recv()
        self._peer = self._agent.meet(metadata)

    def copy(self, size: int) -> tuple[float, float]:
        """Read so many bytes; seconds, and seconds of this process's CPU. Raises NixlError."""
        self._pipe.send(True)
        self._pipe.recv()
        cpu_s, started = time.process_time(), time.perf_counter()
        read = self._agent.read(self._peer, self._address, self._block, size)
        while not read.done():
            time.sleep(_PAUSE_S)
        took = time.perf_counter() - started, time.process_time() - cpu_s
        self._pipe.send(False)
        self._pipe.recv()
        return took


@contextmanager
def plain_nixl(size: int) -> Iterator[PlainNixl]:
    """Two processes with blocks of so many bytes. Raises OSError where NIXL is not to be had."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_export, args=(there, size), daemon=True)
    child.start()
    try:
        yield PlainNixl(here, size)
    finally:
        here.send(None)
        child.join(10)
        if child.is_alive():
            child.kill()


def _export(pipe: Connection, size: int) -> None:
    agent, block = _agent(size)
    block[:] = 1
    pipe.send((agent.metadata, block.ctypes.data))
    while pipe.recv() is not None:
        pipe.send(True)
        while not pipe.poll(0):
            agent.progress()
            time.sleep(_PAUSE_S)
        pipe.recv()
        pipe.send(True)


def _agent(size: int) -> tuple[NixlAgent, Bytes]:
    before = os.environ.get("UCX_TLS")
    os.environ["UCX_TLS"] = "tcp"
    try:
        agent = NixlAgent(trusted=False)
    finally:
        if before is None:
            del os.environ["UCX_TLS"]
        else:
            os.environ["UCX_TLS"] = before
    block: Bytes = np.zeros(size, np.uint8)
    agent.register(block)
    return agent, block
