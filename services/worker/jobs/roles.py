"""The role of an instance and how it changes: drain, flip, resume. In memory, without a restart."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.domain.instance import Role
from shared.errors import Conflict, InvalidRequest, WrongRole
from shared.policy.index import SHOWN_S
from shared.policy.ledger import mark_of
from shared.runtime.logs import get_log
from shared.wire.messages import DrainReply, FlipReply

log = get_log(__name__)


class RoleState:
    """Admits jobs of the present role, counts them, and flips once none is left."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.draining = False
        self._inflight = 0
        self._settled = asyncio.Event()  # no job is left, or the drain was cancelled
        self.flips = 0
        self.on_drain: Callable[[], None] = lambda: None  # called when a drain begins
        self.epoch = 0  # of the monitor that is obeyed; it only rises
        self._accepted: deque[tuple[float, int]] = deque()  # when (monotonic), and the mark of the job

    @property
    def inflight(self) -> int:
        """Jobs accepted and not finished."""
        return self._inflight

    @property
    def accepted(self) -> tuple[int, ...]:
        """Marks of the jobs that were accepted within the last `SHOWN_S`."""
        since_mono = time.monotonic() - SHOWN_S
        while self._accepted and self._accepted[0][0] < since_mono:
            self._accepted.popleft()
        return tuple(mark for _, mark in self._accepted)

    @contextmanager
    def job(self, role: Role, job_id: str) -> Iterator[None]:
        """Count a job of that role. Raises WrongRole when the instance has another one or is draining."""
        if self.role is not role:
            raise WrongRole(f"this instance does {self.role}, not {role}")
        if self.draining:
            raise WrongRole("this instance is draining")
        self._inflight += 1
        self._accepted.append((time.monotonic(), mark_of(job_id)))
        try:
            yield
        finally:
            self._inflight -= 1
            if not self._inflight:
                self._settled.set()

    def obey(self, epoch: int) -> None:
        """Obey a monitor of that epoch. Raises Conflict when a later one has been obeyed.

        A single monitor without a lease has epoch 0. It is obeyed, since it may have replaced several monitors, and
        leaves the epoch as it is: a monitor that was fenced off stays so.
        """
        if 0 < epoch < self.epoch:
            raise Conflict(
                f"another monitor has taken over from the one of epoch {epoch}; this instance obeys epoch {self.epoch}"
            )
        self.epoch = max(self.epoch, epoch)

    async def drain(self, timeout_s: float) -> DrainReply:
        """Accept no new jobs and wait for the accepted ones, `timeout_s` at most, or until `resume`.

        The instance goes on draining after the timeout, and when the caller is gone; its heartbeats show it. Raises
        InvalidRequest for a negative time.
        """
        if not timeout_s >= 0.0:
            raise InvalidRequest(f"timeout_s must be 0 or more, got {timeout_s}")
        started = time.monotonic()
        self.draining = True
        self.on_drain()
        if self._inflight:
            self._settled.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._settled.wait()
            except TimeoutError:
                pass
            except asyncio.CancelledError:
                log.warning("the caller of this drain is gone; it goes on until a flip or a resume")
                raise
        return DrainReply(self.draining and not self._inflight, time.monotonic() - started, self._inflight)

    def flip(self, role: Role) -> FlipReply:
        """Change the role. Raises Conflict unless drained."""
        if not self.draining or self._inflight:
            raise Conflict(f"cannot flip: draining={self.draining}, {self._inflight} jobs in flight")
        self.role = role
        self.flips += 1
        log.info("role flipped", role=role.value)
        return FlipReply(role, 0.0)

    def resume(self) -> None:
        """Accept jobs again; a drain under way ends without success."""
        self.draining = False
        self._settled.set()
