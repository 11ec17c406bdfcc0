"""A suite whose control plane runs on this host and whose instances run on Ray."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from services.launcher.child_process import STOP_S
from services.launcher.cluster_file import Cluster, InstanceSection
from services.launcher.cluster_keys import curve_pair
from services.launcher.devices import VISIBLE
from services.launcher.health import HttpHealth
from services.launcher.on_ray.actor import InstanceActor
from services.launcher.spec import Plan, ProcessSpec
from services.launcher.supervisor import Changed, Elsewhere, Running, State, Status
from services.worker.settings import WorkerSettings
from shared.cost.catalogue import Catalogue
from shared.errors import InvalidRequest, NotFound, PolyphaseError, Unavailable

# MERGED connection.py
# The Ray cluster that the instances run on: one that is there, or one on this machine.


LOOPBACK = "127.0.0.1"
CONNECT_S = 5.0
_HEAD = "ray"  # the name of the control plane's host


@contextmanager
def connected(address: str) -> Iterator[str]:
    """The address of this host in that Ray cluster, for the block's length. Raises Unavailable.

    address: of its head, HOST:PORT; `auto`: one that runs on this machine; empty: a new one, of this machine alone.
    """
    if address not in ("", "auto"):
        _answers(address)
    here = {} if address else {"include_dashboard": False}
    ours = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address or "local",
            namespace=f"polyphase-{os.getpid()}",
            log_to_driver=False,
            configure_logging=False,
            **here,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise Unavailable(f"no Ray cluster at {address or 'this machine'}: {error}") from error
    signal.signal(signal.SIGTERM, ours)  # Ray's own would end this process at once
    try:
        yield _address_here()
    finally:
        ray.shutdown()


def _answers(address: str) -> None:
    """Raises Unavailable: Ray itself goes on trying for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise Unavailable(f"no Ray cluster answers at {address!r}: {error}; HOST:PORT of its head is wanted") from error


def placed_at(cluster: Cluster, address: str) -> Cluster:
    """The file, with the control plane at that address: encrypted where others reach it.

    Raises InvalidRequest for a file that places instances on hosts itself.
    """
    if cluster.hosts:
        raise InvalidRequest("hosts: with --on ray Ray places the instances: leave `hosts` and `control` out")
    if cluster.predictor.beside:
        raise InvalidRequest("predictor.beside: with --on ray nothing runs beside instances: leave it out")
    if address == LOOPBACK:
        return cluster
    keys = {} if cluster.curve_public else curve_pair()
    return cluster.model_copy(update={"hosts": {_HEAD: address}, "control": _HEAD, **keys})


def _address_here() -> str:
    here = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == here)


# MERGED needs.py
# What an instance asks of the Ray node that it is to run on.


_ANY = 0.001  # of a node's `accelerator_type:…`: it says what is there, and is never used up
_DEVICE = {"Huawei": "NPU"}  # what Ray calls one accelerator, by vendor; else GPU
# The catalogue's names → what Ray calls the type. It tells only these apart; others need `resources`.
_TYPES = {
    "T4": "T4",
    "V100": "V100",
    "A10G": "A10G",
    "A100": "A100",
    "L4": "L4",
    "L40S": "L40S",
    "H100": "H100",
    "H200": "H200",
    "H20": "H20",
    "B200": "B200",
    "B300": "B300",
    "PRO": "RTX-PRO-6000",
    "MI210": "AMD-Instinct-MI210",
    "MI300X": "AMD-Instinct-MI300X-OAM",
    "MI325X": "AMD-Instinct-MI325X-OAM",
    "910B": "Ascend910B",
    "910B4": "Ascend910B4",
}


@dataclass(frozen=True, slots=True)
class Needs:
    """Ray's resources by name, all on one node."""

    bundle: Mapping[str, float]

    def __str__(self) -> str:
        return ", ".join(f"{name} {amount:g}" for name, amount in self.bundle.items()) or "nothing"


def needs_of(entry: InstanceSection, settings: WorkerSettings, entries: Sequence[InstanceSection]) -> Needs:
    """Of one instance of `entry`, one of the file's `entries`.

    Raises InvalidRequest where Ray could not tell the file's accelerators apart, and where the file chooses devices
    itself.
    """
    at = f"instances.{entry.id}"
    for name in VISIBLE:
        if name in entry.env:
            raise InvalidRequest(f"{at}.env.{name}: Ray chooses the devices: leave it out, or run without --on ray")
    if settings.engine == "emulated":
        return Needs(entry.resources)
    if settings.accelerator == "cpu":
        return Needs({"CPU": float(settings.threads * settings.ranks), **entry.resources})
    device, kind = _device(settings.accelerator)
    bundle = {"CPU": 1.0, device: float(settings.ranks), **entry.resources}
    if not entry.resources and kind:
        bundle[f"accelerator_type:{kind}"] = _ANY
    elif not entry.resources and len(_kinds(entries)) > 1:
        named = settings.accelerator
        raise InvalidRequest(
            f"{at}.resources: Ray does not tell {named} from other accelerators: start its nodes with "
            f"`ray start --resources='{{\"{named}\": 1}}'` and write `resources: {{{named}: 1}}`"
        )
    return Needs(bundle)


def _kinds(entries: Iterable[InstanceSection]) -> set[object]:
    return {entry.extra.get("accelerator", "cpu") for entry in entries if entry.extra.get("engine") != "emulated"}


def _device(accelerator: str) -> tuple[str, str]:
    """What Ray calls a device of that kind, and its type, empty where Ray has none."""
    try:
        vendor = Catalogue.built_in().get(accelerator).vendor
    except PolyphaseError:
        vendor = ""
    head = next((word for word in accelerator.split("-") if word in _TYPES), "")
    return _DEVICE.get(vendor, "GPU"), _TYPES.get(head, "")


# MERGED instances.py
# The driver's side: an actor in a placement group for each instance, and what is known of each.


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


TOKEN = "POLYPHASE_WORKER_CLUSTER_TOKEN"


@contextmanager
def on_ray(cluster: Cluster, address: str) -> Iterator[Cluster]:
    """The file as it is to be planned, while this process is connected to Ray. Raises InvalidRequest, Unavailable."""
    with connected(address) as here:
        yield placed_at(cluster, here)


def divide(cluster: Cluster, plan: Plan) -> tuple[Plan, Running]:
    """The plan without the instances, and who runs those. Raises InvalidRequest for needs that Ray cannot meet."""
    specs = [spec for spec in plan.processes if isinstance(spec.settings, WorkerSettings)]
    needs = {spec.name: _needs(cluster, spec) for spec in specs}

    @asynccontextmanager
    async def running(changed: Changed) -> AsyncIterator[Elsewhere]:
        async with placing([(*_settled(cluster, spec), needs[spec.name]) for spec in specs], changed) as instances:
            yield instances

    return replace(plan, processes=tuple(spec for spec in plan.processes if spec not in specs)), running


def _needs(cluster: Cluster, spec: ProcessSpec) -> Needs:
    assert isinstance(spec.settings, WorkerSettings)
    return needs_of(_entry(cluster, spec), spec.settings, cluster.instances)


def _settled(cluster: Cluster, spec: ProcessSpec) -> tuple[WorkerSettings, dict[str, str]]:
    """Settings and further variables of a process on another node, which lacks the files of this one."""
    assert isinstance(spec.settings, WorkerSettings)
    settings = spec.settings.model_copy(update={"cluster_token_file": None})
    return settings, {**_entry(cluster, spec).env, TOKEN: spec.settings.token()}


def _entry(cluster: Cluster, spec: ProcessSpec) -> InstanceSection:
    return next(each for each in cluster.instances if spec.name in each.ids)
