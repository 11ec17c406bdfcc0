"""A running suite under test: the handle that scenarios get."""

import asyncio
import os
import resource
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import yaml
from rich.console import Console

from lab.chaos.clusters import Testbed, second_gateway_port, secret_of
from lab.chaos.inject.sitecustomize import LOOP_TIME, LOST, READ_ONLY, SWITCHES
from lab.chaos.load import Address, Ask, Load, Right, learn, palette
from lab.chaos.proxy import Port, Wires, ports_of, service_of, wired
from lab.demo.client import ApiClient, Prompts
from services.launcher import cluster_keys, state_file
from services.launcher.child_process import Child, Limits, spawn, stop_all
from services.launcher.cluster_file import Cluster
from services.launcher.plan import make_plan
from services.launcher.ports import PortUse
from services.launcher.spec import Plan, ProcessSpec
from services.launcher.suite import Suite, until
from services.launcher.supervisor import State, Status, Supervisor, supervising
from shared.domain.instance import InstanceState, Role
from shared.errors import PolyphaseError
from shared.runtime.keys import digest_of

# MERGED verbs.py
# What can be done to a running suite; every verb can be undone, and `restore` undoes what is left.


BACK_S = 30.0  # the longest that a scenario waits for something to come back


class Processes:
    """Signals to the processes of a suite, by their names in the plan."""

    def __init__(self, suite: Suite, supervisor: Supervisor) -> None:
        self._suite = suite
        self._supervisor = supervisor
        self._frozen: dict[str, int] = {}
        self.touched: set[str] = set()  # who got a signal since this was last cleared

    @property
    def statuses(self) -> dict[str, Status]:
        """As the launcher sees them."""
        return {status.name: status for status in self._supervisor.statuses}

    def kill(self, *names: str) -> dict[str, int]:
        """SIGKILL; the pids they had. Those that are not running are left out."""
        return self._signal(signal.SIGKILL, names)

    def stop(self, *names: str) -> dict[str, int]:
        """SIGTERM: they end in their own time, and the launcher starts them again."""
        return self._signal(signal.SIGTERM, names)

    def freeze(self, *names: str) -> None:
        """SIGSTOP: alive, and not a sign of it."""
        self._frozen |= self._signal(signal.SIGSTOP, names)

    def thaw(self, *names: str) -> None:
        """SIGCONT to those that are frozen; all of them when none is named. Of two freezes the first thaw ends both."""
        for name in names or tuple(self._frozen):
            if pid := self._frozen.pop(name, 0):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    async def back(self, old: dict[str, int], timeout_s: float = BACK_S) -> None:
        """Wait until the launcher calls each ready under another pid. Raises DeadlineExceeded."""

        def again() -> bool:
            now = self.statuses
            return all(now[name].state is State.READY and now[name].pid not in (0, old[name]) for name in old)

        await until(again, timeout_s, f"{', '.join(old)} to be back")

    def _signal(self, number: signal.Signals, names: Sequence[str]) -> dict[str, int]:
        sent = {}
        self.touched |= set(names)
        for name in names:
            pid = self.statuses[name].pid
            with suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, number)
                    sent[name] = pid
        return sent


class Roles:
    """Drains, resumes and flips, by way of the monitor; and the roles that instances began with."""

    def __init__(self, suite: Suite, first: dict[str, Role]) -> None:
        self._suite = suite
        self.first = first

    def of(self, role: Role) -> tuple[str, ...]:
        """The instances that began in that role."""
        return tuple(name for name, first in self.first.items() if first is role)

    async def drain(self, instance: str, timeout_s: float = 10.0, **more: Any) -> None:
        """Raises what the monitor answers."""
        async with self._suite.monitor() as monitor:
            await monitor.drain(instance, timeout_s=timeout_s, who="chaos", **more)

    async def resume(self, instance: str) -> None:
        """Raises what the monitor answers."""
        async with self._suite.monitor() as monitor:
            await monitor.resume(instance, who="chaos")

    async def flip(self, instance: str, *, force: bool = False, timeout_s: float = 10.0) -> None:
        """Raises what the monitor answers."""
        async with self._suite.monitor() as monitor:
            await monitor.flip(instance, force=force, drain_timeout_s=timeout_s, who="chaos")

    async def ready(self, *names: str, timeout_s: float = BACK_S) -> None:
        """Wait until the monitor calls these ready. Raises DeadlineExceeded."""

        async def all_ready() -> bool:
            found = await self._suite.instances()
            return all(found.get(name, {}).get("state") == InstanceState.READY.value for name in names)

        await until(all_ready, timeout_s, f"{', '.join(names)} to be ready")

    async def as_first(self, timeout_s: float = BACK_S) -> None:
        """Ask until every instance is ready in its first role; whoever was drained or flipped goes back."""

        async def back() -> bool:
            found = await self._suite.instances()
            wrong = [name for name in self.first if not self._settled(found.get(name))]
            for name in wrong:
                with suppress(PolyphaseError):
                    await self._put_back(name, found.get(name))
            return not wrong

        await until(back, timeout_s, "every instance in its first role", poll_s=0.2)

    def _settled(self, entry: dict[str, Any] | None) -> bool:
        if entry is None:
            return False
        first = self.first[entry["instance_id"]].value
        return bool(entry["state"] == InstanceState.READY.value and entry["role"] == first)

    async def _put_back(self, name: str, entry: dict[str, Any] | None) -> None:
        if entry is None or entry["operation"] or entry["state"] in (InstanceState.DEAD, InstanceState.UNRESPONSIVE):
            return
        if entry["role"] != self.first[name].value:
            await self.flip(name, force=True)
        elif entry["state"] == InstanceState.DRAINING.value:
            await self.resume(name)


class Switches:
    """The clock and the database of each process, as `inject/sitecustomize.py` bends them."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {name: folder / name for name in names}
        self._now = dict.fromkeys(self._files, (0.0, 0))
        self.restore()

    def file(self, name: str) -> Path:
        """The value of CHAOS_SWITCHES of that process."""
        return self._files[name]

    def clock(self, offset_s: float, *names: str) -> None:
        """Their clocks jump to so much off the real time."""
        for name in names:
            self._set(name, offset_s, self._now[name][1])

    def read_only(self, *names: str) -> None:
        """SQLite refuses their writes."""
        for name in names:
            self._set(name, self._now[name][0], READ_ONLY)

    def lose_answers(self, *names: str) -> None:
        """SQLite carries out what they change of leases, and they do not learn of it."""
        for name in names:
            self._set(name, self._now[name][0], LOST)

    def writable(self, *names: str) -> None:
        """SQLite takes their writes again, and answers."""
        for name in names:
            self._set(name, self._now[name][0], 0)

    def restore(self) -> None:
        """All clocks right, all databases writable."""
        for name in self._files:
            self._set(name, 0.0, 0)

    def _set(self, name: str, offset_s: float, read_only: int) -> None:
        self._now[name] = (offset_s, read_only)
        with self._files[name].open("r+b" if self._files[name].exists() else "wb") as file:
            file.write(SWITCHES.pack(offset_s, read_only))


class LoopTimes:
    """The longest turn of the gateway's event loop, as `inject/sitecustomize.py` times it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.reset()

    def reset(self) -> None:
        """Forget what was."""
        with self.file.open("r+b" if self.file.exists() else "wb") as file:
            file.write(LOOP_TIME.pack(0.0))

    @property
    def longest_s(self) -> float:
        """CPU seconds since the last reset; at most LOOP_BEAT_S too much."""
        longest_s: float = LOOP_TIME.unpack(self.file.read_bytes())[0]
        return longest_s


class Database:
    """Faults of the suite's SQLite file."""

    def __init__(self, file: Path, processes: Processes, users: tuple[str, ...]) -> None:
        self.file = file
        self.users = users
        self._processes = processes
        self._limited: dict[int, tuple[int, int]] = {}

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Somebody else holds the write lock for the block's length."""
        other = sqlite3.connect(self.file, isolation_level=None, timeout=0.0)
        try:
            await until(lambda: _lock(other), 10.0, "the lock of the database", poll_s=0.01)
            yield
        finally:
            other.close()

    def remove(self) -> None:
        """The file and what belongs to it are gone; who has it open keeps what nobody else sees."""
        for file in self.file.parent.glob(f"{self.file.name}*"):
            file.unlink(missing_ok=True)

    def fill_disk(self) -> None:
        """No file of its users grows any more: not the database, not their logs. The kernel refuses the writes."""
        for name in self.users:
            pid = self._processes.statuses[name].pid
            if pid:
                self._limited[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, self._limited[pid][1]))

    def restore(self) -> None:
        """The disk has room again."""
        for pid, limits in self._limited.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        self._limited.clear()


def _lock(connection: sqlite3.Connection) -> bool:
    try:
        connection.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError:  # somebody writes just now
        return False
    return True


class Strangers:
    """Processes that are not of the plan: instances that want to join."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[Child] = []

    async def start(self, name: str, program: tuple[str, ...], env: dict[str, str]) -> Child:
        """One more process; it ends with the scenario."""
        child = await spawn(program, env, self._logs / f"{name}.log")
        self._children.append(child)
        return child

    async def end(self) -> None:
        """All of them."""
        children, self._children = self._children, []
        await stop_all(children, 2.0)


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
        cluster_keys.keep_token(cluster, folder)
        plan = _with_gateways(make_plan(cluster, folder, where=bed.name), cluster, bed.gateways)
        run, rng = f"{os.getpid()}-{bed.name}-{time.monotonic_ns()}", Random(seed)
        switches = Switches(folder / "switches", [spec.name for spec in plan.processes])
        if bed.host_key:
            cluster_keys.keep_curve_key(cluster, folder)
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
