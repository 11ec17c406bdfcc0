"""Answers that take thought, and are asked for by many: each is thought about once."""

import asyncio
import time
from math import inf
from typing import Any

from services.planner.fleet import described
from services.planner.watch import Watch
from shared.errors import PolyphaseError
from shared.wire.clients.monitor import MonitorClient

FRESH_S = 0.5  # for so long whoever asks for the fleet hears the same


class Answers:
    """asked: held while a what-if question is thought about."""

    def __init__(self) -> None:
        self.asked = asyncio.Lock()
        self._describing = asyncio.Lock()
        self._fleet: dict[str, Any] = {}
        self._fleet_s = -inf  # monotonic

    async def fleet(self, monitor: MonitorClient, watch: Watch) -> dict[str, Any]:
        """See `described`."""
        async with self._describing:
            if time.monotonic() - self._fleet_s >= FRESH_S:
                try:
                    slo = await monitor.slo()
                except PolyphaseError:
                    slo = None  # `trouble` says that the monitor is away
                self._fleet = await asyncio.to_thread(described, watch, slo)
                self._fleet_s = time.monotonic()
            return self._fleet
