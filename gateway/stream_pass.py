"""Serves plain streams that have new tokens in one go: each turn of the event loop, or at the pace of a busy one."""

import asyncio

from gateway.pace import PERIOD_S, Pace
from gateway.stream import PlainStream
from shared.runtime.logs import get_log

log = get_log(__name__)
AT_ONCE = 128  # streams that a pass serves before other work has its turn
SLOT_S = 0.005  # streams that are due within one wait for one timer


class StreamPass:
    """The streams of a front end."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._waiting: list[PlainStream] = []
        self._held: dict[int, list[PlainStream]] = {}  # by the slot of their time
        self._looks = False  # the pace, every now and then
        self._served = False  # any, since the last look

    def add(self, stream: PlainStream) -> None:
        """It has taken a step. Several of a turn, or of its interval, go out as one event."""
        if stream.queued:
            return
        if not self._pace.interval_s or stream.pressing:
            self._queue(stream)
            return
        if stream.held:
            return
        due_s = stream.served_s + min(self._pace.interval_s, stream.most_s)
        if due_s > asyncio.get_running_loop().time():
            self._hold(stream, int(due_s / SLOT_S) + 1)
        else:
            self._queue(stream)

    def _queue(self, stream: PlainStream) -> None:
        stream.leaves()
        self._waiting.append(stream)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._run)

    def _hold(self, stream: PlainStream, slot: int) -> None:
        stream.held = True
        held = self._held.get(slot)
        if held is None:
            held = self._held[slot] = []
            asyncio.get_running_loop().call_at(slot * SLOT_S, self._release, slot)
        held.append(stream)

    def _release(self, slot: int) -> None:
        for stream in self._held.pop(slot):
            if stream.held:  # its end has not come meanwhile
                self._queue(stream)

    def _run(self) -> None:
        serve, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
        loop = asyncio.get_running_loop()
        if self._waiting:
            loop.call_soon(self._run)
        self._served = True
        if not self._looks:
            self._looks = True
            self._pace.begin()
            loop.call_later(PERIOD_S, self._look)
        now_s = loop.time()
        for stream in serve:
            stream.queued, stream.served_s = False, now_s
            try:
                stream.advance()
            except Exception as error:  # the boundary: what is wrong with one answer must not hold up the others
                log.error("a stream crashed", exc_info=error)
                stream.fail(error)

    def _look(self) -> None:
        """At how busy the process is, until there is nothing to be served."""
        self._looks = self._served or bool(self._held)
        self._served = False
        if not self._looks:
            self._pace.end()
        else:
            self._pace.look()
            asyncio.get_running_loop().call_later(PERIOD_S, self._look)
