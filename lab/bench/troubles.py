"""`polyphase bench troubles`: staged troubles, what the verdict says of each, and whether every figure of it is right.

Each trouble is made from outside, under load, on real processes. What the verdict says is compared with what the stager
knows by itself: the processes it killed, and what its clients measured in the same window.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lab.bench.troubles_beds import LATE, LIMITS, REAL
from lab.bench.troubles_known import Known
from lab.bench.troubles_list import MISSING, TROUBLES
from lab.bench.troubles_load import Clients, Wish
from lab.bench.troubles_stage import Stage, Staged, Trouble, counted, stage
from lab.chaos.arena import Arena, started_arena
from lab.chaos.clusters import Testbed
from services.launcher.up import until_stopped
from shared.errors import InvalidRequest

_STEADY = Wish(90, 24), Wish(300, 24)
_DUE_S = 30.0  # after the start the one that never comes is next: a minute after it that is told anyhow


@dataclass(frozen=True, slots=True)
class TroublesOptions:
    """What the command line says. only: names; empty: all."""

    only: tuple[str, ...] = ()
    keep_logs: Path | None = None


def run_troubles_bench(options: TroublesOptions, console: Console) -> dict[str, Any]:
    """Figures and aims. Raises InvalidRequest when `only` names one that there is not."""
    chosen, done = choose(options.only), list[Staged]()
    began = time.monotonic()
    finished = asyncio.run(_until_stopped(_run(chosen, options, console, done), console))
    console.print(table(done))
    return as_result(done, time.monotonic() - began, finished)


def choose(only: Sequence[str]) -> tuple[Trouble, ...]:
    """Those of that name, in their order. Raises InvalidRequest that lists the names."""
    known = [one.name for one in TROUBLES]
    if unknown := sorted(set(only) - set(known)):
        raise InvalidRequest(f"no trouble {', '.join(unknown)}; known: {', '.join(known)}")
    return tuple(one for one in TROUBLES if not only or one.name in only)


async def _until_stopped(work: Any, console: Console) -> bool:
    return await until_stopped(work, console) is not None


async def _run(chosen: Sequence[Trouble], options: TroublesOptions, console: Console, done: list[Staged]) -> bool:
    with tempfile.TemporaryDirectory(prefix="polyphase-troubles-") as folder:
        for name in dict.fromkeys(one.bed.name for one in chosen):
            mine = [one for one in chosen if one.bed.name == name]
            bed = mine[0].bed if MISSING in mine else with_all(mine[0].bed)
            await on_bed(bed, mine, (options.keep_logs or Path(folder)) / name, console, done)
    return True


def with_all(bed: Testbed) -> Testbed:
    """The same without the instance that never comes."""
    entries = [entry for entry in bed.cluster["instances"] if entry["id"] != LATE]
    return replace(bed, cluster={**bed.cluster, "instances": entries}, absent=frozenset())


async def on_bed(bed: Testbed, troubles: Sequence[Trouble], folder: Path, console: Console, done: list[Staged]) -> None:
    """All of these on one suite of it, while steady clients ask."""
    folder.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        arena = await stack.enter_async_context(started_arena(bed, folder, console, 1, LIMITS))
        monitor = await stack.enter_async_context(arena.suite.monitor())
        on = _stage(arena, monitor)
        await stack.enter_async_context(on.clients.users(2 if bed.name == REAL.name else 4, *_STEADY))
        waiting, began = list(troubles), time.monotonic()
        while waiting:
            due = MISSING in waiting and time.monotonic() - began > _DUE_S
            trouble = MISSING if due else waiting[0]
            waiting.remove(trouble)
            done.append(await stage(on, trouble))
            console.print(line(done[-1]))


def _stage(arena: Arena, monitor: Any) -> Stage:
    states = {name: "starting" if name in arena.bed.absent else "ready" for name in arena.roles.first}
    clients = Clients(arena.gateways)
    counts = counted(states, arena.roles.first)
    schedulers = len(arena.named("scheduler"))
    known = Known(counts, clients.shots, gateways=len(arena.gateways), schedulers=schedulers)
    return Stage(arena, clients, monitor, states, known)


def line(staged: Staged) -> str:
    """One trouble, as soon as it is done, in the markup of the console."""
    mark = "[green]✔[/]" if staged.ok else "[red]✘[/]"
    said = f"{mark} [bold]{staged.trouble.name}[/] [dim]{escape(staged.trouble.does)}[/]\n    {escape(staged.headline)}"
    for fault in staged.faults:
        said += f"\n    [red]{escape(fault)}[/]"
    for figure in staged.figures:
        if not figure.ok:
            said += f"\n    [red]{escape(f'{figure.name}: said {figure.said}, want {figure.want}')}[/]"
    return said


def table(done: Sequence[Staged]) -> Table:
    """All troubles, for people."""
    made = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("", "trouble", "headline", "cause"):
        made.add_column(name, overflow="fold")
    for name in ("alarm", "clear", "figures"):
        made.add_column(name, justify="right", no_wrap=True)
    for staged in done:
        mark = "[green]✔ ok[/]" if staged.ok else "[red]✘ wrong[/]"
        right = sum(figure.ok for figure in staged.figures)
        figures = f"{right} of {len(staged.figures)}"
        times = _seconds(staged.alarm_s), _seconds(staged.clear_s)
        made.add_row(mark, staged.trouble.name, escape(staged.headline), escape(staged.cause), *times, figures)
    return made


def _seconds(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"


def as_result(done: Sequence[Staged], took_s: float, finished: bool) -> dict[str, Any]:
    """Figures and aims of the JSON line: one aim a trouble."""
    figures: dict[str, Any] = {"took_s": round(took_s, 1)}
    aims = {"finished": {"want": "all troubles staged", "got": "yes" if finished else "interrupted", "met": finished}}
    for staged in done:
        name, right = staged.trouble.name.replace("-", "_"), sum(figure.ok for figure in staged.figures)
        figures |= {f"{name}_alarm_s": _rounded(staged.alarm_s), f"{name}_clear_s": _rounded(staged.clear_s)}
        figures |= {f"{name}_figures": len(staged.figures), f"{name}_wrong": len(staged.figures) - right}
        got = "; ".join(staged.faults) or f"{right} of {len(staged.figures)} figures right"
        aims[staged.trouble.name] = {"want": "named with its cause, all figures right", "got": got, "met": staged.ok}
    return {"figures": figures, "aims": aims}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
