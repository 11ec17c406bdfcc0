"""The planner's HTTP API of searches."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from services.planner.edge import SearchIn
from services.planner.searches import Searches
from services.planner.state import Who

router = APIRouter()


async def _searches(request: Request) -> Searches:
    searches: Searches = request.app.state.planner.searches
    return searches


Book = Annotated[Searches, Depends(_searches)]


@router.post("/plans")
async def submit(searches: Book, who: Who, wanted: SearchIn) -> dict[str, Any]:
    """Search for a plan; 429 when too many wait."""
    return (await searches.submit(wanted, who)).full()


@router.get("/plans")
async def list_plans(searches: Book, limit: Annotated[int, Query(ge=1, le=1_000)] = 20) -> list[dict[str, Any]]:
    """The newest searches, newest first, without cluster files and inventories."""
    return [record.brief() for record in await searches.newest(limit)]


@router.get("/plans/{plan_id}")
async def get_plan(searches: Book, plan_id: str) -> dict[str, Any]:
    """One search: its state, its progress, its result."""
    return (await searches.find(plan_id)).full()


@router.post("/plans/{plan_id}/cancel")
async def cancel(searches: Book, who: Who, plan_id: str) -> dict[str, Any]:
    """End a search, answered at once; the best so far becomes its result, if there is one. 409 when it has ended."""
    return (await searches.cancel(plan_id, who)).full()
