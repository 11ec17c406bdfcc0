"""What `polyphase up` shows on the terminal: the start of the processes, the welcome, and later changes."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from services.launcher.spec import Plan
from services.launcher.supervisor import State, Status

PROGRESS_S = 15.0  # between two lines about one download
_MARKS = {
    State.WAITING: ("·", "dim"),
    State.STARTING: ("◐", "yellow"),
    State.READY: ("✔", "green"),
    State.RESTARTING: ("↻", "magenta"),
    State.FAILED: ("✘", "red"),
    State.STOPPED: ("■", "dim"),
}


class StatusDisplay:
    """During the start a live table, if the output is a terminal; else a line for each process that becomes ready,
    restarts or fails.
    """

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._statuses: dict[str, Status] = {}
        self._began = time.monotonic()
        self._live = False
        self._progress_mono: dict[str, float] = {}  # by process, when a line about its download was written

    @contextmanager
    def start(self, statuses: Iterable[Status]) -> Iterator[None]:
        """Show the start of these processes, in this order, within the block."""
        self._statuses = {status.name: status for status in statuses}
        if not self._console.is_terminal:
            self._console.print(self._title)
            yield
            return
        self._live = True
        try:
            with Live(get_renderable=self._table, console=self._console, refresh_per_second=5, transient=True):
                yield
        finally:
            self._live = False
            self._console.print(self._table())

    def update(self, status: Status) -> None:
        self._statuses[status.name] = status
        if not self._live and (line := _line(status)) and self._due(status):
            mark, style = _MARKS[status.state]
            self._console.print(f"[{style}]{mark}[/] {status.name}: {line}")

    def _due(self, status: Status) -> bool:
        if status.download is None or status.state is not State.STARTING:
            return True
        now_mono = time.monotonic()
        if now_mono - self._progress_mono.get(status.name, -PROGRESS_S) < PROGRESS_S:
            return False
        self._progress_mono[status.name] = now_mono
        return True

    def _table(self) -> Table:
        elapsed = time.monotonic() - self._began
        title = f"{self._title}  {elapsed:4.0f} s"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
        for column in ("process", "state", "seconds", "pid"):
            table.add_column(column, justify="right" if column in ("seconds", "pid") else "left")
        for status in self._statuses.values():
            mark, style = _MARKS[status.state]
            state = Text(f"{status.state.value} {status.note}", style)
            table.add_row(f"[{style}]{mark}[/] {status.name}", state, _seconds(status), str(status.pid or ""))
        return table


def _line(status: Status) -> str:
    """What is worth a line of its own; empty for other states."""
    match status.state:
        case State.STARTING if status.download is not None:
            return status.note
        case State.READY:
            return f"ready after {status.took_s:.1f} s (process {status.pid})"
        case State.RESTARTING:
            return status.note
        case State.FAILED:
            return f"failed: {status.note}"
    return ""


def _seconds(status: Status) -> str:
    if status.state is State.STARTING:
        return f"{time.monotonic() - status.since_mono:.0f}"
    return f"{status.took_s:.1f}" if status.took_s else ""


def welcome(console: Console, plan: Plan, took_s: float, memory_bytes: int, late: Sequence[str] = ()) -> None:
    """The addresses of a suite that is ready, a first request to try, and the instances that are late."""
    lines = [f"API        [bold]{plan.api_url}/v1[/]"] if plan.runs_control else []
    if plan.dashboard_url:
        lines.append(f"Dashboard  [bold]{plan.dashboard_url}[/]")
    lines.append(f"Instances  {', '.join(plan.instance_ids) or 'on other hosts'}")
    lines.append(f"Memory     {memory_bytes / 2**30:.2f} GiB, all processes")
    if plan.runs_control:
        lines += ["", "Try it     " + _example(plan).replace("\n", "\n             ")]
    title = f"Polyphase serves {plan.model}: ready after {took_s:.1f} s"
    console.print(Panel("\n".join(lines), title=title, title_align="left", border_style="green", expand=False))
    console.print("Ctrl-C stops everything. In another shell: polyphase status, top, logs NAME, --help")
    if late:
        are = "is" if len(late) == 1 else "are"
        console.print(
            f"[yellow]{', '.join(late)} {are} not ready yet[/] and {are} being restarted; the others serve. "
            "`launcher: {start_s: …}` in the cluster file raises the time limit."
        )


def _example(plan: Plan) -> str:
    body = f'{{"model": "{plan.model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    key = " -H 'Authorization: Bearer <your API key>'" if plan.api_keys else ""
    return f"curl {plan.api_url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n-d '{body}'"
