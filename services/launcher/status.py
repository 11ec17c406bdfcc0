"""`polyphase status`: how a running suite does, worst first; of use with the monitor away, too."""

from collections.abc import Iterator, Mapping

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.launcher import pages
from services.launcher.sight import Seen
from services.launcher.state_file import RunningProcess
from shared.domain.verdict import Level, count

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
