"""`polyphase status` and `polyphase top`: the state of a running suite, once or every second.

The state comes from the cluster monitor; without a monitor it comes from the health checks of the processes in the
state file.
"""

import asyncio
import os
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.styled import Styled
from rich.table import Table
from rich.text import Text

from services.launcher import pages, state_file
from services.launcher.health import HttpHealth
from services.launcher.pages import Instance, LocalInstance
from services.launcher.state_file import RunningProcess, SuiteState
from shared.domain.instance import InstanceState, Role
from shared.domain.slo import SloReport
from shared.domain.verdict import Level, Verdict, count, duration
from shared.errors import DeadlineExceeded, NotFound, PolyphaseError, Unavailable
from shared.wire.api.scheduler import RequestRow
from shared.wire.clients.http import WorkerAdmin
from shared.wire.clients.monitor import MonitorClient
from shared.wire.clients.scheduler import SchedulerAdmin

ASK_S = 2.0  # time limit of each call to a process
PERIOD_S = 1.0  # between two pages of `top`
DEGRADED, DOWN = 3, 4  # exit codes; 1 is an error (no suite runs there), 2 a word that is not understood
_CODES = {Level.GOOD: 0, Level.IDLE: 0, Level.DEGRADED: DEGRADED, Level.DOWN: DOWN}
_JOBS = 10_000  # jobs of a scheduler's memory that are counted
_MIN_ROWS = 5  # of instances, however low the terminal is
_PIPED_ROWS = 20
_PROBLEMS = 3  # whose causes `top` shows
_OLD_S = 3.0
_RATES = {"requests_per_s": "requests", "prompt_tokens_per_s": "tokens in", "output_tokens_per_s": "tokens out"}
_SERVING = (
    "What follows comes from the launcher's state file, the processes themselves and the schedulers. Requests are "
    "still served."
)
_NOT_SERVING = "Requests are not served: see below."


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A suite at one moment (unix seconds). fault: why the monitor does not answer; other processes did then.

    instances: as the monitor lists them, or those of this host as each describes itself. health: the fault of each
    process, empty for a healthy one. jobs: running jobs by phase, from the schedulers, which are queried only without a
    monitor; None if none answered.
    """

    time_s: float
    state: SuiteState | None = None
    fault: str = ""
    verdict: Verdict | None = None
    instances: Sequence[Instance] = ()
    slo: Sequence[SloReport] = ()
    rates: Mapping[str, float | None] = field(default_factory=dict)
    health: Mapping[str, str] = field(default_factory=dict)
    jobs: Mapping[str, int] | None = None

    def as_json(self) -> dict[str, object]:
        """JSON for programs; unknown values are null."""
        away = bool(self.fault)
        answer: dict[str, object] = {
            "instances": None if away and not self.instances else msgspec.to_builtins(self.instances),
            "slo": None if away else msgspec.to_builtins(self.slo),
            "verdict": msgspec.to_builtins(self.verdict),
        }
        if away:
            answer |= {"monitor_fault": self.fault, "jobs": None if self.jobs is None else dict(self.jobs)}
        if self.state is None:
            return answer
        processes = [
            {key: getattr(process, key) for key in ("name", "pid", "state", "restarts", "fault")}
            | ({"health": self.health[process.name] or "ok"} if process.name in self.health else {})
            for process in self.state.processes
        ]
        urls = {"api_url": self.state.api_url, "dashboard_url": self.state.dashboard_url}
        return {**urls, "processes": processes, **answer}


Look = Callable[[], Awaitable[Snapshot]]


async def observe(data_dir: Path, given: str = "", *, rates: bool = False) -> Snapshot:
    """The state now. Raises NotFound if no suite runs, the monitor's error if no other process is known."""
    state = _state_of(data_dir, given)
    url = given or (state.monitor_url if state is not None else "")
    try:
        return await _by_monitor(url, state, rates)
    except (Unavailable, DeadlineExceeded) as error:
        if state is None:
            raise
        return await _observe_without_monitor(state, error.message)


def _state_of(data_dir: Path, given: str) -> SuiteState | None:
    """The suite of the data folder, unless another suite's monitor is given. Raises NotFound if there is neither."""
    try:
        state = state_file.read(data_dir)
    except NotFound:
        if given:
            return None
        raise
    return state if given in ("", state.monitor_url) else None


async def _by_monitor(url: str, state: SuiteState | None, rates: bool) -> Snapshot:
    async with MonitorClient(url) as monitor:
        verdict, instances, slo = await asyncio.gather(monitor.verdict(), monitor.instances(), monitor.slo())
        found = await _fetch_rates(monitor) if rates else {}
    return Snapshot(time.time(), state, "", verdict, instances, slo, found)


async def _fetch_rates(monitor: MonitorClient) -> dict[str, float | None]:
    """The newest value of each series."""
    series = (await monitor.history(minutes=5, points=60)).series
    return {
        name: next((each for each in reversed(values) if each is not None), None) for name, values in series.items()
    }


async def _observe_without_monitor(state: SuiteState, fault: str) -> Snapshot:
    """The processes of the launcher's state file, and what each of them answers."""
    known = [process for process in state.processes if process.url]
    instances = [process for process in known if process.name in state.instance_ids]
    health, selves, jobs = await asyncio.gather(
        asyncio.gather(*(HttpHealth(process.url).check(ASK_S) for process in known)),
        asyncio.gather(*map(_local_instance, instances)),
        _jobs(state.scheduler_urls),
    )
    faults = dict(zip((process.name for process in known), health, strict=True))
    return Snapshot(time.time(), state, fault, instances=selves, health=faults, jobs=jobs)


async def _local_instance(process: RunningProcess) -> LocalInstance:
    """An instance of this host, from its own answer."""
    async with WorkerAdmin(process.url.removesuffix("/health")) as worker:
        try:
            answer = await worker.instance()
        except DeadlineExceeded:
            return LocalInstance(process.name, InstanceState.UNRESPONSIVE)
        except PolyphaseError:
            starting = process.state == "starting"
            return LocalInstance(process.name, InstanceState.STARTING if starting else InstanceState.DEAD)
    state = InstanceState.DRAINING if answer.draining else InstanceState.READY
    return LocalInstance(process.name, state, answer.role, answer.info, answer.load)


async def _jobs(urls: Sequence[str]) -> dict[str, int] | None:
    """Running jobs by phase over all schedulers; None if no scheduler answers."""
    answers = [rows for rows in await asyncio.gather(*map(_rows, urls)) if rows is not None]
    running = Counter(row.phase.value for rows in answers for row in rows if not row.phase.final)
    return dict(running) if answers else None


async def _rows(url: str) -> list[RequestRow] | None:
    async with SchedulerAdmin(url) as scheduler:
        try:
            return await scheduler.requests(limit=_JOBS)
        except PolyphaseError:
            return None


def exit_code(snapshot: Snapshot) -> int:
    """0: good or idle; DEGRADED, also without a monitor; DOWN."""
    if snapshot.verdict is not None:
        return _CODES[snapshot.verdict.level]
    return DEGRADED if _serves(snapshot) else DOWN


def show(console: Console, snapshot: Snapshot, *, everything: bool = False) -> None:
    """Print the state for people, with as many instances as the terminal has room for, or all (`everything`)."""
    above = [
        *(_verdict(snapshot) if snapshot.verdict is not None else _without_monitor(snapshot)),
        *_processes(snapshot),
        Text(),
    ]
    below = [*_slo(snapshot), *_addresses(snapshot)]
    max_rows = None
    if console.is_terminal and not everything:
        lines = len(console.render_lines(Group(*above, *below), pad=False))
        max_rows = max(_MIN_ROWS, console.height - lines - 3)  # the table's head, the note below it, the prompt
    console.print(Group(*above, *pages.instances(snapshot.instances, console.width, max_rows), *below))


def _verdict(snapshot: Snapshot) -> Iterator[RenderableType]:
    assert snapshot.verdict is not None
    yield pages.headline(snapshot.verdict)
    for line in pages.problems(snapshot.verdict):
        yield pages.indented(line)
    yield pages.chain(snapshot.verdict)
    if snapshot.verdict.level in (Level.DEGRADED, Level.DOWN):  # else the headline says so
        ended = count(snapshot.verdict.requests, "request")
        yield Text(f"{pages.counted(snapshot.verdict)}; {ended} ended in {snapshot.verdict.window_s:.0f} s", "dim")


def _without_monitor(snapshot: Snapshot) -> Iterator[RenderableType]:
    yield Text(f"✘ The monitor does not answer: {snapshot.fault}", "bold red")
    yield Text(_SERVING if _serves(snapshot) else _NOT_SERVING, "yellow")
    if snapshot.jobs is None:
        yield Text("No scheduler answers either: the running jobs are unknown.", "red")
    else:
        phases = ", ".join(f"{number} in {phase}" for phase, number in snapshot.jobs.items())
        yield Text(f"{count(sum(snapshot.jobs.values()), 'job')} running{': ' + phases if phases else ''}")


def _serves(snapshot: Snapshot) -> bool:
    """Whether requests are probably served: a scheduler answers, and so does an instance of each role."""
    roles = {entry.role for entry in snapshot.instances if entry.state is InstanceState.READY}
    return snapshot.jobs is not None and set(Role) <= roles


def _processes(snapshot: Snapshot) -> Iterator[RenderableType]:
    """Processes that are not ready or were restarted; without the monitor all processes, with their health."""
    if snapshot.state is None:
        return
    if snapshot.fault:
        yield Text()
        yield _process_table(snapshot.state.processes, snapshot.health)
        return
    for process in snapshot.state.processes:
        if process.state != "ready":
            because = f": {process.fault}" if process.fault else ""
            yield Text(f"{process.name}: {process.state}{because}", "red")
        elif process.restarts:
            times = "once" if process.restarts == 1 else f"{process.restarts} times"
            yield Text(f"{process.name}: restarted {times}, last because: {process.fault}", "dim")


def _slo(snapshot: Snapshot) -> Iterator[RenderableType]:
    if snapshot.slo:
        yield Text()
        yield pages.slo(snapshot.slo)


def _addresses(snapshot: Snapshot) -> Iterator[RenderableType]:
    if snapshot.state is not None:
        dashboard = f"   dashboard {snapshot.state.dashboard_url}" if snapshot.state.dashboard_url else ""
        yield Text(f"\nAPI {snapshot.state.api_url}{dashboard}", "dim")


def _process_table(processes: Sequence[RunningProcess], health: Mapping[str, str]) -> Table:
    table = pages.plain_table("process", "pid", "state", "restarts", "health", right=("restarts",), fold="health")
    for process in processes:
        fault = health.get(process.name)
        answer = Text(pages.NONE if fault is None else fault or "healthy", "red" if fault else "")
        state = Text(process.state, "" if process.state == "ready" else "red")
        pid = str(process.pid or pages.NONE)
        table.add_row(pages.elided(process.name, 24), pid, state, str(process.restarts), answer)
    return table


async def run_top(console: Console, look: Look, *, once: bool = False) -> None:
    """Show the state, on a terminal in place, elsewhere one page after the other.

    Raises the error of the first `look`; after that the last state stays visible in grey, with its age.
    """
    view = LiveView(look)
    await view.refresh()
    if once:
        console.print(top_page(view, console.width, None))
    elif console.is_terminal:
        await _in_place(console, view)
    else:
        while True:
            console.print(top_page(view, console.width, _PIPED_ROWS))
            console.print()
            console.file.flush()
            await asyncio.sleep(PERIOD_S)
            await view.refresh()


class LiveView:
    """The last state that was observed, and the fault that occurred since."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._last: Snapshot | None = None
        self.fault = ""

    @property
    def last(self) -> Snapshot:
        """Raises LookupError before the first state."""
        if self._last is None:
            raise LookupError("no state was observed yet")
        return self._last

    def age_s(self, now_s: float) -> float:
        """The age of that state."""
        return now_s - self.last.time_s

    async def poll(self) -> None:
        """Refresh once a second, or as often as answers arrive."""
        while True:
            began = time.monotonic()
            await self.refresh()
            await asyncio.sleep(max(0.0, PERIOD_S - (time.monotonic() - began)))

    async def refresh(self) -> None:
        """Look again. Without the monitor its last answer stays, completed by what other processes answer."""
        try:
            found = await self._look()
        except PolyphaseError as error:
            if self._last is None:
                raise
            self.fault = error.message
            return
        self.fault = found.fault
        if found.fault and self._last is not None and self._last.verdict is not None:
            self._last = replace(self._last, state=found.state, health=found.health, jobs=found.jobs)
        else:
            self._last = found


def top_page(view: LiveView, width: int, rows: int | None) -> Group:
    """One page with at most `rows` lines of instances."""
    snapshot, age_s = view.last, max(0.0, view.age_s(time.time()))
    whole = Group(*_verdict_rows(snapshot), *pages.instances(snapshot.instances, width, rows))
    if not view.fault and age_s < _OLD_S:
        return whole
    fault = f"The monitor does not answer: {view.fault}" if view.fault else "The monitor has not answered yet."
    head = Text(f"✘ {fault}", "bold red")
    if snapshot.verdict is None:
        return Group(head, *_unhealthy(snapshot.health), Text("Answers of the processes themselves:", "red"), whole)
    age = Text(f"Its answer {duration(age_s)} ago:", "red")
    return Group(head, *_unhealthy(snapshot.health), age, Styled(whole, "dim"))


def _verdict_rows(snapshot: Snapshot) -> Iterator[RenderableType]:
    if snapshot.verdict is not None:
        yield pages.headline(snapshot.verdict)
        for problem in islice(pages.problems(snapshot.verdict), _PROBLEMS):
            yield pages.indented(problem)
        rates = ", ".join(f"{_number(snapshot.rates.get(name))} {what}" for name, what in _RATES.items())
        yield Text(f"{rates} /s; {pages.counted(snapshot.verdict)}", no_wrap=True, overflow="ellipsis")
        yield pages.chain_table(snapshot.verdict)
    elif snapshot.jobs is not None:
        yield Text(f"running jobs: {sum(snapshot.jobs.values())}")
    yield Text()


def _number(value: float | None) -> str:
    return pages.NONE if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _unhealthy(health: Mapping[str, str]) -> Iterator[RenderableType]:
    """One line about the unhealthy processes of this host."""
    faults = [f"{name} ({fault})" for name, fault in health.items() if fault]
    if faults:
        yield Text(f"not healthy: {', '.join(faults)}", "red", no_wrap=True, overflow="ellipsis")
    elif health:
        yield Text(f"the other {len(health)} processes are healthy", "yellow")


async def _in_place(console: Console, view: LiveView) -> None:
    """Draw once a second, however long answers take: the page shows the age of an old state."""
    ended = asyncio.Event()
    with Live(console=console, screen=True, auto_refresh=False, transient=True) as live, pressed_keys(ended):
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(view.poll())
            while not ended.is_set():
                live.update(_fitted(console, view), refresh=True)
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), PERIOD_S)
            looking.cancel()


def _fitted(console: Console, view: LiveView) -> Group:
    """A page that fits the terminal; instances are left out."""
    foot = Text("Ctrl-C or q quits", "dim")
    without = len(console.render_lines(top_page(view, console.width, 0), pad=False))
    rows = max(1, console.height - without - 3)  # the table's head, what it says of emulated ones, the foot
    return Group(top_page(view, console.width, rows), foot)


@contextmanager
def pressed_keys(ended: asyncio.Event) -> Iterator[None]:
    """Within the block, the key q sets `ended`, if the input is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    number, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(number)

    def read() -> None:
        if b"q" in os.read(number, 64):
            ended.set()

    tty.setcbreak(number)
    loop.add_reader(number, read)
    try:
        yield
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)
