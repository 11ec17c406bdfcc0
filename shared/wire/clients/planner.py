"""The planner's HTTP API."""

from collections.abc import Mapping
from typing import Any

from shared.runtime.actor import acting_as
from shared.wire.clients.http import JsonClient

WHAT_IF_S = 10.0


class PlannerClient(JsonClient):
    """Typed calls to one planner. All raise errors of `shared.errors`."""

    async def fleet(self) -> dict[str, Any]:
        """The running cluster as the planner sees it: instances, routes, what is expected and what is measured."""
        return await self.object("GET", "/fleet")

    async def proposals(self, limit: int = 20) -> list[dict[str, Any]]:
        """What was proposed, newest first."""
        return await self.rows("/proposals", params={"limit": limit})

    async def proposal(self, proposal_id: str) -> dict[str, Any]:
        """One of them. Raises NotFound."""
        return await self.object("GET", f"/proposals/{proposal_id}")

    async def propose(self, *, who: str = "") -> dict[str, Any]:
        """Look now: {"proposal": one or null, "why": "…"}."""
        return await self.object("POST", "/proposals", headers=acting_as(who), timeout_s=WHAT_IF_S)

    async def accept(self, proposal_id: str, *, who: str = "") -> dict[str, Any]:
        """Have it carried out; answers at once, `proposals` tells how it goes. Raises NotFound, Conflict."""
        return await self.object("POST", f"/proposals/{proposal_id}/accept", headers=acting_as(who))

    async def refuse(self, proposal_id: str, *, who: str = "") -> dict[str, Any]:
        """It is not to be done, nor proposed again for a while. Raises NotFound, Conflict."""
        return await self.object("POST", f"/proposals/{proposal_id}/refuse", headers=acting_as(who))

    async def set_auto(self, auto: bool, *, who: str = "") -> dict[str, Any]:
        """Whether proposals are applied without being asked about; answers as `fleet` does."""
        return await self.object("PUT", "/mode", body={"auto": auto}, headers=acting_as(who))

    async def what_if(self, change: Mapping[str, Any]) -> dict[str, Any]:
        """What the running cluster would do with other instances, or another demand. Raises InvalidRequest."""
        return await self.object("POST", "/what-if", body=dict(change), timeout_s=WHAT_IF_S)

    async def submit(self, request: Mapping[str, Any], *, who: str = "") -> dict[str, Any]:
        """Have a plan searched for. Raises InvalidRequest, Overloaded."""
        return await self.object("POST", "/plans", body=dict(request), headers=acting_as(who))

    async def plans(self, limit: int = 20) -> list[dict[str, Any]]:
        """Searches, newest first, without their results' files."""
        return await self.rows("/plans", params={"limit": limit})

    async def plan(self, plan_id: str) -> dict[str, Any]:
        """One search: its state, progress, result. Raises NotFound."""
        return await self.object("GET", f"/plans/{plan_id}")

    async def cancel(self, plan_id: str, *, who: str = "") -> dict[str, Any]:
        """End a search; the best so far is its result. Raises NotFound, Conflict when it has ended."""
        return await self.object("POST", f"/plans/{plan_id}/cancel", headers=acting_as(who))
