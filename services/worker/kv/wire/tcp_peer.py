"""One connection of an exporter's listener: an importer, or whoever else has connected."""

from collections import deque
from collections.abc import Callable

from services.worker.kv.wire.frames import Buffer
from services.worker.kv.wire.tcp_framing import WireError
from services.worker.kv.wire.tcp_inbound import Inbound
from services.worker.kv.wire.tcp_link import Loop
from services.worker.kv.wire.tcp_outbound import Outbound
from services.worker.kv.wire.tcp_streams import Connection, Untrusted

_GREETING_S = 5.0  # so long a peer may take to agree on keys and say hello
_STUCK_S = 30.0  # so long it may take nothing of what waits for it
_BURST = 64  # messages of one peer before the others get their turn
_MAX_UNREAD = 1024  # messages that wait for the server's thread: then nobody is read
_MAX_WAITING = 1024  # messages that wait for a peer

Messages = deque[tuple[bytes, list[bytes]]]


class TcpPeer:
    """Who is on the other end is known by its number. All methods run on the transport's thread."""

    def __init__(
        self,
        name: bytes,
        connection: Connection,
        loop: Loop,
        messages: Messages,
        on_end: Callable[[bytes, Exception], None],
        unread: "set[TcpPeer]",
        now_s: float,
    ) -> None:
        """What it says goes to `messages`; it enters `unread` while it has said more than was taken."""
        self.outbound = Outbound()
        self._name = name
        self._connection = connection
        self._loop = loop
        self._messages = messages
        self._on_end = on_end
        self._unread = unread
        self._inbound = Inbound(max_payload_bytes=0)
        self._answered = 0  # heartbeats
        self._since_s = now_s
        self._stuck_s = 0.0  # since when nothing went out though something waits, or 0
        self._agreed = self._greeted = self._closed = False
        loop.watch(connection, self, writes=False)

    def late(self, now_s: float) -> str:
        """Why the connection has come to nothing, or nothing."""
        if not self._greeted and now_s - self._since_s > _GREETING_S:
            return "no greeting in time"
        if not self.outbound:
            self._stuck_s = 0.0
        elif not self._stuck_s:
            self._stuck_s = now_s
        elif now_s - self._stuck_s > _STUCK_S:
            return "it takes nothing"
        return ""

    def happened(self, now_s: float, *, writable: bool) -> None:
        """See tcp_link.Owner."""
        if self._closed:
            return
        self._inbound.readable = True
        try:
            if not self._agreed and not self._agree():
                return
            self._read()
        except (OSError, WireError, Untrusted) as error:
            self.end(error)
            return
        if writable or self.outbound:
            self._stuck_s = 0.0 if writable else self._stuck_s
            self._flush()

    def send(self, header: bytes, payload: Buffer | None = None) -> bool:
        """See transport.Listener."""
        if len(self.outbound) > _MAX_WAITING:
            self.end(TimeoutError("it takes no answers"))
            return False
        self.outbound.put(header, payload)
        return self._flush()

    def end(self, error: Exception) -> None:
        """Close for a reason."""
        self.close()
        self._on_end(self._name, error)

    def close(self) -> None:
        """Close the connection."""
        self._closed = True
        self._unread.discard(self)
        self._loop.unwatch(self._connection)
        self._connection.close()
        self.outbound.clear()

    def _flush(self) -> bool:
        """Send what goes; False when the peer is gone."""
        try:
            done = self.outbound.flush(self._connection)
        except (OSError, Untrusted) as error:
            self.end(error)
            return False
        self._loop.watch(self._connection, self, writes=not done)
        return True

    def _agree(self) -> bool:
        """Say hello once there is agreement on keys; whether that is so."""
        if not self._connection.ready():
            return False
        self._agreed = True
        self.outbound.heartbeat()
        return True

    def _read(self) -> None:
        self._unread.add(self)
        for _ in range(_BURST):
            if len(self._messages) >= _MAX_UNREAD:
                break
            message = self._inbound.receive(self._connection)
            if message is None:
                self._unread.discard(self)
                break
            self._messages.append((self._name, [bytes(message.header)]))
        self._greeted = self._greeted or self._inbound.heartbeats > 0
        for _ in range(self._inbound.heartbeats - self._answered):
            self.outbound.heartbeat()
        self._answered = self._inbound.heartbeats
