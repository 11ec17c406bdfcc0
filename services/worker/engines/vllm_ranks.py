"""Data-parallel ranks of one instance that compute every forward pass together.

The experts of a mixture of experts are divided among the ranks, so that a pass on one rank needs a pass on every other
one. Each rank is an engine in a process of its own, with its own requests; `CoupledRanks` makes sure that all of them
execute the same number of passes, and that none waits for a pass that another will not execute:

- A rank announces a pass before it begins it, unless another has announced that pass already.
- A rank executes every pass that any rank has announced: with requests of its own or, where it has none to compute,
  with a dummy batch.

Announcements are numbers of passes, which each rank counts, and reach all ranks in the order in which a rank sends
them. One that comes late, whether a rank sleeps, computes or is about to sleep, is a number above the rank's own count,
which the rank looks at before it sleeps; it never counts twice. Idle ranks exchange nothing and compute nothing.

The ranks are on one host. Rank 0 listens at a port and passes on what the others send. A connection that ends before
its rank has taken leave means that the rank died: the others cannot compute without it and have to end.
"""

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from selectors import EVENT_READ, DefaultSelector

from shared.errors import EngineFailed
from shared.runtime.logs import get_log

log = get_log(__name__)
HOST = "127.0.0.1"
MEET_S = 300.0  # imports and downloads of several processes at once
_RETRY_S = 0.1
_HELLO_S = 5.0
_MESSAGE = struct.Struct("<Iq")  # a rank, and the number of a pass or one of these
_WELCOME, _LEAVING, _DONE, _LOST = 0, -1, -2, -3


@dataclass(slots=True)
class Passes:
    """What one rank knows of the forward passes."""

    begun: int = 0  # by this rank
    announced: int = 0  # by any rank

    def begin(self) -> bool:
        """Count one more; returns whether this rank has to announce it."""
        self.begun += 1
        return self.hear(self.begun)

    def hear(self, number: int) -> bool:
        """A rank announces this pass; returns whether that is news."""
        news = number > self.announced
        self.announced = max(number, self.announced)
        return news

    @property
    def behind(self) -> bool:
        """Whether there is a pass that this rank has yet to execute."""
        return self.begun < self.announced


class CoupledRanks:
    """This rank's part. `on_news` is called, on a thread of its own, when a rank announces a pass or takes leave, and
    `on_lost` when one has died. All methods are for the engine's thread.
    """

    def __init__(
        self, rank: int, size: int, port: int, on_news: Callable[[], None], on_lost: Callable[[str], None]
    ) -> None:
        self._rank = rank
        self._size = size
        self._port = port
        self._on_news = on_news
        self._on_lost = on_lost
        self.passes = Passes()
        self._lock = threading.Lock()  # of `passes`, and for whole messages on the connections
        self._peers: dict[int, socket.socket] = {}  # all others on rank 0, which is the only one elsewhere
        self._leaving: set[int] = set()
        self._done: set[int] = set()
        self._listening = self._closed = False
        self._loss = ""
        self._lost = threading.Event()

    def meet(self, within_s: float = MEET_S) -> None:
        """Connect all ranks. Raises EngineFailed that names those that are missing."""
        until_mono = time.monotonic() + within_s
        if self._rank == 0:
            self._gather(until_mono, within_s)
        else:
            self._find(until_mono, within_s)
        for peer in self._peers.values():
            peer.settimeout(None)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._listening = True
        threading.Thread(target=self._listen, name="ranks", daemon=True).start()

    def begin_pass(self) -> None:
        """Call this right before each forward pass."""
        with self._lock:
            if self.passes.begin():
                self._send(self._rank, self.passes.begun)

    def leave(self) -> None:
        """This rank begins no more passes of its own. It has to execute those of others until `may_end`."""
        self._take_leave(_LEAVING, self._leaving)

    @property
    def may_end(self) -> bool:
        """Whether no rank will announce a pass any more, and this one has executed all."""
        return len(self._leaving) == self._size and not self.passes.behind

    def done(self) -> None:
        """This rank has executed its last pass; the others may still be at theirs, for which they need it."""
        self._take_leave(_DONE, self._done)

    @property
    def all_done(self) -> bool:
        return len(self._done) == self._size

    def loss(self, within_s: float) -> str:
        """What `on_lost` is called with, if a rank has died or is found dead within that time; otherwise empty. A pass
        that fails on this rank may have failed because of it.
        """
        self._lost.wait(within_s)
        return self._loss

    def close(self) -> None:
        """End the connections. To ranks that are not done this is as if this rank had died."""
        self._closed = True
        for peer in self._peers.values():
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            if not self._listening:  # the thread that listens closes it otherwise
                peer.close()

    def _take_leave(self, kind: int, who: set[int]) -> None:
        with self._lock:
            self._send(self._rank, kind)
            who.add(self._rank)

    def _send(self, rank: int, value: int, but: int | None = None) -> None:
        for number, peer in self._peers.items():
            if number != but:
                with suppress(OSError):  # its end is seen where it is read from
                    peer.sendall(_MESSAGE.pack(rank, value))

    def _gather(self, until_mono: float, within_s: float) -> None:
        """Rank 0: wait for the others. One that comes again has been started again."""
        with ExitStack() as stack:
            listener = stack.enter_context(self._bound(until_mono))
            while len(self._peers) < self._size - 1:
                listener.settimeout(max(until_mono - time.monotonic(), 0.001))
                try:
                    peer, _ = listener.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, self._size)) - set(self._peers))
                    self.close()
                    raise EngineFailed(
                        f"of the instance's {self._size} data-parallel ranks, these have not started within "
                        f"{within_s:.0f} s: {', '.join(map(str, missing))}: see their logs"
                    ) from None
                peer.settimeout(_HELLO_S)
                rank, size = _read(peer) or (0, 0)
                if size != self._size or not 0 < rank < size:
                    log.warning("something that is no rank of this instance connected", rank=rank, ranks=size)
                    peer.close()
                    continue
                if (former := self._peers.pop(rank, None)) is not None:
                    former.close()
                self._peers[rank] = peer
        self._send(0, _WELCOME)

    def _bound(self, until_mono: float) -> socket.socket:
        """A former rank 0 may be about to end."""
        while True:
            try:
                return socket.create_server((HOST, self._port), backlog=self._size)
            except OSError as error:
                if time.monotonic() > until_mono:
                    raise EngineFailed(f"data-parallel ranks: cannot listen at port {self._port}: {error}") from error
            time.sleep(_RETRY_S)

    def _find(self, until_mono: float, within_s: float) -> None:
        """Another rank: connect to rank 0 and wait until all have. One that ends meanwhile is started again."""
        missing = "rank 0"
        while (left_s := until_mono - time.monotonic()) > 0:
            try:
                peer = socket.create_connection((HOST, self._port), timeout=left_s)
            except OSError:
                time.sleep(min(_RETRY_S, left_s))
                continue
            missing = "ranks that rank 0 waits for, too" if self._size > 2 else "rank 0"
            peer.settimeout(max(until_mono - time.monotonic(), 0.001))
            with suppress(OSError):
                peer.sendall(_MESSAGE.pack(self._rank, self._size))
            if _read(peer) == (0, _WELCOME):
                self._peers[0] = peer
                return
            peer.close()
            time.sleep(_RETRY_S)
        raise EngineFailed(
            f"rank {self._rank} of {self._size} data-parallel ranks waited {within_s:.0f} s at port {self._port} for "
            f"{missing}: see the logs of the instance's other ranks"
        )

    # On a thread of its own.

    def _listen(self) -> None:
        with DefaultSelector() as selector:
            for number, peer in self._peers.items():
                selector.register(peer, EVENT_READ, number)
            while selector.get_map():
                for key, _ in selector.select():
                    peer = self._peers[key.data]
                    message = _read(peer)
                    if message is None:
                        selector.unregister(peer)
                        self._ended(key.data)
                        peer.close()
                    else:
                        self._received(*message, key.data)

    def _received(self, rank: int, value: int, sender: int) -> None:
        with self._lock:
            if value > 0 and not self.passes.hear(value):
                return  # all ranks know of it: from this one or, on rank 0, by what it has passed on
            if self._rank == 0:
                self._send(rank, value, but=sender)
            if value == _LEAVING:
                self._leaving.add(rank)
            elif value == _DONE:
                self._done.add(rank)
        if value == _LOST:
            self._died(rank)
        else:
            self._on_news()

    def _ended(self, number: int) -> None:
        """The connection to that rank."""
        if number in self._done or self._closed:
            return
        with self._lock:
            self._send(number, _LOST, but=number)
        self._died(number)

    def _died(self, rank: int) -> None:
        if not self._loss:
            self._loss = (
                f"data-parallel rank {rank} of this instance has ended, and the others cannot compute without it"
            )
            self._lost.set()
            self._on_lost(self._loss)


def _read(peer: socket.socket) -> tuple[int, int] | None:
    """The next message; None at the end of the connection."""
    received = b""
    with suppress(OSError):
        while len(received) < _MESSAGE.size:
            more = peer.recv(_MESSAGE.size - len(received))
            if not more:
                return None
            received += more
        rank, value = _MESSAGE.unpack(received)
        return rank, value
    return None
