"""The threads in which vLLM renders chats and tokenises prompts, shared fairly between callers.

A text of some megabytes occupies a thread for seconds. Therefore one thread is left to short bodies, and of those that
wait for a thread the caller goes first whose work has taken the least thread time.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from threading import Lock
from typing import Any

from gateway.context import caller
from shared.policy.fair_share import FairLine, Shares

LONG_BYTES = 64 << 10  # of a body: what tokenises for more than some tens of milliseconds
SLOTS = 2
Submit = Callable[..., Future[Any]]


class _Work:
    """One call that waits for a thread or has one."""

    __slots__ = ("caller", "future", "long", "run")

    def __init__(self, who: str, long: bool, run: Callable[[], Any]) -> None:
        self.caller = who
        self.long = long
        self.run = run
        self.future: Future[Any] = Future()


class TokeniserSlots:
    """Takes the place of an executor's `submit`, in front of its threads. With one thread, long and short alternate."""

    def __init__(self, submit: Submit, slots: int, weights: Mapping[str, float] | None = None) -> None:
        self._submit = submit
        self._slots = slots
        self._most_long = max(1, slots - 1)
        self._shares = Shares(weights)
        self._short: FairLine[_Work] = FairLine(self._shares)
        self._long: FairLine[_Work] = FairLine(self._shares)
        self._running = {True: 0, False: 0}  # by whether they are long
        self._last_long = False
        self._lock = Lock()

    def submit(self, call: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        """Have `call` run in a thread once it is its turn."""
        who = caller.get(None)
        name, size = (who.ticket.caller, who.body_bytes) if who is not None else ("", 0)
        work = _Work(name, size > LONG_BYTES, partial(call, *args, **more))
        with self._lock:
            self._shares.came(name, time.monotonic())
            (self._long if work.long else self._short).push(work, name)
            started = self._take()
        self._start(started)
        return work.future

    def _take(self) -> list[_Work]:
        """Those whose turn it is."""
        taken: list[_Work] = []
        while sum(self._running.values()) < self._slots and (work := self._next()) is not None:
            (self._long if work.long else self._short).remove(work, work.caller)
            if work.future.set_running_or_notify_cancel():
                self._running[work.long] += 1
                self._last_long = work.long
                taken.append(work)
            else:
                self._shares.left(work.caller, time.monotonic())
        return taken

    def _next(self) -> _Work | None:
        short, long = self._short.head(), self._long.head()
        if long is None or self._running[True] >= self._most_long:
            return short
        if short is not None and self._slots == 1 and self._last_long:
            return short
        return long

    def _start(self, works: list[_Work]) -> None:
        for work in works:
            try:
                self._submit(self._run, work)
            except RuntimeError as error:  # the pool is shut down
                work.future.set_exception(error)
                self._ended(work, 0.0)

    def _run(self, work: _Work) -> None:
        """In a thread of the pool."""
        began_s = time.monotonic()
        try:
            result = work.run()
        except BaseException as error:  # its caller's
            self._ended(work, time.monotonic() - began_s)
            work.future.set_exception(error)
        else:
            self._ended(work, time.monotonic() - began_s)
            work.future.set_result(result)

    def _ended(self, work: _Work, took_s: float) -> None:
        with self._lock:
            self._running[work.long] -= 1
            self._shares.charge(work.caller, max(1, int(took_s * 1e6)), 0)
            self._shares.left(work.caller, time.monotonic())
            started = self._take()
        self._start(started)


def share_threads(renderer: Any, slots: int, weights: Mapping[str, float] | None = None) -> None:
    """Have a renderer of vLLM's (checked against 0.32) give its `slots` threads to callers fairly."""
    renderer._executor.submit = TokeniserSlots(renderer._executor.submit, slots, weights).submit
