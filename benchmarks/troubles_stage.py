"""One injected fault: it is made on a running suite, and verdicts are judged until the cluster is well again."""

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

import msgspec

from benchmarks.chaos.arena import Arena
from benchmarks.chaos.clusters import Testbed
from benchmarks.suite import metric
from benchmarks.troubles_suite import EMULATED, Clients, Figure, Known, Sample
from benchmarks.troubles_verdict import figures
from services.launcher.child_process import Child
from shared.domain import verdict
from shared.domain.instance import Role
from shared.domain.verdict import Count, Level, Problem, Verdict
from shared.errors import PolyphaseError, Unavailable
from shared.wire.clients.monitor import MonitorClient

POLL_S, SAMPLE_S = 0.2, 0.25
LOOKS, BETWEEN_S = 3, 1.0  # verdicts that are judged, the first that names the trouble among them
ALARM_S, CLEAR_S = 45.0, 60.0  # the longest that is waited


@dataclass(slots=True)
class Stage:
    """A running suite, its clients, and what is known of it. states: of each instance, as its stager made it."""

    arena: Arena
    clients: Clients
    monitor: MonitorClient
    states: dict[str, str]
    known: Known
    late: Child | None = None  # the instance that came late

    def be(self, state: str, *names: str) -> None:
        self.states |= dict.fromkeys(names, state)
        self.known.counts = counted(self.states, self.arena.roles.first)

    @contextmanager
    def doubted(self) -> Iterator[None]:
        """Requests that are open in the block's length are seen otherwise by who stands still."""
        began_s = time.time()
        try:
            yield
        finally:
            for shot in self.clients.shots:
                shot.doubt = shot.doubt or not shot.ended_s or shot.ended_s >= began_s - 1.0

    async def verdict(self) -> tuple[Verdict, Known]:
        """The monitor's verdict and the truth at that moment, whose lists grow on."""
        found = msgspec.convert(await self.monitor.call("GET", "/verdict"), Verdict)
        return found, replace(self.known, silent=dict(self.known.silent))


@dataclass(frozen=True, slots=True)
class Trouble:
    """A fault and the verdict that it requires. `make` has the fault for its block's length.

    what: the problem's code. stage, culprits: the problem's stage and instances, where they are certain.
    """

    name: str
    does: str
    what: str
    make: Callable[[Stage], AbstractAsyncContextManager[object]]
    level: Level = Level.DEGRADED
    stage: verdict.Stage | None = None
    culprits: tuple[str, ...] | None = None
    bed: Testbed = EMULATED


@dataclass(slots=True)
class Staged:
    """The outcome of a fault. Times in seconds; None: not within the allowed time."""

    trouble: Trouble
    headline: str = ""
    cause: str = ""
    alarm_s: float | None = None
    clear_s: float | None = None
    figures: list[Figure] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.faults and all(figure.ok for figure in self.figures)


def counted(states: dict[str, str], roles: dict[str, Role]) -> dict[Role, Count]:
    def of(role: Role) -> Count:
        mine = [state for name, state in states.items() if roles[name] is role]
        fields = ("ready", "dead", "unresponsive", "draining", "starting", "missing")
        return Count(expected=len(mine), **{name: mine.count(name) for name in fields})

    return {role: of(role) for role in Role}


async def stage(on: Stage, trouble: Trouble) -> Staged:
    """From a cluster that is well to one that is well again. Whatever goes wrong is in the answer."""
    staged, seen = Staged(trouble), list[tuple[Verdict, Known]]()
    await _well(on, staged, seen)
    seen.clear()  # judged after the trouble before
    async with _sampled(on):
        began = time.monotonic()
        try:
            async with trouble.make(on):
                staged.alarm_s = await _alarm(on, staged, seen, began)
        except (PolyphaseError, TimeoutError) as error:
            staged.faults.append(f"{type(error).__name__}: {error}")
        undone = time.monotonic()
        if await _well(on, staged, seen):
            staged.clear_s = time.monotonic() - undone
        for found, known in seen:
            staged.figures += figures(found, known)
    return staged


async def _alarm(on: Stage, staged: Staged, seen: list[tuple[Verdict, Known]], began: float) -> float | None:
    """Seconds until the verdict names the fault; further verdicts are judged after that."""
    trouble, found = staged.trouble, await on.verdict()
    while (problem := _named(trouble, found)) is None:
        if time.monotonic() - began > ALARM_S:
            staged.headline = found[0].headline
            staged.faults.append(f"{trouble.what} was not named within {ALARM_S:.0f} s")
            return None
        await asyncio.sleep(POLL_S)
        found = await on.verdict()
    alarm_s = time.monotonic() - began
    for look in range(LOOKS):
        if look:
            await asyncio.sleep(BETWEEN_S)
            found = await on.verdict()
            problem = _named(trouble, found) or problem
        seen.append(found)
        staged.headline, staged.cause = found[0].headline, problem.cause
        staged.faults += _misnamed(trouble, found[0])
    return alarm_s


def _named(trouble: Trouble, found: tuple[Verdict, Known]) -> Problem | None:
    return next((one for one in found[0].problems if one.what == trouble.what), None)


def _misnamed(trouble: Trouble, found: Verdict) -> list[str]:
    problem = next((one for one in found.problems if one.what == trouble.what), None)
    if problem is None:
        return [f"named no more: {found.headline}"]
    wanted = {"level": trouble.level, "stage": trouble.stage, "instances": trouble.culprits}
    return [
        f"{name} is {getattr(problem, name)!r}, not {want!r}"
        for name, want in wanted.items()
        if want is not None and getattr(problem, name) != want
    ]


async def _well(on: Stage, staged: Staged, seen: list[tuple[Verdict, Known]]) -> bool:
    """Wait until there is no problem but a missing instance; that verdict is judged, too."""
    give_up = time.monotonic() + CLEAR_S
    while True:
        found, known = await on.verdict()
        problems = [one for one in found.problems if one.what != "instances_missing"]
        settled = all(count.ready == known.counts[role].ready for role, count in found.counts.items())
        if not problems and settled and found.requests:
            if not found.problems:
                seen.append((found, known))
            return True
        if time.monotonic() > give_up:
            staged.faults.append(f"not well within {CLEAR_S:.0f} s: {found.headline}")
            return False
        await asyncio.sleep(POLL_S)


@asynccontextmanager
async def _sampled(on: Stage) -> AsyncIterator[None]:
    """Poll the metrics of every instance."""
    urls = {
        port.process: f"http://{port.host}:{port.port}/metrics"
        for port in on.arena.ports
        if port.service == "worker" and port.purpose == "http"
    }
    tasks = [asyncio.create_task(_sample(on, name, url)) for name, url in urls.items()]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        on.known.samples.clear()


async def _sample(on: Stage, name: str, url: str) -> None:
    role = on.arena.roles.first[name]
    while True:
        if on.states[name] == "ready":
            try:
                text = await asyncio.to_thread(_read, url)
                on.known.samples.append(sample_of(text, time.time(), name, role))
            except (OSError, Unavailable):  # just killed, or not there yet
                pass
        await asyncio.sleep(SAMPLE_S)


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=2.0) as answer:
        return str(answer.read(), "utf-8")


def sample_of(text: str, time_s: float, name: str, role: Role) -> Sample:
    """From the text of `/metrics`. Raises Unavailable where a series is missing."""
    used = metric(text, "vllm:kv_cache_usage_perc")
    series = ("vllm:num_requests_waiting", "vllm:num_requests_running", "polyphase_instance_queued_prefill_jobs")
    return Sample(time_s, name, role, used, *(int(metric(text, one)) for one in series))
