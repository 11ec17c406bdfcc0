"""The planner's HTTP API: searches for plans, the running cluster, and proposals for it."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response

from services.planner.edge import ModeIn, SearchIn, WhatIf
from services.planner.fleet import FleetPages, proposal_answer, what_if
from services.planner.proposals import Cause, Decider, Proposals
from services.planner.searches import Searches
from services.planner.settings import PlannerSettings
from services.planner.watch import ReviewReason, Watch
from shared.errors import Busy, Conflict
from shared.runtime.actor import actor
from shared.runtime.http import json_response
from shared.wire.api.planner import Promise, Review


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
async def submit(searches: SearchBook, who: Who, wanted: SearchIn) -> Response:
    """Search for a plan; 429 when too many wait."""
    return json_response((await searches.submit(wanted, who)).full())


@router.get("/plans")
async def list_plans(searches: SearchBook, limit: Annotated[int, Query(ge=1, le=1_000)] = 20) -> Response:
    """The newest searches, newest first, without cluster files and inventories."""
    return json_response([record.brief() for record in await searches.newest(limit)])


@router.get("/plans/{plan_id}")
async def get_plan(searches: SearchBook, plan_id: str) -> Response:
    """One search: its state, its progress, its result."""
    return json_response((await searches.find(plan_id)).full())


@router.post("/plans/{plan_id}/cancel")
async def cancel(searches: SearchBook, who: Who, plan_id: str) -> Response:
    """End a search, answered at once; the best so far becomes its result, if there is one. 409 when it has ended."""
    return json_response((await searches.cancel(plan_id, who)).full())


@router.get("/fleet")
async def fleet(planner: Planner) -> Response:
    """The running cluster: instances, routes, what is expected of them and what is measured."""
    page, decider, promise = await planner.pages.newest(), planner.decider, planner.settings.promise
    return json_response(
        msgspec.structs.replace(
            page,
            auto=decider.auto,
            why_not_auto=decider.why_not_auto,
            promise=msgspec.convert(promise, Promise) if promise else None,
        )
    )


@router.put("/mode")
async def mode(planner: Planner, who: Who, body: ModeIn) -> Response:
    """Whether proposals are applied at once; an open one is, too, when this is switched on."""
    planner.decider.set_auto(body.auto, who)
    return await fleet(planner)


@router.post("/what-if")
async def answer_what_if(planner: Planner, body: WhatIf) -> Response:
    """The cluster with other instances, or another demand. One question at a time, so that the watch gets its turns."""
    if planner.what_if.locked():
        raise Busy("another what-if question is being worked out: try again")
    async with planner.what_if:
        return json_response(await asyncio.to_thread(what_if, planner.watch, body))


@router.get("/proposals")
async def proposals(planner: Planner, limit: Annotated[int, Query(ge=1, le=200)] = 20) -> Response:
    """Proposals and what became of them, newest first."""
    return json_response([proposal_answer(each) for each in planner.proposals.newest(limit)])


@router.post("/proposals")
async def propose(planner: Planner, who: Who) -> Response:
    """Review the roles now: a proposal, or none and why."""
    if (applying := planner.proposals.applying) is not None:
        raise Conflict(f"proposal {applying.proposal_id} is being carried out")
    made, why = await planner.watch.review(ReviewReason(Cause.ASKED, time.time(), f"{who} asked"))
    return json_response(Review(proposal_answer(made) if made is not None else None, why))


@router.get("/proposals/{proposal_id}")
async def proposal(planner: Planner, proposal_id: str) -> Response:
    """One proposal."""
    return json_response(proposal_answer(planner.proposals.get(proposal_id)))


@router.post("/proposals/{proposal_id}/accept")
async def accept(planner: Planner, proposal_id: str, who: Who) -> Response:
    """Have a proposal carried out; answers when that has begun."""
    return json_response(proposal_answer(planner.decider.accept(proposal_id, who)))


@router.post("/proposals/{proposal_id}/refuse")
async def refuse(planner: Planner, proposal_id: str, who: Who) -> Response:
    """Refuse a proposal: it is not made again for a while unless there are new facts."""
    return json_response(proposal_answer(planner.proposals.refuse(proposal_id, who)))
