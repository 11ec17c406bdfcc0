"""NIXL as it is used here: host memory that is registered once, and reads of a peer's.

An agent has no thread of its own: reads go on while somebody asks for their state, and a peer's reads of our memory,
where its transport wants our help (TCP does), while somebody calls `progress`. Its own thread, which upstream starts by
default, takes a core whether or not anything moves (seen: 0.9 of one).
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from services.worker.kv.arena import Bytes

_BACKEND = "UCX"
_MEMORY = "DRAM"
_LEVEL = "NIXL_LOG_LEVEL"
_environment = threading.Lock()


class NixlError(Exception):
    """NIXL cannot do what was asked; the message is its own."""


def installed() -> bool:
    """Whether the package is there."""
    return find_spec("nixl") is not None


def this_host() -> str:
    """A name that two processes share which reach each other over loopback: of the boot and the network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"


class Read:
    """Bytes of a peer on their way into memory of ours, which is kept until nothing refers to this or to `payload`."""

    def __init__(self, agent: Any, handle: Any, into: Bytes, size: int, state: str) -> None:
        self.payload = into.data[:size]  # a view that refers to `into` itself, which a slice of an array does not
        self._agent = agent
        self._handle = handle
        self._state = state

    @property
    def under_way(self) -> bool:
        """Whether the memory may still be written."""
        return self._state == "PROC"

    def done(self) -> bool:
        """Go on; whether all of it is here. Raises NixlError when it does not come."""
        if self.under_way:
            try:
                self._state = self._agent.check_xfer_state(self._handle)
            except Exception as error:
                self._state = "ERR"
                raise NixlError(str(error)) from error
        if self._state == "ERR":
            raise NixlError("the read has failed")
        return not self.under_way


class NixlAgent:
    """For one thread at a time."""

    def __init__(self, trusted: bool) -> None:
        """Only processes of this host reach it where the networks are not `trusted`. Raises OSError where NIXL, or what
        it rests on, is not to be had.
        """
        try:
            self._agent = _made(trusted)
        except Exception as error:
            raise OSError(f"no NIXL here: {type(error).__name__}: {error}") from error
        self._registered: list[Bytes] = []  # kept as long as a peer may read them
        self._peers: dict[bytes, int] = {}  # how many links are to each

    def register(self, memory: Bytes) -> None:
        """Let it be read into, and by peers that get our metadata after this. Raises OSError."""
        try:
            self._agent.register_memory(_described(memory.ctypes.data, memory.nbytes), _MEMORY)
        except Exception as error:
            raise OSError(f"NIXL cannot register {memory.nbytes} bytes: {error}") from error
        self._registered.append(memory)

    @property
    def metadata(self) -> bytes:
        """What a peer needs to read what is registered."""
        made: bytes = self._agent.get_agent_metadata()
        return made

    def meet(self, metadata: bytes) -> bytes:
        """Get to know a peer; its name. Raises NixlError."""
        try:
            name: bytes = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise NixlError(str(error)) from error
        self._peers[name] = self._peers.get(name, 0) + 1
        return name

    def part(self, name: bytes) -> None:
        """The opposite of `meet`."""
        self._peers[name] -= 1
        if not self._peers[name]:
            del self._peers[name]
            self._agent.remove_remote_agent(name)

    def read(self, name: bytes, address: int, into: Bytes, size: int) -> Read:
        """Begin to read so much of a peer's registered memory into ours, which is registered, too. Raises NixlError."""
        try:
            local = self._agent.get_xfer_descs(_described(into.ctypes.data, size), _MEMORY)
            remote = self._agent.get_xfer_descs(_described(address, size), _MEMORY)
            handle = self._agent.initialize_xfer("READ", local, remote, name)
            return Read(self._agent, handle, into, size, self._agent.transfer(handle))
        except Exception as error:
            raise NixlError(str(error)) from error

    def progress(self) -> None:
        """Help peers to read."""
        self._agent.get_new_notifs()


def _made(trusted: bool) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    if _LEVEL not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)
    agent = nixl_agent(f"polyphase-{uuid4().hex}", nixl_agent_config(backends=[], enable_prog_thread=False))
    with _loopback_only(not trusted):
        agent.create_backend(_BACKEND, {})
    return agent


@contextmanager
def _loopback_only(wanted: bool) -> Iterator[None]:
    """UCX listens on each network that it may use, and asks nobody who he is: who reaches it can read and write this
    process's memory.
    """
    name = "UCX_NET_DEVICES"
    with _environment:
        before = os.environ.get(name)
        if wanted:
            os.environ[name] = "lo"
        try:
            yield
        finally:
            if before is not None:
                os.environ[name] = before
            else:
                os.environ.pop(name, None)


def _described(address: int, size: int) -> "np.ndarray[Any, np.dtype[np.uint64]]":
    return np.array([[address, size, 0]], dtype=np.uint64)
