"""Which of several monitors acts: the one that holds the lease. The others stand by.

A monitor that is alone acts always. See `shared.store.lease` for why no two act at once.
"""

import asyncio
import time
from functools import partial
from typing import Protocol

from sqlalchemy.exc import SQLAlchemyError

from shared.errors import Standby
from shared.runtime.logs import get_log
from shared.store.lease import Held, LeaseStore
from shared.store.write_behind import Fence

log = get_log(__name__)
NAME = "monitor"
RENEWALS = 6  # of a lease's length
_MARGIN = 0.1  # of its length, by which a holder stops before another one may begin


class Turn(Protocol):
    """Whether this monitor may act, right now; asked before each act."""

    @property
    def epoch(self) -> int:
        """Which turn it is, of all monitors; 0 for one that is alone."""

    def check(self) -> None:
        """Raises Standby."""

    def fence(self) -> Fence | None:
        """For what is written to the database during this turn."""


class Alone:
    """There is no other one."""

    epoch = 0

    def check(self) -> None:
        """It may."""

    def fence(self) -> None:
        """It needs none."""


class Lease:
    """Keeps or waits for the lease while `run` runs.

    A holder that could not renew it in time does nothing from then on, and goes on once it could after all: nobody else
    had it meanwhile. Where somebody has, its turn is over.
    """

    def __init__(self, store: LeaseStore, holder: str, url: str, length_s: float) -> None:
        self._store = store
        self._holder, self._url, self._length_s = holder, url, length_s
        self._mine: Held | None = None
        self._until_mono = 0.0  # it is surely ours
        self._seen: Held | None = None
        self._seen_mono: float | None = None  # since when it has been as it is
        self._trouble = ""
        self._ours, self._others = asyncio.Event(), asyncio.Event()

    @property
    def epoch(self) -> int:
        """Of our turn; 0 outside of one."""
        return self._mine.epoch if self._mine is not None else 0

    @property
    def acting(self) -> bool:
        """Whether the lease is ours at this moment."""
        return self._mine is not None and time.monotonic() < self._until_mono

    def check(self) -> None:
        """Raises Standby, naming who acts."""
        if not self.acting:
            raise Standby(f"{self._holder} does not act: {self.describe()}")

    def fence(self) -> Fence:
        """Lets write while it is still this turn."""
        return partial(self._store.allows, epoch=self.epoch)

    def describe(self) -> str:
        """Who acts, as far as known."""
        if self.acting:
            return f"{self._holder} at {self._url} acts"
        if self._mine is not None:
            return f"it could not renew its lease in time{f': {self._trouble}' if self._trouble else ''}"
        if self._trouble:
            return f"it cannot see who does: {self._trouble}"
        if self._seen is None or not self._seen.holder:
            return "nobody acts yet"
        return f"{self._seen.holder} at {self._seen.url} acts, as far as it has seen"

    async def gained(self) -> None:
        """Wait for our turn."""
        await self._ours.wait()

    async def lost(self) -> None:
        """Wait for its end."""
        await self._others.wait()

    async def run(self) -> None:
        """Until cancelled."""
        period_s = self._length_s / RENEWALS
        while True:
            began = time.monotonic()
            try:
                await (self._wait(began) if self._mine is None else self._keep(self._mine, began))
                self._trouble = ""
            except (SQLAlchemyError, OSError, TimeoutError) as error:
                text = f"{type(error).__name__}: {error}"[:200]
                if not self._trouble:
                    log.warning("the lease's database does not answer", acting=self.acting, error=text)
                self._trouble = text
            wait_s = period_s if self._mine is not None else period_s / 2
            await asyncio.sleep(max(wait_s / 4, began + wait_s - time.monotonic()))

    async def give_back(self) -> None:
        """Let another one take over at once; to be called when nothing is done any more."""
        if self._mine is None:
            return
        mine, self._mine = self._mine, None
        try:
            await self._store.give_back(mine)
        except (SQLAlchemyError, OSError, TimeoutError) as error:
            log.warning("the lease was not given back", error=f"{type(error).__name__}: {error}"[:200])

    async def _keep(self, mine: Held, began: float) -> None:
        renewed = await self._store.renew(mine)
        if renewed is None:
            row = await self._store.read()
            if row is None and await self._store.put_back(mine):  # the database was removed, and made again
                renewed = mine
            elif row is None or row.epoch != mine.epoch:
                self._lose(row)
                return
        if renewed is not None:
            self._hold(renewed, began)

    async def _wait(self, began: float) -> None:
        row = await self._store.read()
        if self._seen_mono is None or row != self._seen:
            self._seen, self._seen_mono = row, time.monotonic()
        length_s = self._length_s if row is None else row.length_s
        if began - self._seen_mono < length_s and (row is None or row.holder):
            return
        asked = time.monotonic()
        taken = await self._store.take(row, self._holder, self._url, self._length_s)
        if taken is None:
            return
        self._hold(taken, asked)
        log.warning("this monitor acts from now on", epoch=taken.epoch, before=row.holder if row is not None else "")
        self._others.clear()
        self._ours.set()

    def _hold(self, mine: Held, asked_mono: float) -> None:
        self._mine, self._until_mono = mine, asked_mono + self._length_s * (1 - _MARGIN)

    def _lose(self, row: Held | None) -> None:
        log.error("another monitor acts by now; this one stands by", other=row.holder if row is not None else "")
        self._mine, self._seen, self._seen_mono = None, row, time.monotonic()
        self._ours.clear()
        self._others.set()
