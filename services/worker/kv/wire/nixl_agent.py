"""The NIXL library as Polyphase uses it: registered host memory, reads from a peer's memory, the messages by which
two ends agree on them, and the counters of a rank. The library is imported only when an agent is created.

An agent has no thread of its own: a read makes progress while its state is queried, and a peer's reads of this side's
memory, where its transport needs that (TCP does), while `progress` is called. The agent's own thread, which upstream
starts by default, takes a core whether or not anything moves (seen: 0.9 of one).

Protocol: the importer begins with `Hello`; the exporter answers with `HelloAck` and its agent's metadata as payload, or
with a reason for refusal. The importer reads a few bytes as a trial and sends `Ready`, or `Bye` whenever it cannot
read. From `Ready` on, payloads are not sent but offered: the importer reads one and sends `Ack`, after which the
exporter may reuse that memory. A mark that begins no msgpack value tells these messages from KV messages.
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

import msgspec
import numpy as np

from services.worker.kv.staging import Bytes
from services.worker.kv.wire.protocol import Buffer, opened, sealed

NIXL_SCHEME = "nixl"
NIXL_VERSION = 1
_MARK = b"\xc1"
_BACKEND = "UCX"
_MEMORY = "DRAM"
_LEVEL = "NIXL_LOG_LEVEL"
_environment = threading.Lock()


class NixlError(Exception):
    """NIXL failed; the message is its own."""


def installed() -> bool:
    return find_spec("nixl") is not None


def this_host() -> str:
    """A name that is the same for processes which reach each other over loopback: of the boot and the network
    namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"


class Read:
    """A read of a peer's bytes into local memory, which is kept until nothing refers to this or to `payload`."""

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
        """Make progress; whether the read is complete. Raises NixlError when it fails."""
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
    """An agent, for one thread at a time."""

    def __init__(self, trusted: bool) -> None:
        """Only processes of this host reach it where the networks are not `trusted`. Raises OSError where NIXL, or
        what it depends on, is not available.
        """
        try:
            self._agent = _made(trusted)
        except Exception as error:
            raise OSError(f"no NIXL here: {type(error).__name__}: {error}") from error
        self._registered: list[Bytes] = []  # kept as long as a peer may read them
        self._peers: dict[bytes, int] = {}  # how many links are to each

    def register(self, memory: Bytes) -> None:
        """Register memory, to be read into, and by peers that get the metadata after this. Raises OSError."""
        try:
            self._agent.register_memory(_described(memory.ctypes.data, memory.nbytes), _MEMORY)
        except Exception as error:
            raise OSError(f"NIXL cannot register {memory.nbytes} bytes: {error}") from error
        self._registered.append(memory)

    @property
    def metadata(self) -> bytes:
        """What a peer needs to read the registered memory."""
        made: bytes = self._agent.get_agent_metadata()
        return made

    def connect(self, metadata: bytes) -> bytes:
        """Connect to a peer; its name. Raises NixlError."""
        try:
            name: bytes = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise NixlError(str(error)) from error
        self._peers[name] = self._peers.get(name, 0) + 1
        return name

    def disconnect(self, name: bytes) -> None:
        """Undo one `connect`."""
        self._peers[name] -= 1
        if not self._peers[name]:
            del self._peers[name]
            self._agent.remove_remote_agent(name)

    def read(self, name: bytes, address: int, into: Bytes, size: int) -> Read:
        """Begin to read that many bytes of a peer's registered memory into `into`, which is registered too. Raises
        NixlError.
        """
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
    """UCX listens on every network that it may use and does not authenticate: a process that reaches it can read
    and write the memory of this one.
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


class NixlMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all. Tags are the class names, or those of an earlier version."""


class Hello(NixlMessage, frozen=True, tag="Meet"):
    """The importer has NIXL. `host` is `this_host()`; `trusted` whether its agent uses other networks."""

    version: int
    host: str
    trusted: bool


class HelloAck(NixlMessage, frozen=True, tag="Met"):
    """The answer: why the exporter's memory must not be read, or what to try with: `size_bytes` at `address`, of
    that checksum.
    """

    refusal: str
    address: int = 0
    size_bytes: int = 0
    checksum: int = 0


class Ready(NixlMessage, frozen=True):
    """The trial succeeded."""


class Bye(NixlMessage, frozen=True, tag="Part"):
    """The importer stops reading, and reads under way are given up."""

    reason: str


class Offer(NixlMessage, frozen=True):
    """Instead of a KV message with a payload: its header, and where the payload lies. Numbered from 1."""

    number: int
    address: int
    size_bytes: int
    header: bytes


class Ack(NixlMessage, frozen=True, tag="Taken"):
    """Offers up to that number have been read."""

    number: int


AnyMessage = Hello | HelloAck | Ready | Bye | Offer | Ack
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode_nixl(message: NixlMessage) -> bytes:
    return _MARK + sealed(_encoder.encode(message))


def decode_nixl(part: Buffer) -> AnyMessage | None:
    """None for any other message."""
    if part[:1] != _MARK:
        return None
    return opened(_decoder, memoryview(part)[1:])
