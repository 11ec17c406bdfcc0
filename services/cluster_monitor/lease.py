"""Leader election: of several monitors with one database, the holder of the lease acts, the others are standbys.

A single monitor without a lease acts from start to end. `shared.store.lease` says why no two act at once.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from sqlalchemy.exc import SQLAlchemyError

from shared.errors import Standby
from shared.runtime.logs import get_log
from shared.store.lease import MAX_EPOCH, Held, LeaseStore
from shared.store.write_behind import Fence

log = get_log(__name__)
NAME = "monitor"
RENEWALS = 6  # of a lease's length
_MARGIN = 0.1  # of a lease's length, by which its holder stops before another one may begin


class LeaderTerm:
    """A time during which this monitor acts. Call `check` before each act, and again before reporting its success.

    A term of a lease's holder ends with the lease, and stays over even where the same monitor takes the lease again.
    Without a lease the monitor is alone: its only term, of epoch 0, does not end.
    """

    def __init__(self, lease: "Lease | None" = None, epoch: int = 0) -> None:
        self._lease = lease
        self.epoch = epoch

    @property
    def alone(self) -> bool:
        return self._lease is None

    def check(self) -> None:
        """Raises Standby once the term is over or may be over."""
        if self._lease is None:
            return
        self._lease.check()
        if self._lease.epoch != self.epoch:
            raise Standby(f"{self._lease.holder} has begun another term meanwhile")

    def fence(self) -> Fence | None:
        """Lets the database be written during this term only."""
        return None if self._lease is None else self._lease.fence(self.epoch)


class Lease:
    """Keeps the lease, or waits for it, while `run` runs.

    Without a row no monitor can tell whether there was one a moment ago, whose holder acts on. So one that writes a
    new row acts only when it has held that for the lease's length.

    A holder that cannot renew the lease in time stops acting. Its term goes on if a later renewal succeeds, since no
    other monitor can have held the lease in between; if another one has, the term is over.

    A holder that notes a higher epoch than its own ends its term and takes the lease again with an epoch above it,
    because instances do not obey a lower one. This happens where the database was lost and the clock set back.
    """

    def __init__(
        self, store: LeaseStore, holder: str, url: str, length_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self.holder, self._url, self._length_s = holder, url, length_s
        self._clock = clock
        self._mine: Held | None = None  # with the number of the latest attempt, whether or not it succeeded
        self._until_mono = 0.0  # until when the lease is certainly ours
        self._new: Held | None = None  # our row where there was none, until we act
        self._new_mono = 0.0  # since when it has been there
        self._seen: Held | None = None
        self._seen_mono: float | None = None  # since when the row has been unchanged
        self._noted_epoch = 0
        self._trouble = ""
        self._changed = asyncio.Event()  # set for a moment whenever a term begins or ends

    @property
    def epoch(self) -> int:
        """Of our term; 0 outside of one."""
        return self._mine.epoch if self._mine is not None else 0

    @property
    def acting(self) -> bool:
        """Whether the lease is ours at this moment."""
        return self._mine is not None and self._clock() < self._until_mono

    def check(self) -> None:
        """Raises Standby, naming the monitor that acts."""
        if not self.acting:
            raise Standby(f"{self.holder} does not act: {self.describe()}")

    def fence(self, epoch: int) -> Fence:
        """Lets write while it is still the term of that epoch."""
        return partial(self._store.allows, epoch=epoch)

    def note_epoch(self, epoch: int) -> None:
        """A process of the cluster obeys a monitor of this epoch. Values above `MAX_EPOCH` cannot be one."""
        if self._noted_epoch < epoch <= MAX_EPOCH:
            self._noted_epoch = epoch

    def describe(self) -> str:
        """Which monitor acts, as far as this one knows."""
        if self.acting:
            return f"{self.holder} at {self._url} acts"
        if self._mine is not None:
            return f"it could not renew its lease in time{f': {self._trouble}' if self._trouble else ''}"
        if self._trouble:
            return f"it cannot see which monitor acts: {self._trouble}"
        if self._seen is None or not self._seen.holder:
            return "no monitor acts yet"
        return f"{self._seen.holder} at {self._seen.url} acts, as far as it has seen"

    async def gained(self) -> LeaderTerm:
        """Wait for this monitor's term; returns at once within one."""
        while self._mine is None:
            await self._changed.wait()
        return LeaderTerm(self, self._mine.epoch)

    async def lost(self, epoch: int) -> None:
        """Wait for the end of the term of that epoch."""
        while self.epoch == epoch:
            await self._changed.wait()

    async def run(self) -> None:
        """Until cancelled."""
        period_s = self._length_s / RENEWALS
        while True:
            began = self._clock()
            try:
                if self._mine is not None:
                    await self._keep(self._mine, began)
                elif self._new is not None:
                    await self._keep_new(self._new, began)
                else:
                    await self._wait(began)
                self._trouble = ""
            except (SQLAlchemyError, OSError, TimeoutError) as error:
                text = f"{type(error).__name__}: {error}"[:200]
                if not self._trouble:
                    log.warning("the lease's database does not answer", acting=self.acting, error=text)
                self._trouble = text
            wait_s = period_s if self._mine is not None else period_s / 2
            await asyncio.sleep(max(wait_s / 4, began + wait_s - self._clock()))

    async def give_back(self) -> None:
        """Let another monitor take over at once; to be called when this one has stopped acting."""
        if self._mine is None:
            return
        mine, self._mine = self._mine, None
        self._announce()
        try:
            await self._store.give_back(mine)
        except (SQLAlchemyError, OSError, TimeoutError) as error:
            log.warning("the lease was not given back", error=f"{type(error).__name__}: {error}"[:200])

    async def _keep(self, mine: Held, began: float) -> None:
        if self._noted_epoch > mine.epoch:
            await self._raise_epoch(mine)
            return
        renewal = self._attempt(mine)
        if await self._store.renew(renewal):
            self._hold(renewal, began)
            return
        row = await self._store.read()
        if row is None:  # the database was removed
            await self._put_back(renewal)
        elif row.epoch != mine.epoch:
            self._lose(row)

    def _attempt(self, before: Held) -> Held:
        """The next attempt. Its number is used up even if the attempt fails, so that no number is used twice."""
        self._mine = before.next_attempt()
        return self._mine

    async def _put_back(self, before: Held) -> None:
        """Write the lost row again, but only while the lease is ours: later, another monitor may have held it."""
        began = self._clock()
        if self.acting and await self._store.put_back(row := self._attempt(before)) and self.acting:
            self._hold(row, began)
        elif not self.acting:
            self._lose(None)

    async def _raise_epoch(self, mine: Held) -> None:
        """End this term and begin one above every epoch that was received; another monitor may take the lease first."""
        log.error(
            "the cluster has obeyed a later monitor than this one; this one takes the lease with a higher epoch",
            epoch=mine.epoch,
            received=self._noted_epoch,
        )
        row, began = await self._store.read(), self._clock()
        if row is None:
            await self._put_back(mine)
        elif row.epoch != mine.epoch:
            self._lose(row)
        else:
            await self._take(row, began)

    async def _wait(self, began: float) -> None:
        row = await self._store.read()
        if row is None:
            self._seen_mono = None
            self._new = await self._store.acquire(None, self.holder, self._url, self._length_s, self._noted_epoch)
            self._new_mono = self._clock()
            return
        if self._seen_mono is None or row != self._seen:
            self._seen, self._seen_mono = row, self._clock()
        if began - self._seen_mono >= row.length_s or not row.holder:
            await self._take(row, self._clock())

    async def _keep_new(self, new: Held, began: float) -> None:
        self._new = new.next_attempt()
        if not await self._store.renew(self._new):
            self._new = None
        elif began - self._new_mono >= self._length_s:
            taken, self._new = self._new, None
            self._begin(taken, began, before="")

    async def _take(self, row: Held, asked_mono: float) -> None:
        taken = await self._store.acquire(row, self.holder, self._url, self._length_s, self._noted_epoch)
        if taken is not None:
            self._begin(taken, asked_mono, before=row.holder)

    def _begin(self, mine: Held, asked_mono: float, before: str) -> None:
        self._hold(mine, asked_mono)
        log.warning("this monitor acts from now on", epoch=mine.epoch, before=before)
        self._announce()

    def _hold(self, mine: Held, asked_mono: float) -> None:
        self._mine, self._until_mono = mine, asked_mono + self._length_s * (1 - _MARGIN)

    def _lose(self, row: Held | None) -> None:
        log.error("another monitor acts by now; this one stands by", other=row.holder if row is not None else "")
        self._mine, self._seen, self._seen_mono = None, row, self._clock()
        self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed.clear()
