"""The driver's side: an actor in a placement group for each instance, and what is known of each."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from services.launcher.health import HttpHealth
from services.launcher.keeper import Changed, State, Status
from services.launcher.on_ray.actor import InstanceActor
from services.launcher.on_ray.needs import Needs
from services.launcher.process import STOP_S
from services.worker.settings import WorkerSettings
from shared.errors import NotFound, Unavailable

LOOK_S = 0.5  # between two looks at every instance
_ASK_S = 2.0
_LOST = (ray.exceptions.RayActorError, ray.exceptions.ActorUnavailableError)


class RayInstance:
    """One instance: placed by Ray on any node that has what it needs, and again when it or its node is lost."""

    def __init__(self, settings: WorkerSettings, env: Mapping[str, str], needs: Needs, changed: Changed) -> None:
        name = f"polyphase {settings.instance_id}"
        self.role = settings.role
        self.status = Status(settings.instance_id, Path())
        self._needs = needs
        self._changed = changed
        self._group: PlacementGroup = placement_group([dict(needs.bundle) or {"CPU": 0.001}], name=name)
        self._actor = (
            ray.remote(InstanceActor)
            .options(
                name=name,
                num_cpus=needs.bundle.get("CPU", 0),
                num_gpus=needs.bundle.get("GPU", 0),
                resources={name: n for name, n in needs.bundle.items() if name not in ("CPU", "GPU")},
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, 0),
            )
            .remote(settings.model_dump(mode="json"), dict(env))
        )
        self._asked: asyncio.Future[Any] | None = None
        self._health: HttpHealth | None = None
        self._at: tuple[str, int] | None = None  # node and process
        self._since_s = time.monotonic()  # of its placing, or of its loss

    @property
    def placed(self) -> bool:
        """Whether Ray has found room for it."""
        return self.status.state is not State.WAITING

    @property
    def node(self) -> str:
        """The id of the Ray node that it is or was on; empty for none."""
        return self._at[0] if self._at else ""

    async def look(self) -> None:
        """Ask where it is and whether it is well."""
        about = await self._about()
        if about is None:
            return
        if about["fault"]:
            self._gone(about["fault"])
            return
        if (about["node"], about["pid"]) != self._at:
            self._arrived(about)
        assert self._health is not None
        fault = await self._health.ask(_ASK_S)
        if not fault and self.status.state is not State.READY:
            self._set(State.READY, took_s=time.monotonic() - self._since_s, note=self._where(about))

    async def stop(self) -> None:
        """End it in good order, then for good."""
        if self.status.pid:
            with suppress(TimeoutError, *_LOST):
                await asyncio.wait_for(_future(self._actor.stop.remote(STOP_S)), STOP_S + _ASK_S)
        ray.kill(self._actor, no_restart=True)
        remove_placement_group(self._group)
        self._set(State.STOPPED, pid=0)

    async def _about(self) -> dict[str, Any] | None:
        """What the actor says of itself; None while there is none."""
        self._asked = self._asked or _future(self._actor.about.remote())
        await asyncio.wait([self._asked], timeout=LOOK_S)
        if not self._asked.done():
            self._absent()
            return None
        asked, self._asked = self._asked, None
        try:
            about: dict[str, Any] = asked.result()
        except _LOST as error:
            self._gone(str(error).strip().splitlines()[0])
            return None
        return about

    def _absent(self) -> None:
        if self.status.state in (State.READY, State.STARTING) and self._at:
            return  # it is busy; should it be lost, the answer says so
        group = placement_group_table(self._group).get("state", "")
        if group == "CREATED":
            if self.status.state is State.WAITING:
                self._since_s = time.monotonic()
                self._set(State.STARTING, note="")
        elif self.status.state is not State.WAITING or not self.status.note:
            self._set(State.WAITING, note=f"for a node with {self._needs} free")

    def _arrived(self, about: dict[str, Any]) -> None:
        again = 0 if self._at is None else 1
        self._at = (about["node"], about["pid"])
        self._health = HttpHealth(f"{about['url']}/health")
        restarts = self.status.restarts + again
        self._set(State.STARTING, pid=about["pid"], restarts=restarts, log=Path(about["log"]), note=self._where(about))

    def _gone(self, why: str) -> None:
        if self.status.state not in (State.RESTARTING, State.WAITING):
            self._since_s = time.monotonic()
            self._set(State.RESTARTING, pid=0, note="Ray starts it again", fault=why)

    @staticmethod
    def _where(about: dict[str, Any]) -> str:
        return f"on {about['host']}, Ray node {about['node'][:8]}"

    def _set(self, state: State, **changes: Any) -> None:
        self.status = replace(self.status, state=state, since_s=time.monotonic(), **changes)
        self._changed(self.status)


class RayInstances:
    """All of them. Made by `placing`."""

    def __init__(self, instances: list[RayInstance]) -> None:
        self._instances = instances
        self._looked = asyncio.Event()
        self._watching = asyncio.create_task(self._watch())

    @property
    def statuses(self) -> tuple[Status, ...]:
        """Every instance, in the order of the file."""
        return tuple(each.status for each in self._instances)

    async def started(self, within_s: float) -> tuple[str, ...]:
        """Wait for all that Ray has found nodes for, one of each role at least; the names of those that are ready then.

        Those that take longer than `within_s` are left to start while the others serve. Raises Unavailable where a role
        has none.
        """
        give_up = time.monotonic() + within_s
        await self._looked.wait()
        while time.monotonic() < give_up:
            placed = [each for each in self._instances if each.placed]
            roles = {each.role for each in placed}
            if roles == {each.role for each in self._instances} and all(e.status.state is State.READY for e in placed):
                return tuple(each.status.name for each in placed)
            await asyncio.sleep(LOOK_S)
        ready = [each for each in self._instances if each.status.state is State.READY]
        if {each.role for each in ready} == {each.role for each in self._instances}:
            return tuple(each.status.name for each in ready)
        late = [f"{s.name}: {s.state.value} {s.note or s.fault}" for s in self.statuses if s.state is not State.READY]
        raise Unavailable(f"not ready on Ray after {within_s:g} s:\n" + "\n".join(late))

    def node_of(self, name: str) -> str:
        """The id of the Ray node that an instance is on. Raises NotFound."""
        for each in self._instances:
            if each.status.name == name and each.node:
                return each.node
        raise NotFound(f"{name!r} is on no node")

    async def kept(self) -> None:
        """Never ends, but with the error that ended the care for them."""
        await asyncio.shield(self._watching)

    async def close(self) -> None:
        """Stop them all."""
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await asyncio.gather(*(each.stop() for each in self._instances))

    async def _watch(self) -> None:
        while True:
            await asyncio.gather(*(each.look() for each in self._instances))
            self._looked.set()
            await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def placing(
    wanted: Sequence[tuple[WorkerSettings, Mapping[str, str], Needs]], changed: Changed
) -> AsyncIterator[RayInstances]:
    """Run these on Ray for the block's length: settings of each but where it listens, further variables, its needs."""
    instances = RayInstances([RayInstance(settings, env, needs, changed) for settings, env, needs in wanted])
    try:
        yield instances
    finally:
        await instances.close()


def _future(reference: Any) -> asyncio.Future[Any]:
    return asyncio.wrap_future(reference.future())
