"""`polyphase bench control`: cost of the control plane with 10, 100 and 1,000 instances.

The monitor and the scheduler are real processes. The instances are processes that hold a heartbeat, a broadcast and an
RPC connection for each of them and compute nothing: their heartbeats are encoded before, so that they leave the cores
to what is measured. `bench dashboard` uses the same processes.
"""

import asyncio
import os
import resource
import signal
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from statistics import fmean, median
from typing import Any

import httpx
import msgspec
import uvloop
from pydantic import SecretStr

from benchmarks.measuring import cores, cpu_s, serving
from benchmarks.results import Figures, Result, at_most, result
from benchmarks.suite import metric, spawned
from benchmarks.timed_scheduler import TIMED
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.settings import SchedulerSettings
from services.launcher import ports
from services.launcher.suite import until
from shared.domain.cluster import ClusterState
from shared.domain.instance import Compatibility, InstanceInfo, InstanceLoad, InstanceState, KvGeometry, Role
from shared.domain.job import JobView, Phase
from shared.domain.rates import LinkRate, Rates, StepForm, StepRates
from shared.domain.route import Route
from shared.errors import InvalidRequest, PolyphaseError
from shared.runtime.server import settle
from shared.runtime.wire_version import WIRE_VERSION
from shared.wire.broadcast import ClusterFeed, Publisher
from shared.wire.clients.monitor import MonitorClient
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.messages import PREFIXES, Heartbeat, JobReport, PrefixesRequest
from shared.wire.rpc_client import RpcClients
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Sockets

SIZES = (10, 100, 1_000)
WINDOW_S, SETTLE_S, READY_S, READY_EACH_S = 8.0, 3.0, 60.0, 0.05
SILENCE_S = 30.0  # of a peer: on a busy machine a process may stand still, which is no loss here
QUIET_S = 3.0  # without heartbeats, likewise
FILES, SPARE_FILES = 6, 500  # of the monitor for an instance: four of its RPC, its heartbeats, broadcasts; and others
PLACE_PER_S, OPEN = 100.0, 100  # placements, and jobs of them that are not over
AIMS = {
    "monitor_cores": 0.2,
    "scheduler_cores": 0.2,
    "fleet_cores": 0.3,
    "place_scheduler_mean_us": 150.0,
    "place_scheduler_p99_ms": 1.0,
    "known_again_s": 5.0,
}
NOTE = (
    "cores: CPU time of the whole process, in cores, while the load of every instance changes each 100 ms, at most "
    "10,000 loads a second in all, without a placement; idle_…: while none changes. fleet: the processes that are the "
    f"instances. place_…: {PLACE_PER_S:g} placements a second beside those changing loads. decision: the scheduler's "
    "handler; scheduler: from the client's call to the decision, which includes the way there and the wait for the "
    "scheduler's event loop; round: to the answer at the client; cpu: CPU time of the scheduler for one of them and "
    "the report of its end, from its cores with and without them. known_again: from the start of a new monitor process "
    "after a kill -9 until a subscriber knows all instances to be ready."
)


@dataclass(slots=True)
class Control:
    """The processes under test, which `stack` ends, and a subscriber to the broadcasts. fleets: the processes of the
    instances, by their pids.
    """

    monitor: MonitorSettings
    scheduler: SchedulerSettings
    fleets: dict[int, Connection]
    stack: AsyncExitStack
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    @property
    def monitor_url(self) -> str:
        return f"http://127.0.0.1:{self.monitor.http_port}"

    @property
    def scheduler_url(self) -> str:
        return f"http://127.0.0.1:{self.scheduler.http_port}"

    @property
    def pids(self) -> dict[str, list[int]]:
        """Of the services, and of the fleet."""
        return {name: [process.pid] for name, process in self.processes.items()} | {"fleet": list(self.fleets)}

    def busy(self) -> None:
        """From now on the load of an instance changes with each heartbeat."""
        for fleet in self.fleets.values():
            fleet.send("busy")

    async def start(self, name: str, health: str, *command: str, **environment: str) -> None:
        """Start a process of that name, in place of an earlier one, and wait until it answers at `health`."""
        process = serving(health, *command, **environment)
        self.processes[name] = await self.stack.enter_async_context(process)

    async def start_monitor(self) -> None:
        environment = self.monitor.to_environment()
        await self.start("monitor", f"{self.monitor_url}/health", "-m", "services.cluster_monitor", **environment)

    async def all_ready(self, size: int) -> None:
        """Wait until a subscriber knows so many instances to be ready."""
        cluster, sockets = ClusterState(), Sockets(peer_silence_s=SILENCE_S)

        def ready() -> bool:
            return sum(one.state is InstanceState.READY for one in cluster.view().instances) == size

        try:
            feed = ClusterFeed(sockets, self.monitor.broadcast_address, cluster.apply)
            try:
                await until(ready, READY_S + READY_EACH_S * size, f"{size} instances", poll_s=0.02)
            finally:
                feed.close()
        finally:
            sockets.close()


@asynccontextmanager
async def running(size: int, before: Callable[[str], Awaitable[None]] | None = None) -> AsyncIterator[Control]:
    """A monitor, a scheduler and so many instances; `before` may fill their database, by its URL."""
    with tempfile.TemporaryDirectory(prefix="polyphase-bench-") as folder:
        database = f"sqlite:///{folder}/polyphase.db"
        if before is not None:
            await before(database)
        first = ports.free_range()
        heartbeats, broadcasts, rpc = (f"tcp://127.0.0.1:{first + at}" for at in (1, 2, 4))
        monitor = MonitorSettings(
            http_port=first,
            heartbeat_address=heartbeats,
            broadcast_address=broadcasts,
            database_url=database,
            cluster_token=SecretStr("open"),
            peer_silence_s=SILENCE_S,
            silence_s=QUIET_S,
        )
        scheduler = SchedulerSettings(
            peer_silence_s=SILENCE_S,
            http_port=first + 3,
            rpc_address=rpc,
            broadcast_address=broadcasts,
            monitor_url=f"http://127.0.0.1:{first}",
            database_url=database,
        )
        monitor_url = f"http://127.0.0.1:{first}"
        async with AsyncExitStack() as stack:
            fleets = {}
            for begin in range(0, size, FLEET):
                numbers = range(begin, min(size, begin + FLEET))
                options = FleetOptions(numbers, size, first + 5, heartbeats, broadcasts, monitor_url)
                fleet = stack.enter_context(spawned(run_fleet, options))
                fleets[await asyncio.to_thread(fleet.recv)] = fleet
            control = Control(monitor, scheduler, fleets, stack)
            await control.start_monitor()
            environment = scheduler.to_environment()
            health = f"{control.scheduler_url}/health"
            await control.start("scheduler", health, "-m", "benchmarks.timed_scheduler", **environment)
            await control.all_ready(size)
            await asyncio.sleep(SETTLE_S)
            yield control


def run_control_bench(sizes: tuple[int, ...] = (), window_s: float = WINDOW_S) -> Result:
    """Figures by number of instances, `SIZES` by default; aims are about 1,000 of them, or the largest number below.

    Raises InvalidRequest where this machine does not allow as many open files as the largest number takes.
    """
    sizes = sizes or SIZES
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and FILES * max(sizes) + SPARE_FILES > limit:
        raise InvalidRequest(
            f"{max(sizes)} instances: the monitor opens {FILES} files for each, and a process may open {limit} here; "
            f"raise the hard limit (`ulimit -Hn`), or measure at most {(limit - SPARE_FILES) // FILES} instances"
        )
    figures: dict[str, Figures] = {str(size): uvloop.run(_measure(size, window_s)) for size in sizes}
    judged = max((size for size in sizes if size <= SIZES[-1]), default=0)
    aims = {f"{name} at {judged}": at_most(want, figures[str(judged)][name]) for name, want in AIMS.items() if judged}
    return result(figures, aims, [NOTE])


async def _measure(size: int, window_s: float) -> Figures:
    async with running(size) as control:
        figures = {f"idle_{name}": value for name, value in (await _window(control, window_s)).items()}
        control.busy()
        await asyncio.sleep(SETTLE_S)
        figures |= await _window(control, window_s)
        scheduler, used_s = control.pids["scheduler"], cpu_s(control.pids["scheduler"])
        began = time.monotonic()
        figures |= await _place(control, window_s)
        used_s = cpu_s(scheduler) - used_s - figures["scheduler_cores"] * (time.monotonic() - began)
        figures["place_cpu_us"] = round(used_s / (window_s * PLACE_PER_S) * 1e6, 1)
        figures |= await _restart(control, size)
    return figures


async def _window(control: Control, window_s: float) -> Figures:
    """Cores of the processes, and what is broadcast, without requests."""
    counters = {
        "broadcast_bytes_per_s": "polyphase_broadcast_bytes_total",
        "heartbeats_per_s": "polyphase_heartbeats_total",
    }
    began, before = time.monotonic(), await _metrics(control.monitor_url)
    used = await cores(control.pids, window_s)
    after, took_s = await _metrics(control.monitor_url), time.monotonic() - began
    rates = {name: round((metric(after, one) - metric(before, one)) / took_s) for name, one in counters.items()}
    return {f"{name}_cores": round(value, 4) for name, value in used.items()} | rates


@dataclass(slots=True)
class _Placed:
    """Seconds of placements, in the order of the calls."""

    decision: list[float] = field(default_factory=list)
    scheduler: list[float] = field(default_factory=list)
    round: list[float] = field(default_factory=list)

    def add(self, began: float, route: Route) -> None:
        """A placement that has just been answered. began: when the client called, by the machine's clock."""
        noted = next(reason.figures for reason in route.reasons if reason.what == TIMED)
        received, decided = float(noted["received"]), float(noted["decided"])
        self.decision.append(decided - received)
        self.scheduler.append(decided - began)
        self.round.append(time.monotonic() - began)

    @property
    def figures(self) -> Figures:
        found: Figures = {}
        for name in ("decision", "scheduler", "round"):
            took_s = sorted(getattr(self, name))
            found[f"place_{name}_mean_us"] = round(fmean(took_s) * 1e6, 1)
            found[f"place_{name}_p50_us"] = round(median(took_s) * 1e6, 1)
            found[f"place_{name}_p99_ms"] = round(took_s[len(took_s) * 99 // 100] * 1e3, 3)
        return found


async def _place(control: Control, window_s: float) -> Figures:
    """Placements, evenly spread."""
    sockets, placed = Sockets(peer_silence_s=SILENCE_S), _Placed()
    try:
        with RpcClients(sockets) as clients:
            client = SchedulerClient(clients, [control.scheduler.rpc_address])
            await client.place(_job(0), timeout_s=SILENCE_S)
            due = time.monotonic()
            for number in range(1, round(window_s * PLACE_PER_S) + 1):
                due += 1.0 / PLACE_PER_S
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                began = time.monotonic()
                placed.add(began, await client.place(_job(number), timeout_s=SILENCE_S))
                if number > OPEN:
                    await client.report([_ended(number - OPEN)], timeout_s=SILENCE_S)
    finally:
        sockets.close()
    return placed.figures


async def _restart(control: Control, size: int) -> Figures:
    """A new monitor after one that was killed: when all instances are known again."""
    control.processes["monitor"].send_signal(signal.SIGKILL)
    await control.processes["monitor"].wait()
    began = time.monotonic()
    await control.start_monitor()
    await control.all_ready(size)
    return {"known_again_s": round(time.monotonic() - began, 2)}


async def _metrics(url: str) -> str:
    async with httpx.AsyncClient(timeout=30.0, trust_env=False) as client:
        return (await client.get(f"{url}/metrics")).text


def _job(number: int) -> JobView:
    return JobView(f"bench-{number}", 200 + number * 37 % 1500, 100)


def _ended(number: int) -> JobReport:
    job = _job(number)
    return JobReport(
        job.job_id, "bench", Phase.COMPLETED, time.time() - 1.0, job.prompt_tokens, 100, outcome="stop", slo_met=True
    )


# The processes of the instances.

FLEET = 1_000  # instances of one process
BEAT_S, UNCHANGED_BEAT_S, SLICES = 0.1, 0.25, 20  # as a worker's; beats are spread over slices of a period
MAX_BEATS_PER_S = 10_000  # of all instances: with more of them, each has its turn less often
REGISTRATIONS = 16  # at once
RATES = tuple(
    Rates(
        StepRates(*(StepForm(0.01 * factor, 1e-4 * factor, 1e-8 * factor, 1e-4 * factor, 1e-9 * factor),) * 3),
        link=LinkRate(1e9),
    )
    for factor in (1.0, 1.6, 2.7, 4.0)
)


def make_info(name: str, rpc: str = "") -> InstanceInfo:
    """An instance that computes nothing."""
    return InstanceInfo(
        instance_id=name,
        generation=1,
        model="m",
        compatibility=Compatibility("bench", "emulated", "1", WIRE_VERSION, KvGeometry(32, 8, 128)),
        accelerator="emulated",
        dtype="bfloat16",
        tensor_parallel=1,
        block_size=16,
        total_blocks=10_000,
        max_model_len=8192,
        chunk_size=512,
        rpc=rpc,
        http="http://127.0.0.1:1",
        kv_endpoints=("tcp://127.0.0.1:1",),
        max_seqs=256,
    )


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """numbers: of the instances of one process, among `size` in all; half of them prefill. Each listens for RPC at
    `rpc_port` of another loopback address.
    """

    numbers: range
    size: int
    rpc_port: int
    heartbeats: str
    broadcasts: str
    monitor_url: str

    @property
    def beat_s(self) -> float:
        """Between two heartbeats of an instance whose load changes."""
        return max(BEAT_S, self.size / MAX_BEATS_PER_S)


LOADS = 60  # that an instance reports in turn
_WHEN_S = 1_234_567_890.25  # the time in a heartbeat that is encoded before it is due
_FLOAT = struct.Struct(">Bd")  # as MessagePack has it
_FLOAT_TYPE = 0xCB


def _load(role: Role, n: int) -> InstanceLoad:
    decodes = role is Role.DECODE
    return InstanceLoad(
        time_s=_WHEN_S,
        queued_prefill=0 if decodes else n % 5,
        queued_prefill_tokens=0 if decodes else n * 397 % 9000,
        running=n % 60,
        decoding=n * 7 % 60 if decodes else 0,
        context_tokens=n * 1009 % 60_000 if decodes else 0,
        free_blocks=9_000 - n * 31 % 8_000,
        inflight=n % 60,
    )


def _encoded(beat: Heartbeat) -> tuple[bytes, bytes]:
    """A heartbeat before and behind the time of its load."""
    head, _, rest = msgspec.msgpack.encode(beat).partition(_FLOAT.pack(_FLOAT_TYPE, _WHEN_S))
    return head, rest


@cache
def _rests(role: Role) -> list[bytes]:
    """The loads that instances of a role report in turn, encoded: what follows the time in a heartbeat."""
    return [_encoded(Heartbeat("", 0, role, False, _load(role, n)))[1] for n in range(LOADS)]


class _Instance:
    def __init__(self, number: int, options: FleetOptions, sockets: Sockets) -> None:
        self.role = Role.DECODE if number % 2 else Role.PREFILL
        rpc = f"tcp://127.1.{number // 250}.{number % 250 + 1}:{options.rpc_port}"
        self.info = msgspec.structs.replace(
            make_info(f"{self.role.value}-{number}", rpc),
            generation=time.time_ns(),
            rates=RATES[number // 2 % len(RATES)],
        )
        self.known = False
        self._number, self._beats, self._beat_mono_s = number, 0, 0.0
        self._unchanged_s = max(UNCHANGED_BEAT_S, options.beat_s)
        self._head, _ = _encoded(
            Heartbeat(self.info.instance_id, self.info.generation, self.role, False, _load(self.role, 0))
        )
        self._publisher = Publisher(sockets, options.heartbeats)
        self._feed = ClusterFeed(
            sockets,
            options.broadcasts,
            lambda delta: True,
            following=False,
            instance_id=self.info.instance_id,
            on_policies=lambda policies: None,
            on_stranger=self._on_unknown,
        )

    def beat(self, busy: bool, now_mono_s: float, when: bytes) -> None:
        """Publish the load, which changes while the fleet is busy. when: the time now, encoded."""
        if not busy and now_mono_s - self._beat_mono_s < self._unchanged_s:
            return
        self._beat_mono_s = now_mono_s
        self._beats += busy
        rest = _rests(self.role)[(self._number + self._beats) % LOADS if self._beats else 0]  # 0: no work
        self._publisher.publish(msgspec.Raw(self._head + when + rest))

    def _on_unknown(self, generation: int) -> None:
        self.known = self.known and generation != self.info.generation


def run_fleet(pipe: Connection, options: FleetOptions) -> None:
    uvloop.run(_fleet(pipe, options))


async def _fleet(pipe: Connection, options: FleetOptions) -> None:
    sockets, busy, end = Sockets(peer_silence_s=SILENCE_S), [False], asyncio.Event()
    pipe.send(os.getpid())

    def on_command() -> None:
        command = pipe.recv()
        busy[0] = command == "busy"
        if command is None:
            end.set()

    asyncio.get_running_loop().add_reader(pipe.fileno(), on_command)
    async with AsyncExitStack() as stack:
        monitor = await stack.enter_async_context(MonitorClient(options.monitor_url))
        fleet = [_Instance(number, options, sockets) for number in options.numbers]
        for instance in fleet:
            await stack.enter_async_context(RpcServer(sockets, instance.info.rpc, {PREFIXES: _prefixes}))
        beats = asyncio.create_task(_beat(fleet, busy, options.beat_s / SLICES))
        tasks = [beats, asyncio.create_task(_register(fleet, monitor))]
        settle()
        await end.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _beat(fleet: list[_Instance], busy: list[bool], slice_s: float) -> None:
    due, turn = time.monotonic(), 0
    while True:
        now, when = time.monotonic(), _FLOAT.pack(_FLOAT_TYPE, time.time())
        for instance in fleet[turn % SLICES :: SLICES]:
            instance.beat(busy[0], now, when)
        turn, due = turn + 1, max(due + slice_s, now)
        await asyncio.sleep(max(0.0, due - time.monotonic()))


async def _register(fleet: list[_Instance], monitor: MonitorClient) -> None:
    """Register the instances that the monitor does not know, again and again."""
    gate = asyncio.Semaphore(REGISTRATIONS)

    async def register(instance: _Instance) -> None:
        async with gate:
            with suppress(PolyphaseError):  # the next round tries again
                await monitor.register(instance.info, instance.role)
                instance.known = True

    while True:
        await asyncio.gather(*(register(instance) for instance in fleet if not instance.known))
        await asyncio.sleep(BEAT_S)


async def _prefixes(_: PrefixesRequest, call: ServerCall) -> Any:
    await asyncio.Event().wait()  # it holds no prefixes and never answers
