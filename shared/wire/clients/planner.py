"""The planner's HTTP API."""

from collections.abc import Mapping
from typing import Any

from shared.runtime.actor import acting_as
from shared.wire.api.planner import Fleet, PlanSearch, Proposal, Review, WhatIf
from shared.wire.clients.http import JsonClient

WHAT_IF_S = 10.0


class PlannerClient(JsonClient):
    """Calls to a planner. They raise errors of `shared.errors`."""

    async def fleet(self) -> Fleet:
        """The running cluster as the planner sees it: instances, routes, expected and measured figures."""
        return await self.get("/fleet", Fleet)

    async def proposals(self, limit: int = 20) -> list[Proposal]:
        """The proposals, newest first."""
        return await self.get("/proposals", list[Proposal], limit=limit)

    async def proposal(self, proposal_id: str) -> Proposal:
        """A proposal. Raises NotFound."""
        return await self.get(f"/proposals/{proposal_id}", Proposal)

    async def propose(self, *, who: str = "") -> Review:
        """Look for a proposal now."""
        return await self.call("POST", "/proposals", Review, headers=acting_as(who), timeout_s=WHAT_IF_S)

    async def accept(self, proposal_id: str, *, who: str = "") -> Proposal:
        """Start a proposal; `proposals` shows its progress. Raises NotFound, Conflict."""
        return await self.call("POST", f"/proposals/{proposal_id}/accept", Proposal, headers=acting_as(who))

    async def refuse(self, proposal_id: str, *, who: str = "") -> Proposal:
        """Refuse a proposal, which is not repeated for a while. Raises NotFound, Conflict."""
        return await self.call("POST", f"/proposals/{proposal_id}/refuse", Proposal, headers=acting_as(who))

    async def set_auto(self, auto: bool, *, who: str = "") -> Fleet:
        """Set whether proposals are applied without confirmation."""
        return await self.call("PUT", "/mode", Fleet, body={"auto": auto}, headers=acting_as(who))

    async def what_if(self, change: Mapping[str, Any]) -> WhatIf:
        """The expected figures of the running cluster with other instances or another demand. Raises InvalidRequest."""
        return await self.call("POST", "/what-if", WhatIf, body=dict(change), timeout_s=WHAT_IF_S)

    async def submit(self, request: Mapping[str, Any], *, who: str = "") -> PlanSearch:
        """Start a search for a plan. Raises InvalidRequest, Overloaded."""
        return await self.call("POST", "/plans", PlanSearch, body=dict(request), headers=acting_as(who))

    async def plans(self, limit: int = 20) -> list[PlanSearch]:
        """Searches, newest first, without their results' files."""
        return await self.get("/plans", list[PlanSearch], limit=limit)

    async def plan(self, plan_id: str) -> PlanSearch:
        """One search: its state, progress, result. Raises NotFound."""
        return await self.get(f"/plans/{plan_id}", PlanSearch)

    async def cancel(self, plan_id: str, *, who: str = "") -> PlanSearch:
        """End a search; the best so far is its result. Raises NotFound, Conflict when it has ended."""
        return await self.call("POST", f"/plans/{plan_id}/cancel", PlanSearch, headers=acting_as(who))
