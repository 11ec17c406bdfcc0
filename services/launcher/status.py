"""`polyphase status`: how a running suite does, worst first; of use with the monitor away, too."""

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
from typing import Any

import httpx
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.styled import Styled
from rich.table import Table
from rich.text import Text

from services.launcher import pages, state_file
from services.launcher.health import HttpHealth
from services.launcher.state_file import RunningProcess, SuiteState
from shared.domain.job import Phase
from shared.domain.verdict import Level, Verdict, count, duration
from shared.errors import DeadlineExceeded, NotFound, PolyphaseError, Unavailable
from shared.wire.clients.http import JsonClient
from shared.wire.clients.monitor import MonitorClient
from shared.wire.clients.scheduler import SchedulerAdmin

# MERGED sight.py
# What can be seen of a running suite: from its monitor, and where that is away from everybody else.


ASK_S = 2.0  # the longest that one process is waited for
_JOBS = 10_000  # of a scheduler's memory that are counted


@dataclass(frozen=True, slots=True)
class Seen:
    """A suite at one moment (unix seconds). `fault`: why the monitor says nothing; then it is from the others.

    instances: as the monitor lists them; where it is away, those of this host, as each says of itself. health: by
    process, what is wrong with it, empty if nothing. jobs: under way by phase, as the schedulers know; None where that
    was not asked for.
    """

    time_s: float
    state: SuiteState | None = None
    fault: str = ""
    verdict: Verdict | None = None
    instances: Sequence[Mapping[str, Any]] = ()
    slo: Sequence[Mapping[str, Any]] = ()
    rates: Mapping[str, float | None] = field(default_factory=dict)
    health: Mapping[str, str] = field(default_factory=dict)
    jobs: Mapping[str, int] | None = None

    def as_json(self) -> dict[str, Any]:
        """For programs. What nobody knows is null."""
        away = bool(self.fault)
        answer: dict[str, Any] = {
            "instances": None if away and not self.instances else list(self.instances),
            "slo": None if away else list(self.slo),
            "verdict": None if self.verdict is None else msgspec.to_builtins(self.verdict),
        }
        if away:
            answer |= {"monitor_fault": self.fault, "jobs": None if self.jobs is None else dict(self.jobs)}
        if self.state is None:
            return answer
        told = {"api_url": self.state.api_url, "dashboard_url": self.state.dashboard_url}
        return {**told, "processes": [self._process(each) for each in self.state.processes], **answer}

    def _process(self, process: RunningProcess) -> dict[str, Any]:
        told = {key: getattr(process, key) for key in ("name", "pid", "state", "restarts", "fault")}
        return told | ({"health": self.health[process.name] or "ok"} if process.name in self.health else {})


async def observe(data_dir: Path, given: str = "", *, rates: bool = False) -> Seen:
    """All that can be seen now. Raises NotFound where no suite runs, the monitor's error where nobody else is known."""
    state = _state_of(data_dir, given)
    url = given or (state.monitor_url if state is not None else "")
    try:
        return await _by_monitor(url, state, rates)
    except (Unavailable, DeadlineExceeded) as error:
        if state is None:
            raise
        return await _observe_without_monitor(state, error.message)


def _state_of(data_dir: Path, given: str) -> SuiteState | None:
    """The suite of the data folder, unless another one's monitor is given. Raises NotFound where there is neither."""
    try:
        state = state_file.read(data_dir)
    except NotFound:
        if given:
            return None
        raise
    return state if given in ("", state.monitor_url) else None


async def _by_monitor(url: str, state: SuiteState | None, rates: bool) -> Seen:
    async with MonitorClient(url) as monitor:
        asked = [monitor.call("GET", path) for path in ("/verdict", "/instances", "/slo")]
        verdict, instances, slo = await asyncio.gather(*asked)
        found = await _fetch_rates(monitor) if rates else {}
    return Seen(time.time(), state, "", msgspec.convert(verdict, Verdict), instances, slo, found)


async def _fetch_rates(monitor: JsonClient) -> dict[str, float | None]:
    """The newest of each series of the last minutes."""
    answer = await monitor.call("GET", "/history", params={"minutes": 5, "points": 60})
    series: Mapping[str, Sequence[float | None]] = answer["series"]
    return {
        name: next((each for each in reversed(values) if each is not None), None) for name, values in series.items()
    }


async def _observe_without_monitor(state: SuiteState, fault: str) -> Seen:
    """What the launcher's state file says, and what its processes do when they are asked one by one."""
    async with httpx.AsyncClient() as http:
        known = [process for process in state.processes if process.url]
        instances = [process for process in known if process.name in state.instance_ids]
        health, selves, jobs = await asyncio.gather(
            asyncio.gather(*(_health(process.url) for process in known)),
            asyncio.gather(*(_self(http, process) for process in instances)),
            _jobs(state.scheduler_urls),
        )
    said = dict(zip((process.name for process in known), health, strict=True))
    return Seen(time.time(), state, fault, instances=selves, health=said, jobs=jobs)


async def _health(url: str) -> str:
    return await HttpHealth(url).ask(ASK_S)


async def _self(http: httpx.AsyncClient, process: RunningProcess) -> dict[str, Any]:
    """An instance as the monitor would list it, from its own words."""
    nothing = {"instance_id": process.name, "role": "", "state": "dead", "info": None, "load": None}
    try:
        response = await http.get(f"{process.url.removesuffix('/health')}/instance", timeout=ASK_S)
        said = response.raise_for_status().json()
    except httpx.TimeoutException:
        return nothing | {"state": "unresponsive"}
    except (httpx.HTTPError, ValueError):
        return nothing | {"state": "starting" if process.state == "starting" else "dead"}
    state = "draining" if said["draining"] else "ready"
    return nothing | {"role": said["role"], "state": state, "info": said["info"], "load": said["load"]}


async def _jobs(urls: Sequence[str]) -> dict[str, int] | None:
    """Jobs that have not ended, by phase, over all schedulers; None where none answers."""
    counts: Counter[str] = Counter()
    answered = False
    for rows in await asyncio.gather(*(_rows(url) for url in urls)):
        if rows is not None:
            answered = True
            counts += Counter(str(row["phase"]) for row in rows if not Phase(row["phase"]).final)
    return dict(counts) if answered else None


async def _rows(url: str) -> list[dict[str, Any]] | None:
    async with SchedulerAdmin(url) as scheduler:
        try:
            return await scheduler.requests(limit=_JOBS)
        except PolyphaseError:
            return None


# Exit codes; 1 is an error (no suite runs there), 2 a word that is not understood.
DEGRADED, DOWN = 3, 4
_CODES = {Level.GOOD: 0, Level.IDLE: 0, Level.DEGRADED: DEGRADED, Level.DOWN: DOWN}
_LEAST_ROWS = 5  # of instances, however low the terminal is
_AWAY = (
    "What follows is what the launcher's state file says, the processes themselves when they are asked, and the "
    "schedulers. Requests are still served."
)
_AWAY_TOO = "Nobody serves requests: see below."


def exit_code(seen: Seen) -> int:
    """0: good, or nothing is asked for; DEGRADED, also without a monitor; DOWN."""
    if seen.verdict is not None:
        return _CODES[seen.verdict.level]
    return DEGRADED if _serves(seen) else DOWN


def show(console: Console, seen: Seen, *, everything: bool = False) -> None:
    """For people. Of many instances, and unless `everything` is wanted, as many as a terminal has room for."""
    above = [*(_verdict(seen) if seen.verdict is not None else _without_monitor(seen)), *_processes(seen), Text()]
    below = [*_slo(seen), *_addresses(seen)]
    most = None
    if console.is_terminal and not everything:
        taken = len(console.render_lines(Group(*above, *below), pad=False))
        most = max(_LEAST_ROWS, console.height - taken - 3)  # the table's head, the note below it, the prompt
    console.print(Group(*above, *pages.instances(seen.instances, console.width, most), *below))


def _verdict(seen: Seen) -> Iterator[RenderableType]:
    assert seen.verdict is not None
    yield pages.headline(seen.verdict)
    for line in pages.problems(seen.verdict):
        yield pages.indented(line)
    yield pages.chain(seen.verdict)
    if seen.verdict.level in (Level.DEGRADED, Level.DOWN):  # else the headline says so
        ended = count(seen.verdict.requests, "request")
        yield Text(f"{pages.counted(seen.verdict)}; {ended} ended in {seen.verdict.window_s:.0f} s", "dim")


def _without_monitor(seen: Seen) -> Iterator[RenderableType]:
    yield Text(f"✘ The monitor does not answer: {seen.fault}", "bold red")
    yield Text(_AWAY if _serves(seen) else _AWAY_TOO, "yellow")
    if seen.jobs is None:
        yield Text("No scheduler answers either: what is under way is not known.", "red")
    else:
        phases = ", ".join(f"{number} in {phase}" for phase, number in seen.jobs.items())
        yield Text(f"{count(sum(seen.jobs.values()), 'job')} under way{': ' + phases if phases else ''}")


def _serves(seen: Seen) -> bool:
    """Whether, by what is seen, requests are served: a scheduler answers, and so does an instance of each role."""
    roles = {entry["role"] for entry in seen.instances if entry["state"] == "ready"}
    return seen.jobs is not None and {"prefill", "decode"} <= roles


def _processes(seen: Seen) -> Iterator[RenderableType]:
    """Those that are not as they should be; with the monitor away all of them, with what they say."""
    if seen.state is None:
        return
    if seen.fault:
        yield Text()
        yield _table(seen.state.processes, seen.health)
        return
    for process in seen.state.processes:
        if process.state != "ready":
            because = f": {process.fault}" if process.fault else ""
            yield Text(f"{process.name}: {process.state}{because}", "red")
        elif process.restarts:
            again = f"started again {_times(process.restarts)}, the last time because: {process.fault}"
            yield Text(f"{process.name}: {again}", "dim")


def _slo(seen: Seen) -> Iterator[RenderableType]:
    if seen.slo:
        yield Text()
        yield pages.slo(seen.slo)


def _addresses(seen: Seen) -> Iterator[RenderableType]:
    if seen.state is not None:
        dashboard = f"   dashboard {seen.state.dashboard_url}" if seen.state.dashboard_url else ""
        yield Text(f"\nAPI {seen.state.api_url}{dashboard}", "dim")


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _table(processes: tuple[RunningProcess, ...], health: Mapping[str, str]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in ("process", "pid", "state", "restarts", "says of itself"):
        table.add_column(
            column, no_wrap=column != "says of itself", justify="right" if column == "restarts" else "left"
        )
    for one in processes:
        fault = health.get(one.name)
        says = Text(pages.NONE if fault is None else fault or "healthy", "red" if fault else "")
        state = Text(one.state, "" if one.state == "ready" else "red")
        table.add_row(pages.elided(one.name, 24), str(one.pid or pages.NONE), state, str(one.restarts), says)
    return table


# MERGED top.py
# `polyphase top`: the suite, looked at once a second, until Ctrl-C or q.


PERIOD_S = 1.0
_PIPED_ROWS = 20
_PROBLEMS = 3  # of which the causes are told
_OLD_S = 3.0
Look = Callable[[], Awaitable[Seen]]


async def run_top(console: Console, look: Look, *, once: bool = False) -> None:
    """Show what `look` sees, on a terminal in place, elsewhere one page after the other.

    Raises what `look` raises at first; once there was something to see that stays, greyed, with its age.
    """
    seen = Sights(look)
    await seen.refresh()
    if once:
        console.print(top_page(seen, console.width, None))
    elif console.is_terminal:
        await _in_place(console, seen)
    else:
        while True:
            console.print(top_page(seen, console.width, _PIPED_ROWS))
            console.print()
            console.file.flush()
            await asyncio.sleep(PERIOD_S)
            await seen.refresh()


class Sights:
    """What was seen last, and what was wrong since."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._last: Seen | None = None
        self.fault = ""

    @property
    def last(self) -> Seen:
        """The last whole picture. Raises LookupError before the first."""
        if self._last is None:
            raise LookupError("nothing was seen yet")
        return self._last

    def age_s(self, now_s: float) -> float:
        """Of that picture."""
        return now_s - self.last.time_s

    async def keep_looking(self) -> None:
        """Once a second, or as often as there are answers."""
        while True:
            began = time.monotonic()
            await self.refresh()
            await asyncio.sleep(max(0.0, PERIOD_S - (time.monotonic() - began)))

    async def refresh(self) -> None:
        """Look again. What the monitor said stays while it is away; who is asked instead adds what they know."""
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


def top_page(sights: Sights, width: int, rows: int | None) -> Group:
    """All of it; at most `rows` lines of instances."""
    seen, age_s = sights.last, max(0.0, sights.age_s(time.time()))
    whole = Group(*_verdict_rows(seen), *pages.instances(seen.instances, width, rows))
    if not sights.fault and age_s < _OLD_S:
        return whole
    said = f"The monitor does not answer: {sights.fault}" if sights.fault else "The monitor has not answered yet."
    told = Text(f"✘ {said}", "bold red")
    if seen.verdict is None:
        return Group(told, *_unwell(seen.health), Text("What the processes say themselves:", "red"), whole)
    age = Text(f"What it said {duration(age_s)} ago:", "red")
    return Group(told, *_unwell(seen.health), age, Styled(whole, "dim"))


def _verdict_rows(seen: Seen) -> Iterator[RenderableType]:
    if seen.verdict is not None:
        yield pages.headline(seen.verdict)
        for problem in islice(pages.problems(seen.verdict), _PROBLEMS):
            yield pages.indented(problem)
        yield Text(f"{_rates_text(seen.rates)}; {pages.counted(seen.verdict)}", no_wrap=True, overflow="ellipsis")
        yield pages.chain_table(seen.verdict)
    elif seen.jobs is not None:
        yield Text(f"jobs under way: {sum(seen.jobs.values())}")
    yield Text()


def _rates_text(rates: Mapping[str, float | None]) -> str:
    """Requests, tokens in and out, each a second."""
    told = [f"{_number(rates.get(name))} {what}" for name, what in _RATES.items()]
    return f"{', '.join(told)} /s"


_RATES = {"requests_per_s": "requests", "prompt_tokens_per_s": "tokens in", "output_tokens_per_s": "tokens out"}


def _number(value: float | None) -> str:
    return pages.NONE if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _unwell(health: Mapping[str, str]) -> Iterator[RenderableType]:
    """The processes of this host that say they are not well, in a line."""
    unwell = [f"{name} ({fault})" for name, fault in health.items() if fault]
    if unwell:
        yield Text(f"not healthy: {', '.join(unwell)}", "red", no_wrap=True, overflow="ellipsis")
    elif health:
        yield Text(f"the other {len(health)} processes say that they are well", "yellow")


async def _in_place(console: Console, sights: Sights) -> None:
    """Drawn once a second, whatever the answers take: a picture that grows old says so."""
    ended = asyncio.Event()
    with Live(console=console, screen=True, auto_refresh=False, transient=True) as live, pressed_keys(ended):
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(sights.keep_looking())
            while not ended.is_set():
                live.update(_fitted(console, sights), refresh=True)
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), PERIOD_S)
            looking.cancel()


def _fitted(console: Console, sights: Sights) -> Group:
    """As much as the terminal has room for: instances give way."""
    foot = Text("Ctrl-C or q ends", "dim")
    without = len(console.render_lines(top_page(sights, console.width, 0), pad=False))
    rows = max(1, console.height - without - 3)  # the table's head, what it says of emulated ones, the foot
    return Group(top_page(sights, console.width, rows), foot)


@contextmanager
def pressed_keys(ended: asyncio.Event) -> Iterator[None]:
    """While the block runs, q ends: letters come as they are typed, if this is typed on a terminal."""
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
