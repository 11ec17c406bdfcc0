"""A process from its start to its end: when it is ready, and that it ends when it hangs.

What hangs (stopped, deadlocked, its event loop blocked) does not die by itself: it is put down, and whoever keeps it
running starts another. The launcher does so for its processes, a container for its only one.
"""

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from services.launcher.health import Health
from services.launcher.process import STOP_S, Child

ASK_S = 2.0  # for one question while a process starts
DUMP_S = 1.0  # for the stacks of a process that hangs


@dataclass(frozen=True, slots=True)
class Limits:
    """How patient the launcher is, in seconds."""

    start_s: float = 300.0  # the longest a process may take to become healthy
    poll_s: float = 0.1  # between two questions while it starts
    hang_s: float = 6.0  # so long without a good answer, once healthy, means that it hangs; 0: it is not asked again
    check_s: float = 1.0  # between two questions then
    backoff_s: float = 0.2  # before the first restart; doubles with each further one
    backoff_max_s: float = 10.0
    stable_s: float = 30.0  # ready for so long, and the next restart is again the first
    stop_s: float = STOP_S
    at_once: int = 3  # processes that start at the same time


Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Unready:
    """Why a process did not become healthy. late: it took longer than it may; else it ended by itself."""

    text: str
    late: bool = False


async def until_healthy(child: Child, health: Health | None, limits: Limits) -> Unready | None:
    """Why it did not become healthy, if it did not; then it has ended."""
    if health is None:
        return None
    ended = asyncio.ensure_future(child.wait())
    since_s, stopped_s = time.monotonic(), 0.0
    try:
        while fault := await health.ask(ASK_S):
            if (await asyncio.wait([ended], timeout=limits.poll_s))[0]:
                return Unready(ending(ended.result()))
            stopped_s = time.monotonic() if not stopped_s or not child.stopped else stopped_s
            if limits.hang_s and time.monotonic() - stopped_s > limits.hang_s:
                text = f"stopped by a signal for {limits.hang_s:g} s while it started"
                return Unready(await _put_down(child, text), late=True)
            if time.monotonic() - since_s > limits.start_s:
                return Unready(await _put_down(child, f"not healthy after {limits.start_s:g} s ({fault})"), late=True)
    finally:
        ended.cancel()
    return None


async def until_ended(child: Child, health: Health | None, limits: Limits, say: Say) -> str:
    """How a process that was healthy ended: by itself, or by us because it hung. `say` writes into its log."""
    ended = asyncio.ensure_future(child.wait())
    hung = asyncio.ensure_future(_until_hung(health, limits))
    try:
        await asyncio.wait([ended, hung], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            return ending(ended.result())
        fault = f"hung: no good answer for {limits.hang_s:g} s ({hung.result()})"
        return await _put_down(child, fault + await _dump(child, fault, say))
    finally:
        ended.cancel()
        hung.cancel()


def ending(code: int) -> str:
    """How a process ended, in words."""
    return f"killed by signal {-code}" if code < 0 else f"ended with code {code}"


async def _until_hung(health: Health | None, limits: Limits) -> str:
    """What was wrong with the last answer, when there was no good one for `hang_s`.

    It takes two questions at least. Where one took much longer than it may, it was we who stood still (a suspended
    machine, a stopped launcher), and that does not count.
    """
    if health is None or not limits.hang_s:
        await asyncio.Event().wait()
    assert health is not None
    patience_s, silent_s = limits.hang_s / 2, 0.0
    pause_s = min(limits.check_s, patience_s)
    while True:
        began = time.monotonic()
        fault = await health.ask(patience_s)
        await asyncio.sleep(max(0.0, began + pause_s - time.monotonic()))
        took = time.monotonic() - began
        if not fault:
            silent_s = 0.0
        elif took < 2 * patience_s:
            silent_s += took
        if silent_s > 0.99 * limits.hang_s:  # timers are not exact
            return fault


async def _dump(child: Child, fault: str, say: Say) -> str:
    """Have the process write the stacks of its threads, as every service of ours does when asked by a signal."""
    if child.stopped:
        return ", stopped by a signal"
    say(f"polyphase: {fault}; the stacks of its threads follow, then it is killed")
    child.signal_leader(signal.SIGUSR1)
    with suppress(TimeoutError):
        await asyncio.wait_for(child.wait(), DUMP_S)
    return ", its stacks are in its log"


async def _put_down(child: Child, fault: str) -> str:
    child.kill()
    await child.wait()
    return fault
