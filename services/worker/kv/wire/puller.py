"""The importer's thread of one rank.

It pulls KV from exporters over connections that are kept and reused, grants credit, and ends each import with one
`PullEnded`.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from services.worker.kv import KvError, KvFault
from services.worker.kv.rank_messages import PullEnded, RankStats
from services.worker.kv.shards import RankShape, Source, exporting, sources, without_importer
from services.worker.kv.wire import protocol
from services.worker.kv.wire.importing import (
    DTYPES,
    Import,
    Load,
    Part,
    PullLimits,
    as_kv_error,
    check_frame,
    direct_views,
    write_frame,
)
from services.worker.kv.wire.protocol import Buffer, Frame, Placement
from services.worker.kv.wire.tcp_transport import Place, TcpLink, TcpTransport
from shared.domain.kv import KvHandle

_log = logging.getLogger(__name__)
LOST_S = 10.0  # a link that no import uses and that is not connected is closed after so long
IDLE_S = 600.0  # a link that no import uses and that is connected is closed after so long
LANE_BYTES = 4 << 20  # of KV: less than this is not worth a connection of its own
TURN_S = 0.1  # between two looks at deadlines
_POLL_S = 0.5  # between two notices to exporters that repeat the grant, which they answer where something was lost
_BURST = 64  # messages of one link before the others get their turn
_MESSAGE_CHARS = 200  # of the reason that an exporter gives
_MAX_ROUTES = 256
_SWEEP_S = 5.0  # between two looks at idle links

OnEnd = Callable[[str, PullEnded], None]  # with the request's id


class Puller:
    """Runs imports on a thread of its own. Commands come from other threads; results go to `on_end` on the puller's
    thread.

    `on_end` is called exactly once for each load; its destination is not used after that.

    The thread holds `_turn` while it does something. The thread of a load that finds it waiting, and connected to the
    exporters, sends the pull itself: one wake-up less before the first byte.
    """

    def __init__(
        self,
        transport: TcpTransport,
        shapes: tuple[RankShape, ...],
        on_end: OnEnd,
        limits: PullLimits,
        stats: RankStats,
        on_death: Callable[[str, BaseException], None],
        enter: Callable[[], None],
    ) -> None:
        """`shapes`: of the rank, by component. `stats` counts imports and received bytes. On the puller's thread
        `enter` is called first, and `on_death(thread, error)` when a bug ends it.
        """
        self.imports = Imports(transport, shapes, on_end, limits, stats)
        self._transport = transport
        self._rank = shapes[0].rank
        self._on_death = on_death
        self._enter = enter
        self._commands: deque[Callable[[Imports], None]] = deque()
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # held by the thread that uses `imports` and the links
        self._stopping = self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-puller", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def load(self, load: Load) -> None:
        """Begin, or let a prefetch go on into its blocks."""
        if self._load_at_once(load):
            return
        if not self.post(lambda imports: imports.load(load)):
            self.imports.reject(load, KvError(KvFault.STOPPED))

    def _load_at_once(self, load: Load) -> bool:
        """Begin the load on the calling thread; False where that is not possible."""
        if not self._transport.shared or not self._turn.acquire(blocking=False):
            return False
        try:
            if self._closed or self._commands or not self.imports.can_begin(load):
                return False
            error = self.imports.begin(load)
        finally:
            self._turn.release()
        if error is not None:  # it ends on the puller's thread, as all do
            self.post(lambda imports: imports.end(load, error))
        return True

    def post(self, command: "Callable[[Imports], None]") -> bool:
        """Have a command run on the puller's thread; False when that has ended. Callable from any thread."""
        with self._lock:
            if self._closed:
                return False
            self._commands.append(command)
        self._transport.wake()
        return True

    def stop(self) -> None:
        self._stopping = True
        self._transport.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._enter()
            while not self._stopping:
                events = self._transport.poll(TURN_S)
                with self._turn:
                    for link in self._transport.handle(events):
                        self.imports.receive(link)
                    self._run_commands()
                    self.imports.check()
        except Exception as error:
            _log.exception("the KV puller of rank %d ended", self._rank)
            self._on_death("puller", error)
        finally:
            with self._turn:
                with self._lock:
                    self._closed = True
                self._run_commands()
                self.imports.end_all(KvError(KvFault.STOPPED))
                self._transport.close()

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()(self.imports)


@dataclass(slots=True)
class _Announced:
    """A header whose payload is about to be received, with its message, so that it is decoded once."""

    header: Buffer
    message: protocol.Reply | None
    checked: bool = False  # whether it is the next frame of its part


_NOTHING = _Announced(b"", None)


class Imports:
    """The imports under way on one rank. The thread that has the puller's turn owns it."""

    def __init__(
        self,
        transport: TcpTransport,
        shapes: tuple[RankShape, ...],
        on_end: OnEnd,
        limits: PullLimits,
        stats: RankStats,
    ) -> None:
        self.dropped = 0  # messages that are malformed
        self.peers = Peers(transport, shapes, limits, self._place)
        self._imports: dict[str, Import] = {}
        self._parts: dict[int, Part] = {}  # of all imports, by the id of their pull
        self._limits = limits
        self._rank = shapes[0].rank
        self._windows = any(shape.window for shape in shapes)
        self._on_end = on_end
        self._stats = stats
        self._check_mono = self._sweep_mono = 0.0
        self._announced = _NOTHING

    def load(self, load: Load) -> None:
        """Begin, or let a prefetch go on into its blocks."""
        known = self._imports.get(load.handle.transfer_id)
        if known is not None and known.load is not None:
            self.reject(load, KvError(KvFault.INVALID, "the transfer is being imported already"))
        elif known is not None and known.handle == load.handle and self._covers(known, load):
            self._join(known, load)
        else:
            if known is not None:
                self._end(known, KvError(KvFault.CANCELLED))
            error = self.begin(load)
            if error is not None:
                self.end(load, error)

    def can_begin(self, load: Load) -> bool:
        """Whether `begin` concerns no other import, and all exporters are connected."""
        return load.handle.transfer_id not in self._imports and self.peers.connected(load.handle)

    def begin(self, load: Load) -> KvError | None:
        """Send the pulls of a load; the error that must `end` it."""
        return self._begin(load.handle, (load.token_start, load.token_end), load.timeout_s, load)

    def end(self, load: Load, error: KvError) -> None:
        """End a load that may have ended already."""
        known = self._imports.get(load.handle.transfer_id)
        if known is not None and known.load is load:
            self._end(known, error)

    def _covers(self, known: Import, load: Load) -> bool:
        """Whether a prefetch has all that the load needs: a window is that before the end of either."""
        return known.token_end == load.token_end or (known.token_end > load.token_end and not self._windows)

    def _join(self, known: Import, load: Load) -> None:
        known.load = load
        known.progress_mono = time.monotonic()
        known.deadline_mono = known.progress_mono + load.timeout_s
        try:
            for frame, payload in known.inbox:
                write_frame(frame, payload, load)
        except Exception as error:
            self._end(known, as_kv_error(error))
            return
        self._empty_inbox(known)
        for part in known.parts:
            self._grant(part)
        if known.complete:
            self._end(known)

    def prefetch(self, handle: KvHandle, tokens: int, timeout_s: float) -> None:
        if handle.transfer_id not in self._imports and self._has_inbox_room(self._limits.window_bytes):
            self._stats.prefetches += 1
            error = self._begin(handle, (handle.start, tokens), timeout_s, None)
            if error is not None:
                self._end(self._imports[handle.transfer_id], error)

    def accept(self, transfer_id: str) -> None:
        """The decode of a prefetch was accepted here: the exporters may free it once all of it is in the inbox."""
        known = self._imports.get(transfer_id)
        if known is None or known.load is not None:
            return  # a load confirms at its end
        known.accepted = True
        if known.complete:
            self.peers.confirm(known.handle)

    def cancel(self, transfer_id: str, prefetch_only: bool = False) -> None:
        known = self._imports.get(transfer_id)
        if known is not None and not (prefetch_only and known.load is not None):
            self._end(known, KvError(KvFault.CANCELLED))

    def renew(self, handle: KvHandle) -> None:
        """Have the exporters keep a handle that no import has begun to pull; a pull under way renews its lease by
        itself.
        """
        if handle.transfer_id not in self._imports:
            self.peers.renew(handle)

    def end_all(self, error: KvError) -> None:
        for each in list(self._imports.values()):
            self._end(each, error)

    def reject(self, load: Load, error: KvError) -> None:
        self._report(load, PullEnded.without_pull(load.handle.transfer_id, self._rank, str(error)))

    def _report(self, load: Load, ended: PullEnded) -> None:
        self._stats.pulls_ok += ended.ok
        self._stats.pulls_failed += not ended.ok
        self._on_end(load.request_id, ended)

    def _begin(self, handle: KvHandle, tokens: tuple[int, int], timeout_s: float, load: Load | None) -> KvError | None:
        now = time.monotonic()
        new = self._imports[handle.transfer_id] = Import(
            handle=handle,
            token_start=tokens[0],
            token_end=tokens[1],
            started_s=time.time(),
            load=load,
            deadline_mono=now + timeout_s,
            reachable_by_mono=now + self._limits.connect_timeout_s,
            prefetched=load is None,
            progress_mono=now,
            notified_mono=now,
        )
        self._stats.pulling = len(self._imports)
        try:
            self.peers.pull(new, self._limits.stall_s)
        except OSError as error:
            return KvError(KvFault.UNREACHABLE, str(error))
        except Exception as error:
            return as_kv_error(error)
        self._parts.update({part.pull_id: part for part in new.parts})
        return None

    def _end(self, known: Import, error: KvError | None = None) -> None:
        """End an import and notify the exporters and the owner of its load. Its destination is not used after this."""
        self._imports.pop(known.handle.transfer_id, None)
        self._stats.pulling = len(self._imports)
        for part in known.parts:
            self._parts.pop(part.pull_id, None)
            part.link.divert(known)
            if not part.done:
                send(part.link, protocol.Cancel(part.pull_id))
        self._empty_inbox(known)
        if known.load is not None:
            self._report(known.load, known.finish(known.load, self._rank, error))
            # Also after a failure: the engine recomputes, and no other import will pull this rank's share.
            self.peers.confirm(known.handle)

    def receive(self, link: TcpLink) -> None:
        """Handle messages of a link, up to a number after which the other links get their turn."""
        for _ in range(_BURST):
            if (received := link.receive()) is None:
                return
            message = self._read(received.header).message
            if message is None:  # it may have been a frame that is not sent again
                self.dropped += 1
                self._give_up(link)
                return
            if isinstance(message, protocol.Unread):
                for each in self._parts_of(link):  # with the next `check`: a repetition at once may be unreadable too
                    each.owner.notified_mono = -math.inf
                continue
            part = self._part(link, message.pull_id)
            if part is None:
                continue
            try:
                self._handle(part, message, received)
            except Exception as error:
                self._end(part.owner, as_kv_error(error))

    def _part(self, link: TcpLink, pull_id: int) -> Part | None:
        """The part that still waits for frames of that pull over that link."""
        part = self._parts.get(pull_id)
        return part if part is not None and part.link is link and not part.done else None

    def _parts_of(self, link: TcpLink) -> list[Part]:
        return [part for part in self._parts.values() if part.link is link]

    def _place(self, link: TcpLink, header: Buffer, size_bytes: int) -> Placement | None:
        """Where the payload goes that follows this header."""
        self._announced = announced = _Announced(header, protocol.decode_reply(header))
        frame = announced.message
        part = self._part(link, frame.pull_id) if isinstance(frame, Frame) else None
        if part is None or part.owner.load is None or not isinstance(frame, Frame):
            return None
        try:
            part.check(frame)
        except KvError:  # raised again once the payload has arrived
            return None
        announced.checked = True
        views = direct_views(frame, size_bytes, part.owner.load)
        return Placement(part.owner, views) if views else None

    def _read(self, header: Buffer) -> _Announced:
        """The decoded header; a transport that announced a payload passes the same header object again with it."""
        if header is self._announced.header:
            return self._announced
        return _Announced(header, protocol.decode_reply(header) if len(header) <= protocol.MAX_MESSAGE_BYTES else None)

    def _give_up(self, link: TcpLink) -> None:
        error = KvError(KvFault.PROTOCOL, f"{link.address} sent a malformed message")
        for known in {id(part.owner): part.owner for part in self._parts_of(link)}.values():
            if not known.complete:
                self._end(known, error)

    def _handle(self, part: Part, message: protocol.Reply, received: protocol.Received) -> None:
        match message:
            case Frame():
                self._handle_frame(part, message, received)
            case protocol.Failed():
                fault = message.fault if message.fault in set(KvFault) else KvFault.PROTOCOL
                raise KvError(KvFault(fault), message.message[:_MESSAGE_CHARS])
            case protocol.Sent():
                part.compare(message)

    def _handle_frame(self, part: Part, frame: Frame, received: protocol.Received) -> None:
        known, size, payload = part.owner, received.payload_bytes, received.payload
        if not self._read(received.header).checked:
            part.check(frame)
        part.admit(frame, size)
        check_frame(frame, received)
        known.progress_mono = time.monotonic()
        known.wire_bytes += size
        known.carriers.add(part.link.carrier)
        self._stats.received_bytes += size
        if payload is None:  # it was received directly into its destination, or there is none
            if not size:
                raise KvError(KvFault.PROTOCOL, "a frame without a payload")
        elif known.load is not None:
            write_frame(frame, payload, known.load)
        else:
            part.link.keep()
            known.inbox.append((frame, payload))
            known.inbox_bytes += size
            self._stats.inbox_bytes += size
        if known.complete and known.load is not None:
            self._end(known)
        elif known.complete:
            known.arrived_s = time.time()
            if known.accepted:
                self.peers.confirm(known.handle)  # the exporter may free it: all of it is in the inbox
        else:
            self._grant(part)

    def _grant(self, part: Part) -> None:
        """Grant more: for a load what it has consumed, for a prefetch as much as the inbox has room for."""
        if not part.wants_grant or (part.owner.load is None and not self._has_inbox_room(part.owed_bytes)):
            return
        part.owner.progress_mono = time.monotonic()
        part.grant()
        send(part.link, protocol.Credit(part.pull_id, part.granted_bytes))

    def _keep_up(self, known: Import, now: float) -> None:
        """Continue a prefetch that had to pause for room, and notify the exporters that it still goes on."""
        waiting = [part for part in known.parts if not part.done]
        for part in waiting:
            self._grant(part)
        if now >= known.notified_mono + min(_POLL_S, self._limits.stall_s / 3):
            known.notified_mono = now
            for part in waiting:
                send(part.link, protocol.Credit(part.pull_id, part.granted_bytes))

    def _has_inbox_room(self, more_bytes: int) -> bool:
        """Whether `more_bytes` fit beside what the inbox holds and what prefetches may still send without a new
        grant.
        """
        prefetching = sum(each.load is None and not each.complete for each in self._imports.values())
        granted = prefetching * self._limits.window_bytes
        return self._stats.inbox_bytes + granted + more_bytes <= self._limits.inbox_bytes

    def _empty_inbox(self, known: Import) -> None:
        self._stats.inbox_bytes -= known.inbox_bytes
        known.inbox_bytes = 0
        known.inbox.clear()

    def check(self) -> None:
        """End late imports and continue paused ones; to be called at least every TURN_S."""
        now = time.monotonic()
        if now < self._check_mono:
            return
        self._check_mono = now + TURN_S
        for known in list(self._imports.values()):
            error = known.lateness(now, self._limits.stall_s)
            if error is not None:
                self._end(known, error)
            else:
                self._keep_up(known, now)
        if now >= self._sweep_mono:
            self._sweep_mono = now + _SWEEP_S
            self.peers.close_unused({part.link for part in self._parts.values()})


@dataclass(frozen=True, slots=True)
class _Route:
    """Where a rank pulls KV from, of all exporters with the same ranks and stages, and whom it notifies at the end:
    exporter ranks with their number of consumers.
    """

    sources: tuple[Source, ...]
    confirmed: dict[int, int]


def send(link: TcpLink, message: protocol.Message, *, lingers: bool = False) -> None:
    """Best effort: deadlines find a message that was not sent. See `TcpLink.send`."""
    link.send(protocol.encode_message(message), lingers=lingers)


class Peers:
    """Links to exporters by address, several where that is set. The thread that has the puller's turn owns it."""

    def __init__(
        self, transport: TcpTransport, shapes: tuple[RankShape, ...], limits: PullLimits, place: Place
    ) -> None:
        self.links: dict[tuple[str, int], TcpLink] = {}
        self._transport = transport
        self._shapes = shapes
        self._shards = tuple(shape.shards for shape in shapes)
        self._rank = shapes[0].rank
        self._window_bytes = limits.window_bytes
        self._connections = limits.connections
        self._place = place
        self._last_pull_id = 0
        self._used_mono: dict[tuple[str, int], float] = {}  # monotonic
        self._routes: dict[tuple[int, tuple[int, ...]], _Route] = {}  # by an exporter's ranks and stages

    def pull(self, wanted: Import, silence_s: float) -> None:
        """Send a pull to every exporter rank that has layers and heads of this rank's; exporters forget it after
        `silence_s` without a message.

        A large pull is divided by layers between connections, so that all of them are busy with each chunk. Raises
        KvError or OSError, with the parts filled so far.
        """
        handle = wanted.handle
        lanes = [(lane, part) for source in self._route(handle).sources for lane, part in self._divided(source, wanted)]
        window_bytes = max(1, self._window_bytes // len(lanes))
        for lane, source in lanes:
            link = self._link(handle.endpoints[source.rank], lane)
            self._last_pull_id += 1
            part = Part(wanted, source, self._shapes[source.component], link, self._last_pull_id, window_bytes)
            wanted.parts.append(part)
            pull = protocol.Pull(
                pull_id=part.pull_id,
                transfer_id=handle.transfer_id,
                generation=handle.generation,
                fingerprint=handle.fingerprint,
                codec=part.codec,
                layer_start=source.layer_start,
                layer_end=source.layer_end,
                token_start=part.tokens[0],
                token_end=part.tokens[1],
                head_start=source.head_start,
                head_end=source.head_end,
                rank=self._rank,
                ranks=self._shards[0].ranks,
                consumers=source.consumers,
                credit_bytes=window_bytes,
                timeout_s=silence_s,
                component=source.component,
            )
            send(link, pull)

    def _route(self, handle: KvHandle) -> _Route:
        """Raises KvError(INVALID) where the exporter's ranks and layers do not fit this instance."""
        key = len(handle.endpoints), handle.stages
        route = self._routes.get(key)
        if route is None:
            exporters = exporting(handle, self._shards)
            found = sources(self._rank, self._shards, exporters)
            confirmed = {each.rank: each.consumers for each in found}
            if self._rank == 0:
                confirmed |= dict.fromkeys(without_importer(self._shards, exporters), 1)
            if len(self._routes) >= _MAX_ROUTES:
                self._routes.clear()
            route = self._routes[key] = _Route(found, confirmed)
        return route

    def connected(self, handle: KvHandle) -> bool:
        """Whether there is a connection for each pull of the handle."""
        try:
            route = self._route(handle)
        except KvError:
            return False
        for source in route.sources:
            for lane in range(self._connections):
                link = self.links.get((handle.endpoints[source.rank], lane))
                if link is None or not link.connected:
                    return False
        return True

    def _divided(self, source: Source, wanted: Import) -> list[tuple[int, Source]]:
        if self._connections == 1:
            return [(0, source)]
        shape = self._shapes[source.component]
        layers, heads = source.layer_end - source.layer_start, source.head_end - source.head_start
        dtype = DTYPES.get(wanted.handle.dtype)
        start, end = shape.read(wanted.token_start, wanted.token_end)
        layer_bytes = (end - start) * shape.sides * heads * shape.head_dim
        size_bytes = layers * layer_bytes * (dtype.itemsize if dtype is not None else 1)
        count = max(1, min(self._connections, layers, size_bytes // LANE_BYTES))
        bounds = [source.layer_start + layers * each // count for each in range(count + 1)]
        return list(enumerate(replace(source, layer_start=start, layer_end=end) for start, end in pairwise(bounds)))

    def confirm(self, handle: KvHandle) -> None:
        """Notify the exporters that this rank needs no more of the handle, with the next message to them or a moment
        later. Best effort: leases expire anyway.
        """
        try:
            for exporter, count in self._route(handle).confirmed.items():
                confirm = protocol.Confirm(handle.transfer_id, handle.generation, self._rank, count)
                send(self._link(handle.endpoints[exporter], 0), confirm, lingers=True)
        except (KvError, OSError) as error:
            _log.debug("cannot confirm %s: %s", handle.transfer_id, error)

    def renew(self, handle: KvHandle) -> None:
        """Renew the leases at the exporter ranks from which this rank is going to pull. Best effort: the next
        renewal follows soon.
        """
        try:
            for exporter in {source.rank for source in self._route(handle).sources}:
                renew = protocol.Renew(handle.transfer_id, handle.generation)
                send(self._link(handle.endpoints[exporter], 0), renew)
        except (KvError, OSError) as error:
            _log.debug("cannot renew the lease of %s: %s", handle.transfer_id, error)

    def close_unused(self, in_use: set[TcpLink]) -> None:
        """Close links that have not been used for a while: exporters come and go, each with an address of its own."""
        now_mono = time.monotonic()
        for key, link in list(self.links.items()):
            unused_s = now_mono - self._used_mono[key]
            if link not in in_use and unused_s > (IDLE_S if link.connected else LOST_S):
                link.close()
                del self.links[key], self._used_mono[key]

    def _link(self, address: str, lane: int) -> TcpLink:
        key = address, lane
        self._used_mono[key] = time.monotonic()
        link = self.links.get(key)
        if link is None:
            link = self.links[key] = self._transport.connect(address, self._place)
        return link
