"""How KV messages move: one small protocol, with an implementation for each scheme of an address (`transports`).

A `Transport` belongs to one thread, which waits on it, and drains what is ready; only `wake` may be called from
elsewhere.
"""

from dataclasses import dataclass
from typing import Protocol

from services.worker.kv.wire.frames import Buffer


@dataclass(frozen=True, slots=True)
class Received:
    """A message of an exporter. The payload is no copy: it lasts until the link's next `receive`; see `Link.keep`."""

    header: Buffer
    payload: Buffer | None = None  # None where there is none, or it lies where `Place` wanted it
    payload_bytes: int = 0
    checksum: int = 0  # of the payload, as it came
    sent_checksum: int | None = None  # of the payload, as it was sent, where the transport sends it: see Listener.seals


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a payload goes that has not come yet: memory in order, as large as the payload in all."""

    owner: object  # who wanted it there, and may want so no more: see Link.divert
    views: list[memoryview]


class Place(Protocol):
    """Says where a payload goes, once its header is here; None: anywhere. Not every transport asks."""

    def __call__(self, link: "Link", header: Buffer, size_bytes: int) -> Placement | None:
        """Called on the transport's thread; raises nothing."""


class Listener(Protocol):
    """Export side: many peers, each with an identity."""

    address: str
    seals: bool  # payloads are followed by their checksum: nobody else need take it

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """The next message with its sender, or None when there is none at the moment."""

    def takes(self, peer: bytes) -> bool:
        """Whether a payload for that peer would be on its way at once, not behind others; true of one that is gone."""

    def send(self, peer: bytes, header: bytes, payload: Buffer | None = None) -> bool:
        """Send without blocking or copying the payload, which must not change later; False when the peer is
        gone.
        """


class Link(Protocol):
    """Import side: one connection to a peer. Reconnects by itself; `losses` rises with each lost connection."""

    address: str

    @property
    def losses(self) -> int:
        """Connections that were lost."""
        ...

    @property
    def stranger(self) -> str:
        """Why the peer and we do not trust each other; empty as long as nothing says so."""
        ...

    @property
    def carrier(self) -> str:
        """What has brought the message that was received last: "tcp", "zeromq" or "nixl"."""
        ...

    @property
    def connected(self) -> bool:
        """Whether the peer has greeted us over the present connection."""

    def receive(self) -> Received | None:
        """The next message, or None when there is none at the moment."""

    def keep(self) -> None:
        """The payload of the message that was received last stays as it is."""

    def send(self, message: bytes) -> bool:
        """Send without blocking; False when it cannot be taken."""

    def divert(self, owner: object) -> None:
        """What is on its way to where this owner placed it goes nowhere; that memory is not touched again."""

    def close(self) -> None:
        """Disconnect."""


class Transport(Protocol):
    """Makes listeners and links, and waits for all of them at once."""

    def listen(self, address: str) -> Listener:
        """Bind. Raises OSError when the address cannot be had."""

    def connect(self, address: str, place: Place | None = None) -> Link:
        """A link of its own to an address, which need not be up yet. Raises OSError when the address makes no sense."""

    def wait(self, timeout_s: float) -> list[Link]:
        """Wait until a listener or link has something or `wake` is called; the links that have."""

    def wake(self) -> None:
        """End the current or next wait. Callable from any thread."""

    def close(self) -> None:
        """Close everything."""
