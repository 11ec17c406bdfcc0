"""What a person sees while the suite starts and runs."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from services.launcher.keeper import State, Status
from services.launcher.spec import Plan

_MARKS = {
    State.WAITING: ("·", "dim"),
    State.STARTING: ("◐", "yellow"),
    State.READY: ("✔", "green"),
    State.RESTARTING: ("↻", "magenta"),
    State.FAILED: ("✘", "red"),
    State.STOPPED: ("■", "dim"),
}


class StartDisplay:
    """A live table on a terminal; elsewhere one line for each process that becomes ready."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._statuses: dict[str, Status] = {}
        self._began = time.monotonic()
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=5, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        else:
            self._console.print(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
            self._console.print(self._table())

    def expect(self, statuses: tuple[Status, ...]) -> None:
        """Show these, in this order, from the beginning."""
        for status in statuses:
            self._statuses.setdefault(status.name, status)

    def update(self, status: Status) -> None:
        """Show a change."""
        self._statuses[status.name] = status
        if not self._console.is_terminal and status.state in (State.READY, State.RESTARTING, State.FAILED):
            self._console.print(_line(status))

    def _table(self) -> Table:
        elapsed = time.monotonic() - self._began
        title = f"{self._title}  {elapsed:4.0f} s"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
        for column in ("process", "state", "seconds", "pid"):
            table.add_column(column, justify="right" if column in ("seconds", "pid") else "left")
        for status in self._statuses.values():
            mark, style = _MARKS[status.state]
            table.add_row(
                f"[{style}]{mark}[/] {status.name}",
                Text(f"{status.state.value} {status.note}", style),
                _seconds(status),
                str(status.pid or ""),
            )
        return table


def announce(console: Console, status: Status) -> None:
    """One line about something that happened to a running suite."""
    if status.state in (State.RESTARTING, State.READY, State.FAILED):
        console.print(_line(status))


def welcome(console: Console, plan: Plan, took_s: float, memory_bytes: int) -> None:
    """Where to go, once everything is ready."""
    lines = [f"API        [bold]{plan.api_url}/v1[/]"] if plan.runs_control else []
    if plan.dashboard_url:
        lines.append(f"Dashboard  [bold]{plan.dashboard_url}[/]")
    lines.append(f"Instances  {', '.join(plan.instance_ids) or 'on other hosts'}")
    lines.append(f"Memory     {memory_bytes / 2**30:.2f} GiB, all processes")
    if plan.runs_control:
        lines += ["", "Try it     " + _example(plan).replace("\n", "\n             ")]
    title = f"Polyphase serves {plan.model}: ready after {took_s:.1f} s"
    text = "\n".join(lines)
    console.print(Panel(text, title=title, title_align="left", border_style="green", expand=False))
    console.print("Ctrl-C stops everything. In another shell: polyphase status, top, logs NAME, --help")


def late(console: Console, names: Sequence[str]) -> None:
    """A word on instances whose start took too long, while others serve."""
    if names:
        are = "is" if len(names) == 1 else "are"
        console.print(
            f"[yellow]{', '.join(names)} {are} not ready yet[/] and {are} being started again; the others serve. "
            "`launcher: {start_s: …}` in the cluster file gives a start longer."
        )


def _example(plan: Plan) -> str:
    body = f'{{"model": "{plan.model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    key = " -H 'Authorization: Bearer <your API key>'" if plan.api_keys else ""
    return f"curl {plan.api_url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n-d '{body}'"


def _line(status: Status) -> str:
    mark, style = _MARKS[status.state]
    words = {
        State.READY: f"ready after {status.took_s:.1f} s (process {status.pid})",
        State.RESTARTING: status.note,
        State.FAILED: f"failed: {status.note}",
    }.get(status.state, status.state.value)
    return f"[{style}]{mark}[/] {status.name}: {words}"


def _seconds(status: Status) -> str:
    if status.state is State.STARTING:
        return f"{time.monotonic() - status.since_s:.0f}"
    return f"{status.took_s:.1f}" if status.took_s else ""
