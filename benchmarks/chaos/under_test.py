"""A running suite under test: the handle that scenarios get, and its start.

Every fault can be undone; `SuiteUnderTest.restore` undoes the faults that are left. Relies on
`inject/sitecustomize.py`, which the processes of the suite import, and on the proxies of `wires`.
"""

import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import yaml
from rich.console import Console

from benchmarks.chaos.handles import BACK_S, Database, LoopTimes, Processes, Switches
from benchmarks.chaos.load import Load, RightAnswer, learn_load
from benchmarks.chaos.testbeds import Testbed, secret_of
from benchmarks.chaos.wires import Port, Wires, ports_of, service_of, wired
from services.launcher import cluster_keys, state_file
from services.launcher.child_process import Child, spawn, stop_all
from services.launcher.cluster_file import Cluster
from services.launcher.plan import make_plan
from services.launcher.ports import PortUse
from services.launcher.spec import Plan, ProcessSpec
from services.launcher.suite import Suite, until
from services.launcher.supervisor import Supervisor, supervising
from shared.domain.instance import InstanceState, Role
from shared.errors import PolyphaseError
from shared.runtime.keys import digest_of
from shared.wire.api.monitor import InstanceRow
from shared.wire.clients.http import TIMEOUT_S
from tools.client import Address, Request

INJECT = Path(__file__).parent / "inject"
RUN = "CHAOS_RUN"  # environment variable of all processes of a run; its value names the run
START_S = 120.0
_SECOND_GATEWAY = 239  # offset in the cluster's range of ports


class SuiteUnderTest(Suite):
    """A running suite, and what a scenario may do to it. `roles` are those that the instances began with.

    `drain`, `resume` and `flip` go through the monitor and raise what it answers.
    """

    answer_s = TIMEOUT_S  # scenarios freeze processes

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
        writers = self.named("monitor", "scheduler")
        self.database = Database(folder / "polyphase.db", writers, self.processes, switches)
        self.gateways: tuple[Address, ...] = tuple(port.address for port in self.ports if port.service == "gateway")
        self.requests: tuple[Request, ...] = ()
        self.right: dict[str, RightAnswer] = {}
        self.load: Load | None = None
        self.notes: list[str] = []  # measurements of the scenario, for the report
        self.figures: dict[str, float] = {}  # the same, for the JSON of the bench
        self.outage_s = 0.0  # the longest time for which the scenario made a service unavailable
        self._strangers: list[Child] = []

    def named(self, *services: str) -> tuple[str, ...]:
        """The processes of services: "gateway", "scheduler", "monitor", "predictor", "worker"."""
        return tuple(spec.name for of in services for spec in self.plan.processes if service_of(spec) == of)

    @property
    def prefill(self) -> tuple[str, ...]:
        return tuple(name for name, role in self.roles.items() if role is Role.PREFILL)

    @property
    def decode(self) -> tuple[str, ...]:
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
        """Wait until the monitor reports these as ready, by default all that were started. Raises DeadlineExceeded."""
        await self.wait_ready(names, timeout_s)

    async def kill_until_back(self, *names: str) -> None:
        """SIGKILL to these; returns when the launcher has restarted them. Raises DeadlineExceeded."""
        await self.processes.back(self.processes.kill(*names))

    async def wrong_roles(self) -> dict[str, InstanceRow | None]:
        """The instances that are not ready in their first role, with their entries at the monitor."""
        found = await self.instances()
        roles = {name: role for name, role in self.roles.items() if name not in self.bed.absent}
        wanted = {name: (InstanceState.READY.value, role.value) for name, role in roles.items()}
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
    async with wired(replace(plan, processes=specs), rng, bed.proxied) as (plan, wires):
        started, logs, began = _without(plan, bed.absent), folder / "logs", time.monotonic()
        async with supervising(
            started.processes, logs, lambda _: None, bed.limits, plan.fork_env, plan.preload
        ) as supervisor:
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
            try:
                key = secret_of(bed.api_keys[0] if bed.api_keys else "")
                learned = learn_load(plan.api_url, plan.model, key, bed.prompts, bed.answer_tokens)
                suite.requests, suite.right = await learned
                yield suite
            finally:
                await suite.restore()


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
