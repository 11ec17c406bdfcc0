"""The state of a suite on a terminal: verdict, stages of a request, instances and SLO, fitted to the width; and the
form of the tables that the commands print.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import msgspec
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shared.domain.instance import InstanceInfo, InstanceState, Role
from shared.domain.slo import SloReport
from shared.domain.verdict import Level, Link, Verdict, duration
from shared.wire.api.monitor import EMULATED, InstanceRow, LoadByName

NONE = "–"
LEVEL_STYLE = {Level.GOOD: "green", Level.IDLE: "dim", Level.DEGRADED: "yellow", Level.DOWN: "bold red"}
STATE_STYLE = {  # the most urgent state first
    InstanceState.DEAD: "red",
    InstanceState.UNRESPONSIVE: "red",
    InstanceState.STARTING: "yellow",
    InstanceState.DRAINING: "magenta",
    InstanceState.READY: "green",
}
_MARKS = {Level.GOOD: "✔", Level.IDLE: "·", Level.DEGRADED: "!", Level.DOWN: "✘"}  # readable without colours
_STATE_ORDER = {state: position for position, state in enumerate(STATE_STYLE)}
_STAGES = {"decode_queue": "decode queue"}
_MIN_NAME = 10
_FIGURES = ("KV", "run", "wait", "to prefill")


class LocalInstance(msgspec.Struct, frozen=True):
    """An instance of this host as it describes itself, while the monitor does not answer; None where it does not
    answer either.
    """

    instance_id: str
    state: InstanceState
    role: Role | None = None
    info: InstanceInfo | None = None
    load: LoadByName | None = None


Instance = InstanceRow | LocalInstance


def plain_table(*columns: str, right: Collection[str] = (), fold: str = "") -> Table:
    """A table without lines. right: columns of figures; fold: the column whose text is wrapped. Without any column
    names the caller adds the columns, and there is no head.
    """
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=bool(columns))
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in right else "left",
            no_wrap=column != fold,
            overflow="fold" if column == fold else "ellipsis",
        )
    return table


def headline(verdict: Verdict) -> Text:
    return Text(f"{_MARKS[verdict.level]} {verdict.headline}", LEVEL_STYLE[verdict.level])


def problems(verdict: Verdict) -> Iterator[Text]:
    """One line for each problem, except those without a cause that the headline already names."""
    for problem in verdict.problems:
        if problem.text in verdict.headline and not problem.cause:
            continue
        text = f"{problem.text}: {problem.cause}" if problem.cause else problem.text
        yield Text(f"{_MARKS[problem.level]} {text}", LEVEL_STYLE[problem.level])


def chain(verdict: Verdict) -> Text:
    """One line with the share of time in each stage of a request, or the jobs in each stage while none has ended."""
    line = Text(overflow="fold")
    timed = any(link.share is not None for link in verdict.chain)
    line.append("time " if timed else "now  ", "dim")
    for index, link in enumerate(verdict.chain):
        line.append(" → " if index else "", "dim")
        figure = f"{100 * (link.share or 0.0):.0f} %" if timed else str(link.now)
        line.append(f"{_STAGES.get(link.stage, link.stage)} {figure}", _link_style(link))
    return line


def chain_table(verdict: Verdict) -> Table:
    """The stages with their figures: jobs now, median and 99th percentile, share of all time."""
    first, stages = f"last {verdict.window_s:.0f} s", [_STAGES.get(link.stage, link.stage) for link in verdict.chain]
    table = plain_table(first, *stages, right=stages)
    table.columns[0].style = "dim"
    for column, link in zip(table.columns[1:], verdict.chain, strict=True):
        column.header_style = _link_style(link)
    table.add_row("jobs now", *(str(link.now) for link in verdict.chain))
    table.add_row("p50", *(time(link.p50_s) for link in verdict.chain))
    table.add_row("p99", *(time(link.p99_s) for link in verdict.chain))
    table.add_row("of the time", *(share(link.share) for link in verdict.chain))
    return table


def instances(entries: Sequence[Instance], width: int, max_rows: int | None = None) -> Iterator[RenderableType]:
    """A table, problems first; beyond `max_rows` the remaining instances are counted in a line."""
    ordered = sorted(entries, key=_urgency)
    shown = ordered if max_rows is None or len(ordered) <= max_rows else ordered[: max(0, max_rows - 1)]
    if shown:
        yield _instance_table(shown, width)
    if left := ordered[len(shown) :]:
        yield Text(f"… and {len(left)} more, {_states(left)}", "dim")
    if any(_emulated(entry) for entry in shown):
        yield Text("* emulated: no real accelerator", "dim")


def _instance_table(entries: Sequence[Instance], width: int) -> Table:
    rows = [(entry.instance_id, entry.role or "", entry.state, *_figures(entry)) for entry in entries]
    heads = ("instance", "role", "state", *_FIGURES)
    widths = [max(len(head), *(len(row[at]) for row in rows)) for at, head in enumerate(heads)]
    room = min(max(widths[0], 8), max(_MIN_NAME, width - sum(widths[1:]) - 2 * len(widths[1:]) - 14))
    table = plain_table(*heads, "accelerator", right=_FIGURES)
    table.width, table.columns[0].width, table.columns[-1].ratio = width, room, 1
    for entry, row in zip(entries, rows, strict=True):
        accelerator = f"{entry.info.accelerator}{'*' if _emulated(entry) else ''}" if entry.info else NONE
        state = Text(entry.state, STATE_STYLE[entry.state])
        table.add_row(elided(entry.instance_id, room), row[1], state, *row[3:], accelerator)
    return table


def slo(windows: Sequence[SloReport]) -> Table:
    """Attainment by class and window, with percentiles and the longest gap between two tokens of a stream."""
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("\nSLO class", overflow="ellipsis", no_wrap=True, max_width=13)
    heads = ("\nwindow", "\nended", "\nmet", "TTFT\nmet", "\np99", "TPOT\nmet", "\np99", "ITL\nmet")
    for head in (*heads, "longest\ngap p90", "\nworst"):
        table.add_column(head, justify="right", no_wrap=True)
    for report in windows:
        table.add_row(
            report.slo,
            f"{report.window_s:g} s",
            f"{report.requests:,}",
            share(report.attainment),
            share(report.ttft_attainment),
            time(report.ttft_s["p99"]),
            share(report.tpot_attainment),
            time(report.tpot_s["p99"]),
            share(report.itl_attainment),
            time(report.longest_gap_s.get("p90")),
            time(report.longest_gap_s.get("max")),
        )
    return table


def indented(inside: RenderableType) -> Padding:
    """Indented by two columns."""
    return Padding(inside, (0, 0, 0, 2))


def _urgency(entry: Instance) -> tuple[float, ...]:
    """A sort key: unhealthy instances first, then the busiest."""
    order, load = _STATE_ORDER[entry.state], entry.load
    if load is None:
        return (order, 0.0, 0.0, 0.0)
    return (order, -load.waiting, -_used(entry), -load.queued_prefill_tokens)


def elided(name: str, room: int) -> str:
    """At most `room` letters, shortened in the middle because names differ at their ends."""
    if len(name) <= room:
        return name
    tail = (room - 1) * 2 // 3
    return f"{name[: room - 1 - tail]}…{name[len(name) - tail :]}"


def share(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.0f} %"


def _link_style(link: Link) -> str:
    return LEVEL_STYLE[link.level] if link.level in (Level.DEGRADED, Level.DOWN) else ""


def _figures(entry: Instance) -> tuple[str, ...]:
    load = entry.load
    if load is None or entry.state is InstanceState.DEAD:
        return (NONE,) * len(_FIGURES)
    counts = (load.running, load.waiting, load.queued_prefill_tokens)
    return (f"{100 * _used(entry):.0f} %", *(f"{count:,}" for count in counts))


def _used(entry: Instance) -> float:
    """The share of KV memory in use, 0..1."""
    if entry.load is None or entry.info is None:
        return 0.0
    return 1.0 - entry.load.free_blocks / max(1, entry.info.total_blocks)


def _emulated(entry: Instance) -> bool:
    return entry.info is not None and entry.info.compatibility.engine == EMULATED


def _states(entries: Sequence[Instance]) -> str:
    counts = Counter(entry.state for entry in entries)
    if len(counts) == 1:
        return f"all {next(iter(counts))}"
    return ", ".join(f"{counts[state]} {state}" for state in STATE_STYLE if state in counts)


def time(seconds: float | None) -> str:
    return NONE if seconds is None else duration(seconds)


def counted(verdict: Verdict) -> str:
    """Ready and expected instances by role."""
    parts = [f"{count.ready} of {count.expected} {role.value}" for role, count in verdict.counts.items()]
    return f"ready: {', '.join(parts)}"
