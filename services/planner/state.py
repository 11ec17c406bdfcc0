"""What the planner's routes work on; built in the lifespan."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from services.planner.answers import Answers
from services.planner.decider import Decider
from services.planner.proposals import Proposals
from services.planner.searches import Searches
from services.planner.settings import PlannerSettings
from services.planner.watch import Watch
from shared.runtime.actor import actor
from shared.wire.clients.monitor import MonitorClient


@dataclass(frozen=True, slots=True)
class State:
    """All of it."""

    settings: PlannerSettings
    monitor: MonitorClient
    watch: Watch
    proposals: Proposals
    decider: Decider
    searches: Searches
    answers: Answers


async def _state(request: Request) -> State:
    state: State = request.app.state.planner
    return state


Planner = Annotated[State, Depends(_state)]
Who = Annotated[str, Depends(actor)]
