"""A running suite under test: the handle that scenarios get, and the faults that can be injected into it.

Every fault can be undone; `SuiteUnderTest.restore` undoes the faults that are left. Relies on
`inject/sitecustomize.py`, which the processes of the suite import, and on the proxies of `proxy`.
"""

import os
import resource
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import yaml
from rich.console import Console

from benchmarks.chaos.inject.sitecustomize import LOOP_TIME, LOST, READ_ONLY, SWITCHES
from benchmarks.chaos.load import Load, RightAnswer, learn, request_kinds
from benchmarks.chaos.proxy import Port, Wires, ports_of, service_of, wired
from benchmarks.chaos.testbeds import Testbed, secret_of
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
from shared.wire.api.monitor import InstanceRow
from tools.client import Address, ApiClient, Prompts, Request

INJECT = Path(__file__).parent / "inject"
RUN = "CHAOS_RUN"  # environment variable of all processes of a run; its value names the run
BACK_S = 30.0  # the longest time that a scenario waits for a process or an instance to come back
START_S = 120.0
_SECOND_GATEWAY = 239  # offset in the cluster's range of ports
# The bench kills often what usually runs for weeks. A process counts as stable after a short time, so that the restarts
# of one scenario do not lengthen the launcher's pause before the restarts of the next one.
LIMITS = Limits(stable_s=3.0)


class Processes:
    """Signals to the processes of a suite, by their names in the plan."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._frozen: dict[str, int] = {}
        self.touched: set[str] = set()  # processes that got a signal since this was last cleared

    @property
    def statuses(self) -> dict[str, Status]:
        """As the launcher sees them."""
        return {status.name: status for status in self._supervisor.statuses}

    def kill(self, *names: str) -> dict[str, int]:
        """SIGKILL to those that run; returns their process ids."""
        return self._signal(signal.SIGKILL, names)

    def stop(self, *names: str) -> dict[str, int]:
        """SIGTERM to those that run; returns their process ids. The launcher restarts them when they have ended."""
        return self._signal(signal.SIGTERM, names)

    def freeze(self, *names: str) -> None:
        """SIGSTOP."""
        self._frozen |= self._signal(signal.SIGSTOP, names)

    def thaw(self, *names: str) -> None:
        """SIGCONT to these, or to all frozen processes. A process that was frozen twice runs after one thaw."""
        for name in names or tuple(self._frozen):
            if pid := self._frozen.pop(name, 0):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    async def back(self, old: Mapping[str, int], timeout_s: float = BACK_S) -> None:
        """Wait until all are ready under another process id than the old one. Raises DeadlineExceeded."""

        def restarted() -> bool:
            now = self.statuses
            return all(now[name].state is State.READY and now[name].pid not in (0, old[name]) for name in old)

        await until(restarted, timeout_s, f"{', '.join(old)} to be back")

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


class Switches:
    """The clock and the database of each process, as `inject/sitecustomize.py` changes them."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.files = {name: folder / name for name in names}  # the value of CHAOS_SWITCHES for each process
        self._now = dict.fromkeys(self.files, (0.0, 0))
        self.restore()

    def clock(self, offset_s: float, *names: str) -> None:
        """The wall clocks jump to this offset from the real time."""
        for name in names:
            self._set(name, offset_s, self._now[name][1])

    def read_only(self, *names: str) -> None:
        """SQLite refuses writes of these processes."""
        self._set_database(READ_ONLY, names)

    def lose_answers(self, *names: str) -> None:
        """SQLite writes changes of leases, and these processes get an error in place of the answer."""
        self._set_database(LOST, names)

    def writable(self, *names: str) -> None:
        self._set_database(0, names)

    def restore(self) -> None:
        for name in self.files:
            self._set(name, 0.0, 0)

    def _set_database(self, mode: int, names: Sequence[str]) -> None:
        for name in names:
            self._set(name, self._now[name][0], mode)

    def _set(self, name: str, offset_s: float, database: int) -> None:
        self._now[name] = (offset_s, database)
        _overwrite(self.files[name], SWITCHES.pack(offset_s, database))


class LoopTimes:
    """The longest time that the gateway's event loop was held, as `inject/sitecustomize.py` measures it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.reset()

    def reset(self) -> None:
        _overwrite(self.file, LOOP_TIME.pack(0.0))

    @property
    def longest_s(self) -> float:
        """CPU seconds since the last reset; at most LOOP_BEAT_S too much."""
        longest_s: float = LOOP_TIME.unpack(self.file.read_bytes())[0]
        return longest_s


def _overwrite(file: Path, data: bytes) -> None:
    """Write in place: processes have the file mapped."""
    with file.open("r+b" if file.exists() else "wb") as stream:
        stream.write(data)


class Database:
    """Faults of the suite's SQLite file. `writers` are the processes that write to it."""

    def __init__(self, file: Path, processes: Processes, writers: tuple[str, ...]) -> None:
        self.file = file
        self.writers = writers
        self._processes = processes
        self._limited: dict[int, tuple[int, int]] = {}

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Hold the write lock for the block's length."""
        other = sqlite3.connect(self.file, isolation_level=None, timeout=0.0)

        def lock() -> bool:
            try:
                other.execute("BEGIN EXCLUSIVE")
            except sqlite3.OperationalError:  # another connection is writing
                return False
            return True

        try:
            await until(lock, 10.0, "the lock of the database", poll_s=0.01)
            yield
        finally:
            other.close()

    def remove(self) -> None:
        """Remove the file and its journals. Processes that have it open write to the removed file."""
        for file in self.file.parent.glob(f"{self.file.name}*"):
            file.unlink(missing_ok=True)

    def fill_disk(self) -> None:
        """No file of the writers can grow: the kernel refuses writes to the database and to their logs."""
        for name in self.writers:
            if pid := self._processes.statuses[name].pid:
                self._limited[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, self._limited[pid][1]))

    def restore(self) -> None:
        for pid, limits in self._limited.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        self._limited.clear()


class SuiteUnderTest(Suite):
    """A running suite, and what a scenario may do to it. `roles` are those that the instances began with.

    `drain`, `resume` and `flip` go through the monitor and raise what it answers.
    """

    def __init__(
        self,
        bed: Testbed,
        plan: Plan,
        supervisor: Supervisor,
        *,
        folder: Path,
        roles: dict[str, Role],
        run: str,
        rng: Random,
        wires: Wires,
        switches: Switches,
        loop_times: LoopTimes,
    ) -> None:
        started = _without(plan, bed.absent)
        super().__init__(folder, lambda: state_file.describe(started, supervisor.statuses))
        self.bed, self.plan, self.roles, self.run, self.rng = bed, plan, roles, run, rng
        self.wires, self.switches, self.loop_times = wires, switches, loop_times
        self.ports = ports_of(plan)
        self.processes = Processes(supervisor)
        self.database = Database(folder / "polyphase.db", self.processes, self.named("monitor", "scheduler"))
        self.gateways: tuple[Address, ...] = tuple(port.address for port in self.ports if port.service == "gateway")
        self.requests: tuple[Request, ...] = ()
        self.right: dict[str, RightAnswer] = {}
        self.load: Load | None = None
        self.notes: list[str] = []  # measurements of the scenario, for the report
        self.outage_s = 0.0  # the longest time for which the scenario made a service unavailable
        self._strangers: list[Child] = []

    def named(self, *services: str) -> tuple[str, ...]:
        """The processes of services: "gateway", "scheduler", "monitor", "predictor", "worker"."""
        return tuple(spec.name for of in services for spec in self.plan.processes if service_of(spec) == of)

    @property
    def prefill(self) -> tuple[str, ...]:
        """The instances that began as prefill instances."""
        return tuple(name for name, role in self.roles.items() if role is Role.PREFILL)

    @property
    def decode(self) -> tuple[str, ...]:
        """The instances that began as decode instances."""
        return tuple(name for name, role in self.roles.items() if role is Role.DECODE)

    def spec(self, name: str) -> ProcessSpec:
        return next(spec for spec in self.plan.processes if spec.name == name)

    def ports_for(self, service: str, purpose: str) -> tuple[Port, ...]:
        return tuple(port for port in self.ports if (port.service, port.purpose) == (service, purpose))

    def gateway(self, number: int) -> Address:
        """The gateway of the client with this number: clients take turns at the gateways."""
        return self.gateways[number % len(self.gateways)]

    @contextmanager
    def outage(self, more_s: float = 0.0) -> Iterator[None]:
        """For the block's length, and `more_s`, clients may have to wait: the scenario took away what serves them."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.outage_s = max(self.outage_s, time.monotonic() - began + more_s)

    def users(self, seed: int) -> Load:
        """The testbed's load."""
        return Load(self.gateways, self.requests, self.right, self.bed.users, seed)

    async def drain(self, instance: str, timeout_s: float = 10.0, **more: Any) -> None:
        async with self.monitor() as monitor:
            await monitor.drain(instance, timeout_s=timeout_s, who="chaos", **more)

    async def resume(self, instance: str) -> None:
        async with self.monitor() as monitor:
            await monitor.resume(instance, who="chaos")

    async def flip(self, instance: str, *, force: bool = False, timeout_s: float = 10.0) -> None:
        async with self.monitor() as monitor:
            await monitor.flip(instance, force=force, drain_timeout_s=timeout_s, who="chaos")

    async def until_ready(self, *names: str, timeout_s: float = BACK_S) -> None:
        """Wait until the monitor reports these as ready, by default all instances. Raises DeadlineExceeded."""
        await self.wait_ready(names or tuple(self.roles), timeout_s)

    async def kill_until_back(self, *names: str) -> None:
        """SIGKILL to these; returns when the launcher has restarted them. Raises DeadlineExceeded."""
        await self.processes.back(self.processes.kill(*names))

    async def wrong_roles(self) -> dict[str, InstanceRow | None]:
        """The instances that are not ready in their first role, with their entries at the monitor."""
        found = await self.instances()
        wanted = {name: (InstanceState.READY.value, role.value) for name, role in self.roles.items()}
        return {
            name: found.get(name)
            for name, want in wanted.items()
            if name not in found or (found[name].state, found[name].role) != want
        }

    async def reset_roles(self, timeout_s: float = BACK_S) -> None:
        """Flip and resume instances until each is ready in its first role. Raises DeadlineExceeded."""

        async def all_reset() -> bool:
            wrong = await self.wrong_roles()
            for name, entry in wrong.items():
                gone = (InstanceState.DEAD.value, InstanceState.UNRESPONSIVE.value)
                if entry is None or entry.operation or entry.state in gone:
                    continue
                with suppress(PolyphaseError):
                    if entry.role != self.roles[name].value:
                        await self.flip(name, force=True)
                    elif entry.state == InstanceState.DRAINING.value:
                        await self.resume(name)
            return not wrong

        await until(all_reset, timeout_s, "every instance in its first role", poll_s=0.2)

    async def start_stranger(self, name: str, program: tuple[str, ...], env: dict[str, str]) -> Child:
        """Start a process that is not in the plan; it ends with the scenario."""
        child = await spawn(program, env, self.data_dir / "logs" / f"{name}.log")
        self._strangers.append(child)
        return child

    async def restore(self) -> None:
        """Undo the faults that are left. Processes that were killed are restarted by the launcher alone."""
        self.processes.thaw()
        for wire in self.wires.all:
            wire.proxy.heal()
        self.switches.restore()
        self.database.restore()
        strangers, self._strangers = self._strangers, []
        await stop_all(strangers, 2.0)


@asynccontextmanager
async def running_suite_under_test(
    bed: Testbed, folder: Path, console: Console, seed: int
) -> AsyncIterator[SuiteUnderTest]:
    """The testbed, started, with the right answers to its requests. Raises StartFailed or Unavailable."""
    async with started_suite_under_test(bed, folder, console, seed) as suite:
        api_key = secret_of(bed.api_keys[0] if bed.api_keys else "")
        async with ApiClient(suite.plan.api_url, suite.plan.model, api_key) as api:
            prompts = await Prompts.of(api)
        kinds = request_kinds([prompts.of_length(length, seed=length) for length in bed.prompts], bed.answer_tokens)
        suite.requests = tuple(replace(request, api_key=api_key) for request in kinds)
        suite.right = await learn(suite.gateways[0], suite.requests)
        yield suite


@asynccontextmanager
async def started_suite_under_test(
    bed: Testbed, folder: Path, console: Console, seed: int, limits: Limits = LIMITS
) -> AsyncIterator[SuiteUnderTest]:
    """The testbed, ready, before its first request. Raises StartFailed."""
    async with AsyncExitStack() as stack:
        cluster, folder = bed.build(), folder.resolve()
        cluster_keys.keep_token(cluster, folder)
        if bed.host_key:
            cluster_keys.keep_curve_key(cluster, folder)
        run, rng = f"{os.getpid()}-{bed.name}-{time.monotonic_ns()}", Random(seed)
        plan = _with_gateways(make_plan(cluster, folder, where=bed.name), cluster, bed.gateways)
        switches = Switches(folder / "switches", [spec.name for spec in plan.processes])
        loop_times = LoopTimes(folder / "loop-times")
        gateway_env = _gateway_env(bed, folder, loop_times)
        specs = tuple(
            _injected(spec, bed, {"CHAOS_SWITCHES": str(switches.files[spec.name]), RUN: run}, gateway_env)
            for spec in plan.processes
        )
        plan, wires = await stack.enter_async_context(wired(replace(plan, processes=specs), rng, bed.proxied))
        started, logs, began = _without(plan, bed.absent), folder / "logs", time.monotonic()
        supervisor = await stack.enter_async_context(
            supervising(started.processes, logs, lambda _: None, limits, plan.fork_env, plan.preload)
        )
        suite = SuiteUnderTest(
            bed,
            plan,
            supervisor,
            folder=folder,
            roles={name: entry.role for entry in cluster.instances for name in entry.ids},
            run=run,
            rng=rng,
            wires=wires,
            switches=switches,
            loop_times=loop_times,
        )
        with console.status(f"starting {bed.name}: {bed.title}"):
            await supervisor.started()
            await supervisor.during(suite.wait_ready(started.instance_ids, START_S))
        console.print(f"[dim]{bed.title}: ready after {time.monotonic() - began:.0f} s[/]")
        stack.push_async_callback(suite.restore)
        yield suite


def _with_gateways(plan: Plan, cluster: Cluster, count: int) -> Plan:
    """The plan, with a second gateway for count = 2: a cluster file has one gateway per host."""
    if count == 1:
        return plan
    first = next(spec for spec in plan.processes if service_of(spec) == "gateway")
    old, port = str(cluster.gateway.port), cluster.ports + _SECOND_GATEWAY
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


def _injected(spec: ProcessSpec, bed: Testbed, env: dict[str, str], gateway_env: dict[str, str]) -> ProcessSpec:
    """The process with `inject/` on its path and more environment; without the host's key where the testbed says so."""
    if not bed.host_key:
        kept = {name: value for name, value in spec.env.items() if not name.endswith("_CURVE_FILE")}
        spec = replace(spec, env=kept, settings=spec.settings and spec.settings.model_copy(update={"curve_file": None}))
    path = os.pathsep.join(part for part in (str(INJECT), spec.env.get("PYTHONPATH", "")) if part)
    more = gateway_env if service_of(spec) == "gateway" else {}
    return replace(spec, env={**spec.env, **env, "PYTHONPATH": path, **more})


def _gateway_env(bed: Testbed, folder: Path, loop_times: LoopTimes) -> dict[str, str]:
    """The gateways' API keys, and the file for the times of their event loops, where the testbed has them."""
    env = {"CHAOS_LOOP_TIMES": str(loop_times.file)} if bed.timed else {}
    if bed.api_keys:
        file = folder / "keys.yaml"
        file.write_text(yaml.safe_dump([{"name": name, "digest": digest_of(secret_of(name))} for name in bed.api_keys]))
        env["POLYPHASE_GATEWAY_API_KEYS_FILE"] = str(file)
    return env
