"""A suite whose control plane runs on this host and whose instances run on Ray: the Ray cluster, the resources that an
instance requests, and an actor in a placement group for each.

The module imports Ray; call `stay_local` first where Ray is to listen on loopback only.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from services.launcher.child_process import STOP_S
from services.launcher.cluster_file import Cluster
from services.launcher.cluster_keys import curve_pair
from services.launcher.cluster_sections import InstanceSection
from services.launcher.devices import VISIBLE
from services.launcher.health import HttpHealth
from services.launcher.on_ray.actor import InstanceActor
from services.launcher.spec import Plan, ProcessSpec
from services.launcher.supervisor import Changed, State, Status
from services.worker.settings import WorkerSettings
from shared.cost.catalogue import Catalogue
from shared.errors import InvalidRequest, NotFound, PolyphaseError, Unavailable
from shared.model.source import Download

LOOPBACK = "127.0.0.1"
CONNECT_S = 5.0
POLL_S = 0.5  # between two checks of all instances
TOKEN = "POLYPHASE_WORKER_CLUSTER_TOKEN"
_HUB = ("HF_TOKEN", "HF_ENDPOINT")
_CHECK_S = 2.0
_HEAD = "ray"  # the name of the control plane's host
_LOST = (ray.exceptions.RayActorError, ray.exceptions.ActorUnavailableError)
_ANY = 0.001  # of a node's `accelerator_type:…`, which states a type and is not used up
_DEVICE = {"Huawei": "NPU"}  # Ray's resource for one accelerator, by vendor; else GPU
# Ray's accelerator types by a word of the catalogue's name. Ray distinguishes only these; others need `resources`.
_TYPES = {
    **{name: name for name in ("T4", "V100", "A10G", "A100", "L4", "L40S", "H100", "H200", "H20", "B200", "B300")},
    "PRO": "RTX-PRO-6000",
    "MI210": "AMD-Instinct-MI210",
    "MI300X": "AMD-Instinct-MI300X-OAM",
    "MI325X": "AMD-Instinct-MI325X-OAM",
    "910B": "Ascend910B",
    "910B4": "Ascend910B4",
}
RunOnRay = Callable[[Changed], "AbstractAsyncContextManager[RayInstances]"]


@contextmanager
def on_ray(cluster: Cluster, address: str) -> Iterator[Cluster]:
    """The cluster file as it is to be planned, while this process is connected to Ray.

    Raises InvalidRequest, Unavailable.
    """
    with connected(address) as here:
        yield placed_at(cluster, here)


def divide(cluster: Cluster, plan: Plan) -> tuple[Plan, RunOnRay]:
    """The plan without instances, and what runs those on Ray. Raises InvalidRequest for needs that Ray cannot meet."""
    others: list[ProcessSpec] = []
    instances: list[tuple[WorkerSettings, InstanceSection, Needs]] = []
    for spec in plan.processes:
        settings = spec.settings
        if not isinstance(settings, WorkerSettings):
            others.append(spec)
            continue
        entry = next(each for each in cluster.instances if spec.name in each.ids)
        instances.append((settings, entry, needs_of(entry, settings, cluster.instances)))

    def running(changed: Changed) -> AbstractAsyncContextManager[RayInstances]:
        # The token's file exists by now; other nodes lack it, so the token travels in the environment.
        wanted = [
            (
                settings.model_copy(update={"cluster_token_file": None}),
                {**hub_environment(), **entry.env, TOKEN: settings.token()},
                needs,
            )
            for settings, entry, needs in instances
        ]
        return placing(wanted, changed)

    return replace(plan, processes=tuple(others)), running


def hub_environment() -> dict[str, str]:
    """The variables of this process by which an instance on another node reaches the Hugging Face hub as it does."""
    return {name: os.environ[name] for name in _HUB if os.environ.get(name)}


@contextmanager
def connected(address: str) -> Iterator[str]:
    """Connect to a Ray cluster within the block; yields the address of this host there. Raises Unavailable.

    address: HOST:PORT of the head; `auto`: a cluster on this machine; empty: a new cluster of this machine alone.
    """
    if address not in ("", "auto"):
        _require_answer(address)
    new = {} if address else {"include_dashboard": False}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address or "local",
            namespace=f"polyphase-{os.getpid()}",
            log_to_driver=False,
            configure_logging=False,
            **new,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise Unavailable(f"no Ray cluster at {address or 'this machine'}: {error}") from error
    signal.signal(signal.SIGTERM, handler)  # Ray's handler would end this process immediately
    try:
        here = ray.get_runtime_context().get_node_id()
        yield next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == here)
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Raises Unavailable within seconds; Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise Unavailable(f"no Ray cluster answers at {address!r}: {error}; give HOST:PORT of its head") from error


def placed_at(cluster: Cluster, address: str) -> Cluster:
    """The cluster file with the control plane at that address, and with encryption if other hosts reach it.

    Raises InvalidRequest for a file that places instances on hosts itself.
    """
    if cluster.hosts:
        raise InvalidRequest("hosts: with --on ray Ray places the instances: leave `hosts` and `control` out")
    if cluster.predictor.beside:
        raise InvalidRequest("predictor.beside: with --on ray nothing runs beside instances: leave it out")
    for entry in cluster.instances:
        if entry.data_parallel > 1:
            at = f"instances.{entry.id}.data_parallel"
            raise InvalidRequest(f"{at}: ranks meet on one host, and Ray places each by itself: use `count`")
    if address == LOOPBACK:
        return cluster
    keys = {} if cluster.curve_public else curve_pair()
    return cluster.model_copy(update={"hosts": {_HEAD: address}, "control": _HEAD, **keys})


@dataclass(frozen=True, slots=True)
class Needs:
    """Resources of Ray by name, all on one node."""

    bundle: Mapping[str, float]

    def __str__(self) -> str:
        return ", ".join(f"{name} {amount:g}" for name, amount in self.bundle.items()) or "nothing"


def needs_of(entry: InstanceSection, settings: WorkerSettings, entries: Sequence[InstanceSection]) -> Needs:
    """The needs of one instance of `entry`; entries: all of the file.

    Raises InvalidRequest if Ray cannot distinguish the file's accelerators, or if the file chooses devices itself.
    """
    at = f"instances.{entry.id}"
    for name in VISIBLE:
        if name in entry.env:
            raise InvalidRequest(f"{at}.env.{name}: with --on ray, Ray chooses the devices: leave this variable out")
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
            f"{at}.resources: Ray cannot distinguish {named} from other accelerators: start its nodes with "
            f"`ray start --resources='{{\"{named}\": 1}}'` and write `resources: {{{named}: 1}}`"
        )
    return Needs(bundle)


def _kinds(entries: Iterable[InstanceSection]) -> set[object]:
    return {entry.extra.get("accelerator", "cpu") for entry in entries if entry.extra.get("engine") != "emulated"}


def _device(accelerator: str) -> tuple[str, str]:
    """Ray's resource for such a device, and Ray's type of it, empty if it has none."""
    try:
        vendor = Catalogue.built_in().get(accelerator).vendor
    except PolyphaseError:
        vendor = ""
    head = next((word for word in accelerator.split("-") if word in _TYPES), "")
    return _DEVICE.get(vendor, "GPU"), _TYPES.get(head, "")


class RayInstance:
    """One instance. Ray places it on a node with the needed resources, again if the instance or its node is lost."""

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
        self._pending: asyncio.Future[Any] | None = None
        self._health: HttpHealth | None = None
        self._at: tuple[str, int] | None = None  # node and process
        self._since_mono = time.monotonic()  # when it was placed or lost
        self.downloaded_mono = 0.0  # when its download of weights last went on; 0: it has not

    @property
    def placed(self) -> bool:
        return self.status.state is not State.WAITING

    @property
    def node(self) -> str:
        """The id of its present or last Ray node; empty before the first."""
        return self._at[0] if self._at else ""

    async def refresh(self) -> None:
        """Update its status from the actor and the health check."""
        about = await self._about()
        if about is None:
            return
        if about["fault"]:
            self._lost(about["fault"])
            return
        if (about["node"], about["pid"]) != self._at:
            self._arrived(about)
        if self.status.state is State.STARTING:
            self._follow_download(about["download"])
        assert self._health is not None
        fault = await self._health.check(_CHECK_S)
        if not fault and self.status.state is not State.READY:
            self._set(State.READY, took_s=time.monotonic() - self._since_mono, download=None)

    def _follow_download(self, at: tuple[int, int] | None) -> None:
        """Show how far its download of weights is, and when it last went on."""
        download = Download(*at) if at is not None else None
        if download is not None and download != self.status.download:
            self.downloaded_mono = time.monotonic()
            self.status = replace(self.status, download=download, note=f"downloads weights: {download}")
            self._changed(self.status)

    async def stop(self) -> None:
        """Stop the worker gracefully, then remove the actor and its placement group."""
        if self.status.pid:
            with suppress(TimeoutError, *_LOST):
                await asyncio.wait_for(_future(self._actor.stop.remote(STOP_S)), STOP_S + _CHECK_S)
        ray.kill(self._actor, no_restart=True)
        remove_placement_group(self._group)
        self._set(State.STOPPED, pid=0)

    async def _about(self) -> dict[str, Any] | None:
        """The actor's description of itself; None while there is no actor."""
        self._pending = self._pending or _future(self._actor.about.remote())
        await asyncio.wait([self._pending], timeout=POLL_S)
        if not self._pending.done():
            self._absent()
            return None
        answer, self._pending = self._pending, None
        try:
            about: dict[str, Any] = answer.result()
        except _LOST as error:
            self._lost(str(error).strip().splitlines()[0])
            return None
        return about

    def _absent(self) -> None:
        if self.status.state in (State.READY, State.STARTING) and self._at:
            return  # the actor is busy; if it is lost, the pending call fails
        group = placement_group_table(self._group).get("state", "")
        if group == "CREATED":
            if self.status.state is State.WAITING:
                self._since_mono = time.monotonic()
                self._set(State.STARTING, note="")
        elif self.status.state is not State.WAITING or not self.status.note:
            self._set(State.WAITING, note=f"for a node with {self._needs} free")

    def _arrived(self, about: dict[str, Any]) -> None:
        again = 0 if self._at is None else 1
        self._at = (about["node"], about["pid"])
        self._health = HttpHealth(f"{about['url']}/health")
        restarts = self.status.restarts + again
        note = f"on {about['host']}, Ray node {about['node'][:8]}"
        self._set(State.STARTING, pid=about["pid"], restarts=restarts, log=Path(about["log"]), note=note)

    def _lost(self, why: str) -> None:
        if self.status.state not in (State.RESTARTING, State.WAITING):
            self._since_mono = time.monotonic()
            self._set(State.RESTARTING, pid=0, note="Ray restarts it", fault=why)

    def _set(self, state: State, **changes: Any) -> None:
        self.status = replace(self.status, state=state, since_mono=time.monotonic(), **changes)
        self._changed(self.status)


class RayInstances:
    """All instances of the suite. Created by `placing`."""

    def __init__(self, instances: list[RayInstance]) -> None:
        self._instances = instances
        self._refreshed = asyncio.Event()
        self._watching = asyncio.create_task(self._watch())

    @property
    def statuses(self) -> tuple[Status, ...]:
        return tuple(each.status for each in self._instances)

    async def started(self, within_s: float) -> tuple[str, ...]:
        """Wait until all placed instances are ready, at least one of each role; returns the names of ready ones.

        Instances that take longer than `within_s`, counted anew while weights are downloaded, go on starting while the
        others serve. Raises Unavailable if a role has no ready instance by then.
        """
        began_mono = time.monotonic()
        await self._refreshed.wait()
        while time.monotonic() < within_s + max([began_mono, *(each.downloaded_mono for each in self._instances)]):
            if self._all_ready([each for each in self._instances if each.placed]):
                break
            await asyncio.sleep(POLL_S)
        ready = [each for each in self._instances if each.status.state is State.READY]
        if self._all_ready(ready):
            return tuple(each.status.name for each in ready)
        late = [f"{s.name}: {s.state.value} {s.note or s.fault}" for s in self.statuses if s.state is not State.READY]
        raise Unavailable(f"not ready on Ray after {within_s:g} s:\n" + "\n".join(late))

    def _all_ready(self, instances: Sequence[RayInstance]) -> bool:
        """Whether these instances are ready and have all roles of the suite."""
        roles = {each.role for each in instances if each.status.state is State.READY}
        return roles == {each.role for each in self._instances} and all(
            each.status.state is State.READY for each in instances
        )

    def node_of(self, name: str) -> str:
        """The id of an instance's Ray node. Raises NotFound."""
        for each in self._instances:
            if each.status.name == name and each.node:
                return each.node
        raise NotFound(f"instance {name!r} is not placed on a node")

    async def kept(self) -> None:
        """Run until an error ends the supervision of the instances."""
        await asyncio.shield(self._watching)

    async def close(self) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await asyncio.gather(*(each.stop() for each in self._instances))

    async def _watch(self) -> None:
        while True:
            await asyncio.gather(*(each.refresh() for each in self._instances))
            self._refreshed.set()
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def placing(
    wanted: Sequence[tuple[WorkerSettings, Mapping[str, str], Needs]], changed: Changed
) -> AsyncIterator[RayInstances]:
    """Run instances on Ray within the block. wanted: for each its settings without host and ports, variables, needs."""
    instances = RayInstances([RayInstance(settings, env, needs, changed) for settings, env, needs in wanted])
    try:
        yield instances
    finally:
        await instances.close()


def _future(reference: Any) -> asyncio.Future[Any]:
    return asyncio.wrap_future(reference.future())
