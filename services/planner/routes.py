"""The planner's HTTP API: searches for plans, the running cluster, and proposals for it."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request

from services.planner.edge import ModeIn, SearchIn, WhatIf
from services.planner.fleet import FleetPages, route_json, what_if
from services.planner.proposals import Cause, Decider, Proposal, Proposals
from services.planner.searches import Searches
from services.planner.settings import PlannerSettings
from services.planner.watch import ReviewReason, Watch
from shared.errors import Busy, Conflict
from shared.runtime.actor import actor


@dataclass(frozen=True, slots=True)
class State:
    """What the routes work on; built in the lifespan."""

    settings: PlannerSettings
    watch: Watch
    proposals: Proposals
    decider: Decider
    searches: Searches
    pages: FleetPages
    what_if: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a what-if question is worked out


async def _state(request: Request) -> State:
    state: State = request.app.state.planner
    return state


async def _searches(request: Request) -> Searches:
    searches: Searches = request.app.state.planner.searches
    return searches


Planner = Annotated[State, Depends(_state)]
SearchBook = Annotated[Searches, Depends(_searches)]
Who = Annotated[str, Depends(actor)]
router = APIRouter()


@router.post("/plans")
async def submit(searches: SearchBook, who: Who, wanted: SearchIn) -> dict[str, Any]:
    """Search for a plan; 429 when too many wait."""
    return (await searches.submit(wanted, who)).full()


@router.get("/plans")
async def list_plans(searches: SearchBook, limit: Annotated[int, Query(ge=1, le=1_000)] = 20) -> list[dict[str, Any]]:
    """The newest searches, newest first, without cluster files and inventories."""
    return [record.brief() for record in await searches.newest(limit)]


@router.get("/plans/{plan_id}")
async def get_plan(searches: SearchBook, plan_id: str) -> dict[str, Any]:
    """One search: its state, its progress, its result."""
    return (await searches.find(plan_id)).full()


@router.post("/plans/{plan_id}/cancel")
async def cancel(searches: SearchBook, who: Who, plan_id: str) -> dict[str, Any]:
    """End a search, answered at once; the best so far becomes its result, if there is one. 409 when it has ended."""
    return (await searches.cancel(plan_id, who)).full()


@router.get("/fleet")
async def fleet(planner: Planner) -> dict[str, Any]:
    """The running cluster: instances, routes, what is expected of them and what is measured."""
    decider = planner.decider
    return {
        **await planner.pages.newest(),
        "auto": decider.auto,
        "why_not_auto": decider.why_not_auto,
        "promise": planner.settings.promise or None,
    }


@router.put("/mode")
async def mode(planner: Planner, who: Who, body: ModeIn) -> dict[str, Any]:
    """Whether proposals are applied at once; an open one is, too, when this is switched on."""
    planner.decider.set_auto(body.auto, who)
    return await fleet(planner)


@router.post("/what-if")
async def ask_what_if(planner: Planner, body: WhatIf) -> dict[str, Any]:
    """The cluster with other instances, or another demand. One question at a time, so that the watch gets its turns."""
    if planner.what_if.locked():
        raise Busy("another what-if question is being worked out: try again")
    async with planner.what_if:
        return await asyncio.to_thread(what_if, planner.watch, body)


@router.get("/proposals")
async def proposals(planner: Planner, limit: Annotated[int, Query(ge=1, le=200)] = 20) -> list[dict[str, Any]]:
    """Proposals and what became of them, newest first."""
    return [proposal_json(one) for one in planner.proposals.newest(limit)]


@router.post("/proposals")
async def propose(planner: Planner, who: Who) -> dict[str, Any]:
    """Review the roles now: a proposal, or none and why."""
    if (applying := planner.proposals.applying) is not None:
        raise Conflict(f"proposal {applying.proposal_id} is being carried out")
    made, why = await planner.watch.review(ReviewReason(Cause.ASKED, time.time(), f"{who} asked"))
    return {"proposal": proposal_json(made) if made is not None else None, "why": why}


@router.get("/proposals/{proposal_id}")
async def proposal(planner: Planner, proposal_id: str) -> dict[str, Any]:
    """One proposal."""
    return proposal_json(planner.proposals.get(proposal_id))


@router.post("/proposals/{proposal_id}/accept")
async def accept(planner: Planner, proposal_id: str, who: Who) -> dict[str, Any]:
    """Have a proposal carried out; answers when that has begun."""
    return proposal_json(planner.decider.accept(proposal_id, who))


@router.post("/proposals/{proposal_id}/refuse")
async def refuse(planner: Planner, proposal_id: str, who: Who) -> dict[str, Any]:
    """Refuse a proposal: it is not made again for a while unless there are new facts."""
    return proposal_json(planner.proposals.refuse(proposal_id, who))


def proposal_json(one: Proposal) -> dict[str, Any]:
    """As JSON, where a route without a prefill instance has null."""
    found: dict[str, Any] = msgspec.to_builtins(one)
    return {**found, "routes": [route_json(route) for route in one.routes]}
