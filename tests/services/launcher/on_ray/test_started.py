"""What a suite waits for on Ray: all that have a node, unless some take too long."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from services.launcher.on_ray.suite import RayInstances
from services.launcher.supervisor import State, Status
from shared.domain.instance import Role
from shared.errors import Unavailable


def instance(name: str, role: Role, state: State) -> Any:
    """One that stays as it is."""

    async def nothing() -> None: ...

    status = Status(name, Path(), state)
    placed = state is not State.WAITING
    return SimpleNamespace(status=status, role=role, placed=placed, downloaded_mono=0.0, refresh=nothing, stop=nothing)


async def started(*instances: Any) -> tuple[str, ...]:
    made = RayInstances(list(instances))
    try:
        return await made.started(0.2)
    finally:
        await made.close()


async def test_one_that_takes_too_long_is_left_to_start_while_the_others_serve() -> None:
    ready, slow = instance("d-0", Role.DECODE, State.READY), instance("d-1", Role.DECODE, State.STARTING)
    prefill = instance("p", Role.PREFILL, State.READY)
    assert await started(prefill, ready, slow) == ("p", "d-0")
    assert await started(prefill, ready) == ("p", "d-0")


async def test_a_role_without_a_ready_instance_is_named() -> None:
    prefill, slow = instance("p", Role.PREFILL, State.READY), instance("d", Role.DECODE, State.STARTING)
    with pytest.raises(Unavailable, match=r"not ready on Ray after 0\.2 s:\nd: starting"):
        await started(prefill, slow)
