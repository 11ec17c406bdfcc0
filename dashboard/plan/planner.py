"""All that the page Plan reads and does, over the planner's HTTP API."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from dashboard.data import Api
from dashboard.login.accounts import Account
from dashboard.plan.records import Fleet, PlanSearch, Proposal, WhatIf
from dashboard.plan.wishes import Act, Wish
from dashboard.reads import Read
from shared.errors import Unavailable


@dataclass(frozen=True, slots=True)
class PlanSnapshot:
    """Everything on the page, read at about one moment."""

    fleet: Read[Fleet]
    proposals: Read[list[Proposal]]
    searches: Read[list[PlanSearch]]


class Planner:
    """One planner, for callers in threads. One per process."""

    def __init__(self, api: Api) -> None:
        self.settings = api.settings
        self._api, self._hub, self._client = api, api.hub, api.hub.clients.planner

    def snapshot(self) -> PlanSnapshot:
        """Read all there is on the page."""
        shown, fresh_s = self.settings, self._api.fresh_s
        newest = partial(self._client.proposals, shown.proposals_shown)
        latest = partial(self._client.plans, shown.searches_shown)
        fleet: Future[Read[Fleet]] = self._hub.ask("fleet", self._client.fleet, Fleet, fresh_s)
        proposals: Future[Read[list[Proposal]]] = self._hub.ask("proposals", newest, list[Proposal], fresh_s)
        searches: Future[Read[list[PlanSearch]]] = self._hub.ask("plans", latest, list[PlanSearch], fresh_s)
        return PlanSnapshot(fleet.result(), proposals.result(), searches.result())

    def search(self, plan_id: str) -> Read[PlanSearch]:
        """One search, with its cluster file."""
        call = partial(self._client.plan, plan_id)
        return self._hub.ask(f"plan {plan_id}", call, PlanSearch, self._api.fresh_s).result()

    def what_if(self, change: Mapping[str, Any]) -> WhatIf:
        """What a changed cluster or demand would do. Raises what the planner refuses or fails with."""
        try:
            return msgspec.convert(self._hub.run(self._client.what_if(change)).result(), WhatIf)
        except ValueError as error:  # not JSON, or not of the kind
            raise Unavailable(f"the planner's answer was not understood: {error}") from error

    def act(self, wish: Wish, account: Account) -> None:
        """Have it done. Raises what the planner refuses or fails with, and as `Api.allow`."""
        self._api.allow(account)
        try:
            self._hub.run(self._act(wish, account.name)).result()
        finally:
            self._hub.forget()

    async def _act(self, wish: Wish, name: str) -> None:
        client = self._client
        match wish.act:
            case Act.ACCEPT:
                await client.accept(wish.target, who=name)
            case Act.REFUSE:
                await client.refuse(wish.target, who=name)
            case Act.AUTO_ON | Act.AUTO_OFF:
                await client.set_auto(wish.act is Act.AUTO_ON, who=name)
            case Act.CANCEL:
                await client.cancel(wish.target, who=name)
            case Act.SUBMIT:
                await client.submit(wish.body, who=name)
