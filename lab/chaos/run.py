"""`polyphase bench chaos`: the chosen scenarios, each on a suite that is well, and what became of them."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lab.chaos.arena import Arena, running_arena
from lab.chaos.clusters import Testbed
from lab.chaos.load import BROKEN, HARM, UNCLEAN, Verdict
from lab.chaos.monkey import random_run
from lab.chaos.scenario import RECOVER_S, Calm, Outcome, Scenario, calm, run_scenario
from lab.chaos.scenarios import FAMILIES, SCENARIOS
from services.launcher.up import until_stopped
from shared.errors import InvalidRequest, PolyphaseError

# MERGED report.py
# What the bench found: a line as it comes, a table at the end, the JSON contract, and a page of the documentation.


PAGE = "reliability.md"
_COLUMNS = ("whole", "clean error", "lost", "doubled", "wrong", "cut", "hung", "longest wait", "back after")
_PAGE_HEAD = Path(__file__).parent / "reliability_head.md"


def line(outcome: Outcome, number: int, total: int) -> str:
    """One scenario, as soon as it is done, in the markup of the console."""
    mark = "[green]✔[/]" if outcome.ok else "[red]✘[/]"
    cells = cells_of(outcome)
    said = f"{mark} {number}/{total} [bold]{outcome.scenario.name}[/] [dim]{escape(outcome.scenario.does)}: "
    said += f"{cells[0]} whole, {cells[1]} clean errors, longest wait {cells[7]}, back after {cells[8]}, "
    said += f"took {outcome.took_s:.0f} s{''.join(f', {note}' for note in outcome.notes)}[/]"
    for fault in outcome.faults:
        said += f"\n    [red]{escape(fault)}[/]"
    for verdict, example in outcome.tally.examples.items():
        said += f"\n    [dim]{verdict}: {escape(example)}[/]"
    return said


def cells_of(outcome: Outcome) -> tuple[str, ...]:
    """The figures of one row, in the order of _COLUMNS."""
    tally, recovered = outcome.tally, outcome.recovery.recovered_s
    counts = [tally.count(Verdict.WHOLE), tally.count(Verdict.ERROR), *(tally.count(v) for v in HARM)]
    counts += [tally.count(*BROKEN), tally.count(*UNCLEAN)]
    back = "never" if recovered is None else f"{recovered:.1f} s"
    return (*map(str, counts), f"{tally.longest_gap_s:.1f} s of {outcome.allowed_gap_s:.1f}", back)


def table(outcomes: Sequence[Outcome]) -> Table:
    """All scenarios, for people."""
    made = Table(box=None, padding=(0, 1), header_style="dim")
    made.add_column("")
    made.add_column("scenario", no_wrap=True)
    for name in _COLUMNS:
        made.add_column(name, justify="right")
    for outcome in outcomes:
        mark = "[green]✔[/]" if outcome.ok else "[red]✘[/]"
        made.add_row(mark, outcome.scenario.name, *cells_of(outcome))
    return made


def as_result(outcomes: Sequence[Outcome], took_s: float, finished: bool) -> dict[str, Any]:
    """Figures and aims of the JSON line: one aim a scenario."""
    aims = {outcome.scenario.name: _aim(outcome) for outcome in outcomes}
    if not finished:
        aims |= interrupted()["aims"]
    figures: dict[str, float] = {
        "scenarios": len(outcomes),
        "passed": sum(outcome.ok for outcome in outcomes),
        "took_s": round(took_s, 1),
        "answers": sum(outcome.tally.counts.total() for outcome in outcomes),
        **{f"{verdict}_answers": sum(o.tally.count(verdict) for o in outcomes) for verdict in Verdict},
        "longest_wait_s": round(max((o.tally.longest_gap_s for o in outcomes), default=0.0), 3),
        "slowest_recovery_s": round(max((o.recovery.recovered_s or 0.0 for o in outcomes), default=0.0), 3),
    }
    return {"figures": figures, "aims": aims}


def interrupted() -> dict[str, Any]:
    """The result of a run that was ended from outside."""
    return {"figures": {}, "aims": {"the bench ran to its end": {"want": "yes", "got": "interrupted", "met": False}}}


def _aim(outcome: Outcome) -> dict[str, Any]:
    want = f"whole, no wait over {outcome.allowed_gap_s:.1f} s, back within {RECOVER_S:.0f} s, nothing left behind"
    counts = ", ".join(f"{count} {verdict}" for verdict, count in outcome.tally.counts.items())
    got = "; ".join(outcome.faults) or ", ".join((counts, *outcome.notes))
    return {"want": want, "got": got, "met": outcome.ok}


def write_docs(folder: Path, outcomes: Sequence[Outcome], seed: int) -> None:
    """The page: what is written by hand, then the tables of this run."""
    by_name = {outcome.scenario.name: outcome for outcome in outcomes}
    command = f"polyphase bench chaos --seed {seed} --write-docs docs"
    text = [_PAGE_HEAD.read_text().rstrip(), "", f"Written by `{command}`.", ""]
    for family, scenarios in FAMILIES.items():
        rows = [by_name[scenario.name] for scenario in scenarios if scenario.name in by_name]
        if rows:
            text += [f"### {family[0].upper()}{family[1:]}", "", *_markdown(rows), ""]
    failed = [outcome for outcome in outcomes if not outcome.ok]
    text += ["### What did not pass", ""]
    text += [f"- `{o.scenario.name}`: {'; '.join(o.faults)}" for o in failed] or ["Nothing."]
    (folder / PAGE).write_text("\n".join(text) + "\n")


def _markdown(rows: Sequence[Outcome]) -> list[str]:
    head = ("scenario", "what is done", "engines", *_COLUMNS, "passed")
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for outcome in rows:
        scenario = outcome.scenario
        passed = "yes" if outcome.ok else "**no**"
        cells = (f"`{scenario.name}`", scenario.does, scenario.bed.name, *cells_of(outcome), passed)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """What the command line says. `only`: names, or parts of names; empty: all."""

    only: tuple[str, ...] = ()
    seed: int = 1
    random_minutes: float = 0.0
    write_docs: Path | None = None
    keep_logs: Path | None = None
    kv_transport: str = "tcp"


def run_chaos_bench(options: ChaosOptions, console: Console) -> dict[str, Any]:
    """Figures and aims. Raises InvalidRequest when `only` names nothing."""
    if options.random_minutes:
        return asyncio.run(_random(options, console))
    chosen = choose(options.only)
    bench = _Bench(options, console, len(chosen))
    finished = asyncio.run(_until_stopped(bench.run(chosen), console))
    console.print(table(bench.outcomes))
    if options.write_docs is not None and finished:
        write_docs(options.write_docs, bench.outcomes, options.seed)
    return as_result(bench.outcomes, bench.took_s, finished)


def choose(only: Sequence[str]) -> tuple[Scenario, ...]:
    """The scenarios whose names contain one of the words. Raises InvalidRequest that lists the names."""
    exact = {scenario.name for scenario in SCENARIOS} & set(only)
    chosen = tuple(
        s for s in SCENARIOS if not only or s.name in exact or any(word in s.name for word in set(only) - exact)
    )
    if not chosen:
        raise InvalidRequest(f"no scenario {', '.join(only)}; known: {', '.join(s.name for s in SCENARIOS)}")
    return chosen


def show_scenarios(options: ChaosOptions, console: Console) -> None:
    """The names and what each does."""
    for scenario in choose(options.only):
        line = f"{scenario.name:24} {scenario.does} [dim]({scenario.bed.name})[/]"
        console.print(line, highlight=False, soft_wrap=True)


async def _until_stopped(work: Any, console: Console) -> bool:
    return await until_stopped(work, console) is not None


async def _random(options: ChaosOptions, console: Console) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="polyphase-chaos-") as folder:
        found = await until_stopped(
            random_run(options.keep_logs or Path(folder), options.random_minutes * 60.0, options.seed, console), console
        )
    return found if found is not None else interrupted()


@dataclass(slots=True)
class _Bench:
    """One after the other; a suite serves all scenarios of its testbed until one of them leaves it unwell."""

    options: ChaosOptions
    console: Console
    total: int
    outcomes: list[Outcome] = field(default_factory=list)
    took_s: float = 0.0
    suites: int = 0

    async def run(self, chosen: Sequence[Scenario]) -> bool:
        """Every scenario has an outcome at the end."""
        began = time.monotonic()
        beds = {scenario.bed.name: scenario.bed for scenario in chosen}
        try:
            with tempfile.TemporaryDirectory(prefix="polyphase-chaos-") as folder:
                for bed in beds.values():
                    mine = [scenario for scenario in chosen if scenario.bed is bed]
                    await self._on(bed, mine, self.options.keep_logs or Path(folder))
        finally:
            order = [scenario.name for scenario in chosen]
            self.outcomes.sort(key=lambda outcome: order.index(outcome.scenario.name))
            self.took_s = time.monotonic() - began
        return True

    async def _on(self, bed: Testbed, scenarios: list[Scenario], folder: Path) -> None:
        waiting = list(scenarios)
        while waiting:
            self.suites += 1
            try:
                async with AsyncExitStack() as stack:
                    bed = replace(bed, kv_transport=self.options.kv_transport)
                    made = running_arena(bed, folder / f"suite-{self.suites}", self.console, self.options.seed)
                    arena = await stack.enter_async_context(made)
                    before = await calm(arena, self.options.seed)
                    async for outcome in self._while_well(arena, before, waiting):
                        self._note(outcome)
            except (PolyphaseError, TimeoutError) as error:
                if waiting:  # the suite did not start, or does not serve
                    self._note(Outcome(waiting.pop(0), self.options.seed, broke=f"the suite: {error}"))

    async def _while_well(self, arena: Arena, before: Calm, waiting: list[Scenario]) -> AsyncIterator[Outcome]:
        while waiting:
            outcome = await run_scenario(arena, waiting.pop(0), before, self.options.seed)
            yield outcome
            if outcome.broke or outcome.recovery.recovered_s is None or outcome.recovery.left:
                return  # what comes next shall not suffer from it

    def _note(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.console.print(line(outcome, len(self.outcomes), self.total))
