"""The exporter's endpoint of one rank: a thread that serves pulls from the staging pool, and the worker's control."""

import hmac
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.worker.kv.control import Rank
from services.worker.kv.errors import KvError, KvFault
from services.worker.kv.staging import StagingPool
from services.worker.kv.wire.frames import (
    MAX_LIFE_S,
    MAX_WINDOW_BYTES,
    Answer,
    Buffer,
    Cancel,
    Confirm,
    Control,
    Credit,
    Drop,
    Failed,
    Message,
    Prefetch,
    Pull,
    Release,
    Renew,
    RenewLease,
    Request,
    Sent,
    Unread,
    decode_request,
    encode_message,
)
from services.worker.kv.wire.serving import ExportShape, Serving
from services.worker.kv.wire.transport import Listener, Transport

_log = logging.getLogger(__name__)
_MAX_SERVINGS = 1024
_MAX_CONSUMERS = 1024
_TURN_S = 0.5  # leases and deadlines are looked at this often
_BURST = 256  # messages taken before pulls go on: who floods holds up nobody else

Caller = tuple[Listener, bytes]  # where somebody has connected, and as whom


@dataclass(frozen=True, slots=True)
class ExportIdentity:
    """Who exports."""

    generation: int
    fingerprint: str
    control_key: str


@dataclass(slots=True)
class ServerCounters:
    """Since the start; written by the server's thread only."""

    sent_bytes: int = 0
    served: int = 0
    refused: int = 0
    dropped: int = 0


class KvServer:
    """Serves one rank's staging pool at one address until it is stopped."""

    def __init__(
        self,
        address: str,
        transport: Transport,
        pool: StagingPool,
        shape: ExportShape,
        identity: ExportIdentity,
        controls: Rank,
        corrupt: Callable[[], bool] = lambda: False,
        on_death: Callable[[str, BaseException], None] = lambda *_: None,
        control_address: str = "",
        enter: Callable[[], None] = lambda: None,
    ) -> None:
        """Binds at once. Raises OSError when an address is taken. `corrupt` is fault injection for tests.

        With a `control_address` the worker's control may come there as well. On the server's thread `enter` is called
        first, and `on_death(thread, error)` when a bug ends it.
        """
        self.counters = ServerCounters()
        self._transport = transport
        self._listeners: list[Listener] = [transport.listen(each) for each in (address, control_address) if each]
        self._pool = pool
        self._shape = shape
        self._identity = identity
        self._controls = controls
        self._corrupt = corrupt
        self._on_death = on_death
        self._enter = enter
        self._servings: dict[tuple[Caller, int], Serving] = {}
        self._stopping = False
        self._expire_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kv-server", daemon=True)

    @property
    def address(self) -> str:
        """Where it listens, the port resolved."""
        return self._listeners[0].address

    @property
    def serving(self) -> int:
        """Pulls of peers under way."""
        return len(self._servings)

    def start(self) -> None:
        """Serve in a thread of its own."""
        self._thread.start()

    def wake(self) -> None:
        """Something was staged or released. Callable from any thread."""
        self._transport.wake()

    def stop(self) -> None:
        """End the thread and close the endpoint."""
        self._stopping = True
        self._transport.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._enter()
            while not self._stopping:
                self._transport.wait(_TURN_S)
                self._receive()
                while self._pump() and not self._stopping:
                    self._transport.wait(0.0)
                    self._receive()
                self._expire()
        except Exception as error:
            _log.exception("the KV server of rank %d ended", self._shape.rank)
            self._on_death("server", error)
        finally:
            self._transport.close()

    def _receive(self) -> None:
        for listener in self._listeners:
            self._receive_at(listener)

    def _receive_at(self, listener: Listener) -> None:
        for _ in range(_BURST):
            if (message := listener.receive()) is None:
                return
            name, parts = message
            peer = listener, name
            request = decode_request(parts[0]) if len(parts) == 1 else None
            if request is None:
                self.counters.dropped += 1
                self._send(peer, Unread())
            else:
                self._handle(peer, request)

    def _handle(self, peer: Caller, request: Request) -> None:
        match request:
            case Pull():
                self._begin(peer, request)
            case Credit():
                serving = self._servings.get((peer, request.pull_id))
                if serving is None:  # it may be over: whoever still asks has not got all that was sent
                    self._send(peer, Failed(request.pull_id, KvFault.PROTOCOL.value, "no such pull is under way"))
                elif not serving.grant(request.granted_bytes, time.monotonic()):
                    self._send(peer, Sent(request.pull_id, serving.frames))
            case Cancel():
                self._servings.pop((peer, request.pull_id), None)
            case Confirm():
                if request.generation == self._identity.generation and request.consumers <= _MAX_CONSUMERS:
                    self._pool.confirm(request.transfer_id, request.rank, request.consumers)
            case Renew():
                if request.generation == self._identity.generation:
                    self._pool.renew(request.transfer_id)
            case Control():
                self._control(peer, request)

    def _begin(self, peer: Caller, pull: Pull) -> None:
        fault = self._objection(pull)
        if fault is not None:
            self.counters.refused += 1
            self._send(peer, Failed(pull.pull_id, fault.value, ""))
            return
        self._servings[peer, pull.pull_id] = Serving(pull, self._shape, time.monotonic())

    def _objection(self, pull: Pull) -> KvFault | None:
        if pull.generation != self._identity.generation:
            return KvFault.STALE
        if pull.fingerprint != self._identity.fingerprint:
            return KvFault.FINGERPRINT
        tokens = 0 <= pull.token_start < pull.token_end
        (first_layer, last_layer), (first_head, last_head) = self._shape.layers, self._shape.heads
        layers = first_layer <= pull.layer_start < pull.layer_end <= last_layer
        heads = first_head <= pull.head_start < pull.head_end <= last_head
        credit = 0 < pull.credit_bytes <= MAX_WINDOW_BYTES
        timeout = 0 < pull.timeout_s < MAX_LIFE_S
        if not (tokens and layers and heads and credit and timeout) or len(self._servings) >= _MAX_SERVINGS:
            return KvFault.INVALID
        return None

    def _pump(self) -> bool:
        """Send one frame of each pull that can go on; whether any was sent and something is left to send."""
        sent = False
        for key, serving in list(self._servings.items()):
            try:
                sent |= self._pump_one(key, serving)
            except KvError as error:
                self._fail(key, error)
            except Exception:
                _log.exception("a pull of %s failed", serving.pull.transfer_id)
                self._fail(key, KvError(KvFault.INTERNAL))
        return sent and bool(self._servings)

    def _pump_one(self, key: tuple[Caller, int], serving: Serving) -> bool:
        (listener, name), _ = key
        transfer = self._pool.open(serving.pull.transfer_id)
        if transfer is None or not listener.takes(name):
            return False
        seal = not listener.seals or self._corrupt()
        made = serving.next_frame(transfer, self._identity.generation, seal=seal)
        if made is None:
            return False
        frame, payload = made
        if not self._send(key[0], frame, self._faulty(payload)):
            self._servings.pop(key, None)
            return False
        self.counters.sent_bytes += len(payload)
        if serving.finished:
            self._servings.pop(key, None)
            self.counters.served += 1
        else:
            self._servings[key] = self._servings.pop(key)  # those on the same connection come first the next time
        return True

    def _faulty(self, payload: Buffer) -> Buffer:
        if not self._corrupt():
            return payload
        copy = bytearray(payload)
        copy[len(copy) // 2] ^= 0x40
        return copy

    def _fail(self, key: tuple[Caller, int], error: KvError) -> None:
        serving = self._servings.pop(key)
        self.counters.refused += 1
        self._send(key[0], Failed(serving.pull.pull_id, error.fault.value, error.message))

    def _expire(self) -> None:
        now = time.monotonic()
        if now < self._expire_s:
            return
        self._expire_s = now + _TURN_S
        self._pool.expire()
        for key, serving in list(self._servings.items()):
            if serving.deadline_s <= now:
                self._fail(key, KvError(KvFault.TIMEOUT, "the importer fell silent"))

    def _control(self, peer: Caller, control: Control) -> None:
        if not hmac.compare_digest(control.key.encode(), self._identity.control_key.encode()):
            self.counters.dropped += 1
            return
        stats, error = None, ""
        try:
            match control.operation:
                case Release(transfer_id):
                    self._controls.release(transfer_id)
                case Prefetch(handle, tokens, timeout_s):
                    self._controls.prefetch(handle, tokens, timeout_s)
                case Drop(transfer_id):
                    self._controls.drop(transfer_id)
                case RenewLease(handle):
                    self._controls.renew(handle)
                case _:
                    stats = self._controls.stats()
        except KvError as raised:
            error = str(raised)
        self._send(peer, Answer(control.call, error, stats))

    def _send(self, peer: Caller, message: Message, payload: Buffer | None = None) -> bool:
        listener, name = peer
        return listener.send(name, encode_message(message), payload)
