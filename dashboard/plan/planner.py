"""All that the page Plan reads and does, over the planner's HTTP API."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from dashboard.dashboard_settings import DashboardSettings
from dashboard.data import WHO
from dashboard.plan.records import Fleet, PlanSearch, Proposal, WhatIf
from dashboard.plan.wishes import Act, Wish
from dashboard.reads import Read, Reader
from shared.errors import Unavailable
from shared.wire.clients.planner import PlannerClient


@dataclass(frozen=True, slots=True)
class PlanSnapshot:
    """Everything on the page, read at about one moment."""

    fleet: Read[Fleet]
    proposals: Read[list[Proposal]]
    searches: Read[list[PlanSearch]]

    @property
    def error(self) -> str:
        """Why something is missing; empty when nothing is."""
        return next((read.error for read in self._all if read.error), "")

    @property
    def known_s(self) -> float | None:
        """From when the oldest thing is that is shown; None when nothing is known."""
        return min((read.read_s for read in self._all if read.value is not None), default=None)

    @property
    def _all(self) -> tuple[Read[Any], ...]:
        return self.fleet, self.proposals, self.searches


class Planner:
    """One planner, for callers in threads. One per process; it remembers what each read brought last."""

    def __init__(self, settings: DashboardSettings) -> None:
        self.settings = settings
        self._reader = Reader(settings.read_timeout_s)

    def snapshot(self) -> PlanSnapshot:
        """Read all there is on the page."""
        return asyncio.run(self._snapshot())

    def search(self, plan_id: str) -> Read[PlanSearch]:
        """One search, with its cluster file."""

        async def read() -> Read[PlanSearch]:
            async with self._client() as client:
                return await self._reader.read("", lambda: client.plan(plan_id), PlanSearch)

        return asyncio.run(read())

    def what_if(self, change: Mapping[str, Any]) -> WhatIf:
        """What a changed cluster or demand would do. Raises what the planner refuses or fails with."""

        async def ask() -> dict[str, Any]:
            async with self._client() as client:
                return await client.what_if(change)

        try:
            return msgspec.convert(asyncio.run(ask()), WhatIf)
        except ValueError as error:  # not JSON, or not of the kind
            raise Unavailable(f"the planner's answer was not understood: {error}") from error

    def act(self, wish: Wish) -> None:
        """Have it done. Raises what the planner refuses or fails with."""
        asyncio.run(self._act(wish))

    async def _act(self, wish: Wish) -> None:
        async with self._client() as client:
            match wish.act:
                case Act.ACCEPT:
                    await client.accept(wish.target, who=WHO)
                case Act.REFUSE:
                    await client.refuse(wish.target, who=WHO)
                case Act.AUTO_ON | Act.AUTO_OFF:
                    await client.set_auto(wish.act is Act.AUTO_ON, who=WHO)
                case Act.CANCEL:
                    await client.cancel(wish.target, who=WHO)
                case Act.SUBMIT:
                    await client.submit(wish.body, who=WHO)

    async def _snapshot(self) -> PlanSnapshot:
        shown = self.settings
        async with self._client() as client, asyncio.TaskGroup() as group:
            fleet = group.create_task(self._reader.read("fleet", client.fleet, Fleet))
            newest = partial(client.proposals, shown.proposals_shown)
            proposals = group.create_task(self._reader.read("proposals", newest, list[Proposal]))
            latest = partial(client.plans, shown.searches_shown)
            searches = group.create_task(self._reader.read("plans", latest, list[PlanSearch]))
        return PlanSnapshot(fleet.result(), proposals.result(), searches.result())

    def _client(self) -> PlannerClient:
        return PlannerClient(self.settings.planner_url, transport=self._reader.transport())
