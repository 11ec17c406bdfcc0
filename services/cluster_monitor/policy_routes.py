"""The monitor's HTTP API of policies."""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, field_validator

from services.cluster_monitor.routes import Monitor, Who
from services.cluster_monitor.state import State
from shared.domain.numbers import infinite_in
from shared.domain.route import PolicySpec

router = APIRouter()


class PolicyIn(BaseModel):
    """PolicySpec."""

    model_config = ConfigDict(allow_inf_nan=False, extra="forbid", frozen=True)

    name: str
    parameters: dict[str, Any] = {}

    @field_validator("parameters")
    @classmethod
    def _finite(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        if where := infinite_in(parameters):
            raise ValueError(f"{where} must be a finite number")
        return parameters


@router.get("/policies")
async def get_policies(monitor: Monitor) -> dict[str, Any]:
    """The policies in force, what the cluster file says, who changed what, the choices, and who follows."""
    return _described(monitor)


@router.put("/policies")
async def put_policies(monitor: Monitor, who: Who, change: dict[str, PolicyIn | None]) -> dict[str, Any]:
    """Change the policies of the kinds that are named; null: back to the cluster file's."""
    wanted = {kind: PolicySpec(one.name, one.parameters) if one else None for kind, one in change.items()}
    await monitor.policies.change(wanted, who)
    return _described(monitor)


def _described(monitor: State) -> dict[str, Any]:
    return {**monitor.policies.describe(), "followers": monitor.followers.describe(monitor.policies.policies)}
