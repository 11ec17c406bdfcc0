"""How operations reach the ranks of one instance: by a call to a rank in the same process (`DirectControl`), or over
ZeroMQ to ranks in processes of their own (`SocketControl` in the worker, `ControlServer` in each rank).
"""

import asyncio
import hmac
import logging
import socket
import threading
from collections.abc import Callable
from typing import Protocol, Self

import msgspec
import zmq
import zmq.asyncio

from services.worker.kv import KvError
from services.worker.kv.rank_messages import Answer, Control, Operation, RankStats
from services.worker.kv.wire.protocol import MAX_MESSAGE_BYTES, encode_message, opened
from shared.errors import DeadlineExceeded, PolyphaseError
from shared.runtime.tasks import Background

_TIMEOUT_S = 2.0
_log = logging.getLogger(__name__)
_controls = msgspec.msgpack.Decoder(Control)
_answers = msgspec.msgpack.Decoder(Answer)

CarryOut = Callable[[Operation], RankStats | None]  # of an endpoint; any thread may call it, and it may raise KvError


class KvControl(Protocol):
    """Sends an operation to every rank of one instance."""

    async def call(self, operation: Operation) -> list[RankStats]:
        """The state of every rank in rank order, for `Stats`; otherwise empty. Raises PolyphaseError."""
        ...


class DirectControl:
    """For the one rank that runs in this process."""

    def __init__(self, carry_out: CarryOut) -> None:
        self._carry_out = carry_out

    async def call(self, operation: Operation) -> list[RankStats]:
        try:
            stats = self._carry_out(operation)
        except KvError as error:
            raise PolyphaseError(str(error)) from error
        return [stats] if stats is not None else []


class SocketControl:
    """For ranks in processes of their own; enter it on the event loop that uses it."""

    def __init__(
        self,
        endpoints: tuple[str, ...] | list[str],
        key: str,
        curve: tuple[str, str] | None = None,
        answer_s: float = _TIMEOUT_S,
    ) -> None:
        """`key` is "control_key" of the connector's configuration; `curve` the cluster's pair (public, secret);
        `answer_s` the time of a rank to answer.
        """
        self._endpoints = tuple(endpoints)
        self._key = key
        self._curve = curve
        self._answer_s = answer_s
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []
        self._waiting: dict[tuple[int, int], asyncio.Future[Answer]] = {}
        self._readers = Background()
        self._last_call = 0

    async def __aenter__(self) -> Self:
        for rank, endpoint in enumerate(self._endpoints):
            dealer = self._context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            if self._curve:
                dealer.curve_publickey, dealer.curve_secretkey = (key.encode() for key in self._curve)
                dealer.curve_serverkey = self._curve[0].encode()
            dealer.connect(endpoint)
            self._sockets.append(dealer)
            self._readers.start(f"kv-control-{rank}", self._read(rank, dealer))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._readers.close()
        for each in self._sockets:
            each.close()
        self._context.term()

    async def call(self, operation: Operation) -> list[RankStats]:
        """Raises DeadlineExceeded when a rank does not answer in time; a rank does not answer a wrong key either."""
        self._last_call += 1
        call = self._last_call
        message = encode_message(Control(call, self._key, operation))
        loop = asyncio.get_running_loop()
        waiting = {(rank, call): loop.create_future() for rank in range(len(self._sockets))}
        self._waiting.update(waiting)
        try:
            async with asyncio.timeout(self._answer_s):
                for each in self._sockets:
                    await each.send(message)
                answers: list[Answer] = list(await asyncio.gather(*waiting.values()))
        except TimeoutError:
            raise DeadlineExceeded(f"a KV endpoint did not answer {type(operation).__name__}") from None
        finally:
            for key in waiting:
                self._waiting.pop(key, None)
        for answer in answers:
            if answer.error:
                raise PolyphaseError(answer.error)
        return [answer.stats for answer in answers if answer.stats is not None]

    async def _read(self, rank: int, dealer: zmq.asyncio.Socket) -> None:
        while True:
            parts = await dealer.recv_multipart()
            answer = opened(_answers, parts[0]) if len(parts) == 1 else None
            future = self._waiting.get((rank, answer.call)) if answer is not None else None
            if answer is not None and future is not None and not future.done():
                future.set_result(answer)


class ControlServer:
    """The rank's end of `SocketControl`: a thread that carries out operations and answers them."""

    def __init__(
        self,
        address: str,
        key: str,
        curve: tuple[str, str] | None,
        carry_out: CarryOut,
        on_death: Callable[[str, BaseException], None],
    ) -> None:
        """Binds and starts at once. Raises OSError when the address cannot be bound. `on_death(thread, error)` is
        called when a bug ends the thread.
        """
        self.dropped = 0  # messages that are malformed or have a wrong key
        self._key = key
        self._carry_out = carry_out
        self._on_death = on_death
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        if curve:
            self._router.curve_server = True
            self._router.curve_publickey, self._router.curve_secretkey = (half.encode() for half in curve)
        try:
            self._router.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(f"cannot bind {address}: {error}") from error
        self._stopping, self._stop = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kv-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.send(b"\0")
        self._thread.join()
        self._stop.close()
        self._stopping.close()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._stopping, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._stopping.fileno() in ready:
                    return
                peer, *parts = self._router.recv_multipart()
                control = opened(_controls, parts[0]) if len(parts) == 1 else None
                if control is None or not hmac.compare_digest(control.key.encode(), self._key.encode()):
                    self.dropped += 1
                    continue
                self._router.send_multipart([peer, encode_message(self._answer(control))])
        except Exception as error:
            _log.exception("the thread that answers the worker's control ended")
            self._on_death("control", error)

    def _answer(self, control: Control) -> Answer:
        try:
            return Answer(control.call, "", self._carry_out(control.operation))
        except KvError as error:
            return Answer(control.call, str(error))
