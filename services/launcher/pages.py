"""The state of a suite on a terminal: verdict, stages of a request, instances and SLO, fitted to the width.

Instances are rows of the monitor's `GET /instances`: mappings, since `--json` passes them on unchanged.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shared.domain.verdict import Level, Link, Verdict, duration

NONE = "–"
LEVEL_STYLE = {Level.GOOD: "green", Level.IDLE: "dim", Level.DEGRADED: "yellow", Level.DOWN: "bold red"}
STATE_STYLE = {"ready": "green", "starting": "yellow", "draining": "magenta", "unresponsive": "red", "dead": "red"}
_MARKS = {Level.GOOD: "✔", Level.IDLE: "·", Level.DEGRADED: "!", Level.DOWN: "✘"}  # readable without colours
_STATE_ORDER = {"dead": 0, "unresponsive": 1, "starting": 2, "draining": 3, "ready": 4}
_STAGES = {"decode_queue": "decode queue"}
_MIN_NAME = 10


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
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column(f"last {verdict.window_s:.0f} s", style="dim", no_wrap=True)
    for link in verdict.chain:
        name = Text(_STAGES.get(link.stage, link.stage), _link_style(link))
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("jobs now", *(str(link.now) for link in verdict.chain))
    table.add_row("p50", *(_time(link.p50_s) for link in verdict.chain))
    table.add_row("p99", *(_time(link.p99_s) for link in verdict.chain))
    table.add_row("of the time", *(share(link.share) for link in verdict.chain))
    return table


def instances(
    entries: Sequence[Mapping[str, Any]], width: int, max_rows: int | None = None
) -> Iterator[RenderableType]:
    """A table, problems first; beyond `max_rows` the remaining instances are counted in a line."""
    ordered = sorted(entries, key=_urgency)
    shown = ordered if max_rows is None or len(ordered) <= max_rows else ordered[: max(0, max_rows - 1)]
    rows = [_row(entry) for entry in shown]
    names = max((len(row[0]) for row in rows), default=0)
    figures = sum(max([len(head), *(len(str(row[at])) for row in rows)]) + 2 for at, head in _FIGURES)
    table = Table(box=None, padding=(0, 1), pad_edge=False, width=width)
    table.add_column("instance", no_wrap=True, width=min(max(names, 8), max(_MIN_NAME, width - figures - 14)))
    for at, head in _FIGURES:
        table.add_column(head, no_wrap=True, justify="right" if at > 2 else "left")
    table.add_column("accelerator", no_wrap=True, overflow="ellipsis", ratio=1)
    room = table.columns[0].width or _MIN_NAME
    for row in rows:
        style = STATE_STYLE.get(row[2], "")
        table.add_row(elided(row[0], room), row[1], Text(row[2], style), *row[3:])
    if rows:
        yield table
    if left := ordered[len(shown) :]:
        yield Text(f"… and {len(left)} more, {_states(left)}", "dim")
    if any(_emulated(entry) for entry in shown):
        yield Text("* emulated: no real accelerator", "dim")


_FIGURES = ((1, "role"), (2, "state"), (3, "KV"), (4, "run"), (5, "wait"), (6, "to prefill"))


def slo(windows: Sequence[Mapping[str, Any]]) -> Table:
    """Attainment by class and window, with percentiles and the longest gap between two tokens of a stream."""
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("\nSLO class", overflow="ellipsis", no_wrap=True, max_width=13)
    for column in (
        "\nwindow",
        "\nended",
        "\nmet",
        "TTFT\nmet",
        "\np99",
        "TPOT\nmet",
        "\np99",
        "ITL\nmet",
        "longest\ngap p90",
        "\nworst",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for one in windows:
        times = [_time(one[key]["p99"]) for key in ("ttft_s", "tpot_s")]
        gaps = one.get("longest_gap_s", {})  # absent in answers of earlier releases
        table.add_row(
            one["slo"],
            f"{one['window_s']:g} s",
            f"{one['requests']:,}",
            share(one["attainment"]),
            share(one["ttft_attainment"]),
            times[0],
            share(one["tpot_attainment"]),
            times[1],
            share(one.get("itl_attainment")),
            _time(gaps.get("p90")),
            _time(gaps.get("max")),
        )
    return table


def indented(inside: RenderableType) -> Padding:
    """Indented by two columns."""
    return Padding(inside, (0, 0, 0, 2))


def _urgency(entry: Mapping[str, Any]) -> tuple[float, ...]:
    """A sort key: unhealthy instances first, then the busiest."""
    load = entry["load"]
    if not load:
        return (_STATE_ORDER.get(entry["state"], 0), 0.0, 0.0, 0.0)
    return (_STATE_ORDER.get(entry["state"], 0), -load["waiting"], -_used(entry), -load["queued_prefill_tokens"])


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


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    load, info = entry["load"], entry["info"]
    head = (entry["instance_id"], entry["role"], entry["state"])
    accelerator = f"{info['accelerator']}{'*' if _emulated(entry) else ''}" if info else NONE
    if not load or entry["state"] == "dead":
        return (*head, NONE, NONE, NONE, NONE, accelerator)
    return (
        *head,
        f"{100 * _used(entry):.0f} %",
        f"{load['running']:,}",
        f"{load['waiting']:,}",
        f"{load['queued_prefill_tokens']:,}",
        accelerator,
    )


def _used(entry: Mapping[str, Any]) -> float:
    """The share of KV memory in use, 0..1."""
    return 1.0 - float(entry["load"]["free_blocks"]) / max(1, int(entry["info"]["total_blocks"]))


def _emulated(entry: Mapping[str, Any]) -> bool:
    return bool(entry["info"]) and entry["info"]["compatibility"]["engine"] == "emulated"


def _states(entries: Sequence[Mapping[str, Any]]) -> str:
    counts = Counter(str(entry["state"]) for entry in entries)
    if len(counts) == 1:
        return f"all {next(iter(counts))}"
    return ", ".join(
        f"{number} {state}" for state, number in sorted(counts.items(), key=lambda one: _STATE_ORDER[one[0]])
    )


def _time(seconds: float | None) -> str:
    return NONE if seconds is None else duration(seconds)


def counted(verdict: Verdict) -> str:
    """Ready and expected instances by role."""
    parts = [f"{one.ready} of {one.expected} {role.value}" for role, one in verdict.counts.items()]
    return f"ready: {', '.join(parts)}"
