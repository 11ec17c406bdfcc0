"""A running suite under test: the handle that scenarios get."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import yaml
from rich.console import Console

from lab.chaos.client import Ask
from lab.chaos.clusters import Testbed, second_gateway_port, secret_of
from lab.chaos.judge import Right
from lab.chaos.load import Address, Load, learn, palette
from lab.chaos.verbs import Database, LoopTimes, Processes, Roles, Strangers, Switches
from lab.chaos.wires import Port, Wires, ports_of, service_of, wired
from lab.demo.client import ApiClient
from lab.demo.prompts import Prompts
from services.launcher import cluster_token, host_key, state_file
from services.launcher.cluster_file import Cluster
from services.launcher.keeper import Status
from services.launcher.plan import make_plan
from services.launcher.ports import PortUse
from services.launcher.spec import Plan, ProcessSpec
from services.launcher.suite import Suite
from services.launcher.supervisor import Supervisor, supervising
from services.launcher.watch import Limits
from shared.domain.instance import Role
from shared.runtime.keys import digest_of

INJECT = Path(__file__).parent / "inject"
RUN = "CHAOS_RUN"  # names, in the environment of every process, the run that it belongs to
START_S = 120.0
# A bench kills in minutes what lives for weeks: a process counts as stable soon, so that one scenario's restarts do not
# lengthen the pause before the next one's.
LIMITS = Limits(stable_s=3.0)
_BEATS = 0.02


@dataclass(slots=True)
class Arena:
    """What a scenario may use."""

    bed: Testbed
    plan: Plan
    suite: Suite
    processes: Processes
    roles: Roles
    wires: Wires
    ports: tuple[Port, ...]
    switches: Switches
    database: Database
    strangers: Strangers
    loop_times: LoopTimes
    gateways: tuple[Address, ...]
    run: str
    rng: Random
    asks: tuple[Ask, ...] = ()
    right: dict[str, Right] = field(default_factory=dict)
    load: Load | None = None
    notes: list[str] = field(default_factory=list)  # what a scenario has to tell
    away_s: float = 0.0  # what the scenario took away from its clients

    def named(self, service: str) -> tuple[str, ...]:
        """The processes of a service: "gateway", "scheduler", "monitor", "predictor", "worker"."""
        return tuple(spec.name for spec in self.plan.processes if service_of(spec) == service)

    @property
    def prefill(self) -> tuple[str, ...]:
        """The instances that began as prefill instances."""
        return self.roles.of(Role.PREFILL)

    @property
    def decode(self) -> tuple[str, ...]:
        """The instances that began as decode instances."""
        return self.roles.of(Role.DECODE)

    def spec(self, name: str) -> ProcessSpec:
        """How a process of the plan is started."""
        return next(spec for spec in self.plan.processes if spec.name == name)

    @contextmanager
    def away(self, more_s: float = 0.0) -> Iterator[None]:
        """For the block's length, and `more_s`, something is missing that clients cannot do without."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.away_s = max(self.away_s, time.monotonic() - began + more_s)

    def users(self, seed: int) -> Load:
        """The testbed's load."""
        return Load(self.gateways, self.asks, self.right, self.bed.users, seed)

    async def restore(self) -> None:
        """Undo what a scenario left undone. Whatever died comes back by itself or not at all."""
        self.processes.thaw()
        self.wires.heal()
        self.switches.restore()
        self.database.restore()
        await self.strangers.end()


@asynccontextmanager
async def running_arena(bed: Testbed, folder: Path, console: Console, seed: int) -> AsyncIterator[Arena]:
    """The testbed, started, its right answers known. Raises StartFailed or Unavailable."""
    async with started_arena(bed, folder, console, seed) as arena:
        api_key = secret_of(bed.api_keys[0] if bed.api_keys else "")
        asks = palette(await _prompts(arena.plan, bed, api_key), bed.answer_tokens)
        arena.asks = tuple(replace(ask, api_key=api_key) for ask in asks)
        arena.right = await learn(arena.gateways[0], arena.asks)
        yield arena


@asynccontextmanager
async def started_arena(
    bed: Testbed, folder: Path, console: Console, seed: int, limits: Limits = LIMITS
) -> AsyncIterator[Arena]:
    """The testbed, all of it ready, and not asked anything yet. Raises StartFailed."""
    async with AsyncExitStack() as stack:
        cluster = bed.build()
        folder = folder.resolve()
        cluster_token.keep(cluster, folder)
        plan = _with_gateways(make_plan(cluster, folder, where=bed.name), cluster, bed.gateways)
        run, rng = f"{os.getpid()}-{bed.name}-{time.monotonic_ns()}", Random(seed)
        switches = Switches(folder / "switches", [spec.name for spec in plan.processes])
        if bed.host_key:
            host_key.keep(cluster, folder)
        else:
            plan = _without_key(plan)
        loop_times = LoopTimes(folder / "loop-times")
        plan = _injected(_with_keys(plan, bed.api_keys, folder / "keys.yaml"), switches, run)
        plan = _timed(plan, loop_times) if bed.timed else plan
        plan, wires = await stack.enter_async_context(wired(plan, rng, bed.proxied))
        here = _without(plan, bed.absent)
        logs, began = folder / "logs", time.monotonic()
        supervising_them = supervising(here.processes, logs, _ignore, limits, plan.fork_env, plan.preload)
        supervisor = await stack.enter_async_context(supervising_them)
        suite = Suite(folder, lambda: state_file.describe(here, supervisor.statuses))
        with console.status(f"starting {bed.name}: {bed.title}"):
            await supervisor.started()
            await supervisor.during(suite.wait_ready(here.instance_ids, START_S))
        arena = _arena(bed, cluster, plan, suite, supervisor, wires, switches, loop_times, run, rng, folder)
        console.print(f"[dim]{bed.title}: ready after {time.monotonic() - began:.0f} s[/]")
        stack.push_async_callback(arena.restore)
        yield arena


def _arena(
    bed: Testbed,
    cluster: Cluster,
    plan: Plan,
    suite: Suite,
    supervisor: Supervisor,
    wires: Wires,
    switches: Switches,
    loop_times: LoopTimes,
    run: str,
    rng: Random,
    folder: Path,
) -> Arena:
    processes = Processes(suite, supervisor)
    first = {name: entry.role for entry in cluster.instances for name in entry.ids}
    writers = tuple(s.name for s in plan.processes if service_of(s) in ("monitor", "scheduler"))
    ports = ports_of(plan)
    return Arena(
        bed=bed,
        plan=plan,
        suite=suite,
        processes=processes,
        roles=Roles(suite, first),
        wires=wires,
        ports=ports,
        switches=switches,
        database=Database(folder / "polyphase.db", processes, writers),
        strangers=Strangers(folder / "logs"),
        loop_times=loop_times,
        run=run,
        rng=rng,
        gateways=tuple((port.host, port.port) for port in ports if port.service == "gateway"),
    )


async def _prompts(plan: Plan, bed: Testbed, api_key: str) -> dict[int, list[int]]:
    async with ApiClient(plan.api_url, plan.model, api_key) as api:
        prompts = await Prompts.of(api)
    return {length: prompts.of_length(length, seed=length) for length in bed.prompts}


def _with_gateways(plan: Plan, cluster: Cluster, count: int) -> Plan:
    """The plan with a second gateway beside the first, where one is wanted: the cluster file knows one a host."""
    if count == 1:
        return plan
    first = next(spec for spec in plan.processes if service_of(spec) == "gateway")
    old, port = str(cluster.gateway.port), second_gateway_port(cluster)
    second = replace(
        first,
        name="gateway-1",
        health_url=first.health_url.replace(old, str(port)),
        env={**first.env, "POLYPHASE_GATEWAY_PORT": str(port), "POLYPHASE_GATEWAY_GATEWAY_ID": "gateway-1"},
        ports=(PortUse("gateway-1", first.ports[0].host, port),),
    )
    at = plan.processes.index(first) + 1
    return replace(plan, processes=(*plan.processes[:at], second, *plan.processes[at:]))


def _without(plan: Plan, absent: frozenset[str]) -> Plan:
    return replace(
        plan,
        processes=tuple(spec for spec in plan.processes if spec.name not in absent),
        instance_ids=tuple(name for name in plan.instance_ids if name not in absent),
    )


def _without_key(plan: Plan) -> Plan:
    specs = []
    for spec in plan.processes:
        env = {name: value for name, value in spec.env.items() if not name.endswith("_CURVE_FILE")}
        settings = spec.settings and spec.settings.model_copy(update={"curve_file": None})
        specs.append(replace(spec, env=env, settings=settings))
    return replace(plan, processes=tuple(specs))


def _with_keys(plan: Plan, names: tuple[str, ...], file: Path) -> Plan:
    """The plan whose gateways take these API keys; as it is without any."""
    if not names:
        return plan
    file.write_text(yaml.safe_dump([{"name": name, "digest": digest_of(secret_of(name))} for name in names]))
    return _for_gateways(plan, {"POLYPHASE_GATEWAY_API_KEYS_FILE": str(file)})


def _timed(plan: Plan, loop_times: LoopTimes) -> Plan:
    return _for_gateways(plan, {"CHAOS_LOOP_TIMES": str(loop_times.file)})


def _for_gateways(plan: Plan, more: dict[str, str]) -> Plan:
    return replace(
        plan,
        processes=tuple(
            replace(spec, env={**spec.env, **more}) if service_of(spec) == "gateway" else spec
            for spec in plan.processes
        ),
    )


def _injected(plan: Plan, switches: Switches, run: str) -> Plan:
    specs = []
    for spec in plan.processes:
        path = os.pathsep.join(part for part in (str(INJECT), spec.env.get("PYTHONPATH", "")) if part)
        more = {"PYTHONPATH": path, "CHAOS_SWITCHES": str(switches.file(spec.name)), RUN: run}
        specs.append(replace(spec, env={**spec.env, **more}))
    return replace(plan, processes=tuple(specs))


def _ignore(_: Status) -> None:
    """Nobody watches single changes."""


class StallWatch:
    """How long this very process was kept from running: what the machine takes away is no fault of the suite."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "StallWatch":
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(_BEATS)
            self.longest_s = max(self.longest_s, time.monotonic() - began - _BEATS)
