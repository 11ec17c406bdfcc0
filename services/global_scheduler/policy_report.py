"""Telling the monitor which policies this scheduler follows, so that whoever changes them sees when all do."""

import asyncio
from contextlib import suppress

from services.global_scheduler.placer import Placer
from shared.errors import PolyphaseError
from shared.wire.clients.monitor import MonitorClient

MOST = 2_048  # characters
AGAIN_S = 2.0  # a monitor that was started again has heard nothing


class PolicyReport:
    """Says it at once when it has changed, and every two seconds. A monitor that is away hears it later."""

    def __init__(self, scheduler_id: str, placer: Placer, monitor: MonitorClient) -> None:
        self._scheduler_id = scheduler_id
        self._placer = placer
        self._monitor = monitor
        self._news = asyncio.Event()
        placer.on_policies = self._news.set

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._news.clear()
            policies, trouble = self._placer.followed
            with suppress(PolyphaseError):
                await self._monitor.follows(self._scheduler_id, policies.revision, trouble[:MOST])
            with suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S):
                    await self._news.wait()
