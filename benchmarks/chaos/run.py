"""`polyphase bench chaos`: runs the chosen scenarios, each on a healthy suite, and reports the results.

The report is a line for each scenario, a table, JSON figures and aims, and a page of the documentation.
"""

import asyncio
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.chaos.load import BROKEN, HARM, UNCLEAN, Verdict
from benchmarks.chaos.random_mode import ROUND, random_round
from benchmarks.chaos.scenario import FAMILIES, RECOVER_S, Outcome, Scenario, calm, run_scenario
from benchmarks.chaos.scenarios import SCENARIOS
from benchmarks.chaos.testbeds import OPEN, Testbed
from benchmarks.chaos.under_test import running_suite_under_test
from benchmarks.results import Aim, Result
from services.launcher.up import until_stopped
from shared.errors import InvalidRequest, PolyphaseError

PAGE = "reliability.md"
_COLUMNS = ("whole", "clean error", "lost", "doubled", "wrong", "cut", "hung", "longest wait", "back after")
_PAGE_HEAD = Path(__file__).parent / "reliability_head.md"
_INTERRUPTED = {"the bench ran to its end": {"want": "yes", "got": "interrupted", "met": False}}


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """only: names, or parts of names; empty: all scenarios."""

    only: tuple[str, ...] = ()
    seed: int = 1
    random_minutes: float = 0.0
    write_docs: Path | None = None
    keep_logs: Path | None = None
    kv_transport: str = "tcp"


def run_chaos_bench(options: ChaosOptions, console: Console) -> Result:
    """Returns figures and aims. Raises InvalidRequest when `only` names no scenario."""
    chosen = () if options.random_minutes else choose(options.only)
    bench = _Bench(options, console, len(chosen))
    work = bench.run_random() if options.random_minutes else bench.run(chosen)
    finished = asyncio.run(until_stopped(work, console)) is not None
    if options.random_minutes:
        return bench.random_result(finished)
    console.print(table(bench.outcomes))
    if options.write_docs is not None and finished:
        write_docs(options.write_docs, bench.outcomes, options.seed)
    return as_result(bench.outcomes, bench.took_s, finished)


def choose(only: Sequence[str]) -> tuple[Scenario, ...]:
    """Scenarios whose name is one of the words, or contains one. Raises InvalidRequest that lists the names."""
    exact = {scenario.name for scenario in SCENARIOS} & set(only)
    chosen = tuple(
        s for s in SCENARIOS if not only or s.name in exact or any(word in s.name for word in set(only) - exact)
    )
    if not chosen:
        raise InvalidRequest(f"no scenario named {', '.join(only)}; known: {', '.join(s.name for s in SCENARIOS)}")
    return chosen


def show_scenarios(options: ChaosOptions, console: Console) -> None:
    for scenario in choose(options.only):
        line = f"{scenario.name:24} {scenario.does} [dim]({scenario.bed.name})[/]"
        console.print(line, highlight=False, soft_wrap=True)


class _Bench:
    """Runs scenarios one after the other; a suite serves those of its testbed until one of them leaves it unwell."""

    def __init__(self, options: ChaosOptions, console: Console, total: int) -> None:
        self.outcomes: list[Outcome] = []
        self._options = options
        self._console = console
        self._total = total
        self._began = time.monotonic()
        self._suites = 0
        self._drawn: Counter[str] = Counter()

    @property
    def took_s(self) -> float:
        return time.monotonic() - self._began

    async def run(self, chosen: Sequence[Scenario]) -> bool:
        """Returns True when each scenario has an outcome."""
        try:
            for bed in {scenario.bed.name: scenario.bed for scenario in chosen}.values():
                await self._run_on(bed, (scenario for scenario in chosen if scenario.bed is bed))
        finally:
            self.outcomes.sort(key=lambda outcome: chosen.index(outcome.scenario))
        return True

    async def run_random(self) -> bool:
        """Rounds of random faults until the time is over."""

        def log(text: str) -> None:
            self._console.print(f"[dim]{self.took_s:7.1f} s[/]  {escape(text)}", highlight=False, soft_wrap=True)

        def rounds() -> Iterator[Scenario]:
            for first in itertools.count(0, ROUND):
                if self.took_s > self._options.random_minutes * 60.0:
                    return
                yield random_round(self._options.seed, first, self._drawn, log)

        await self._run_on(OPEN, rounds())
        return True

    async def _run_on(self, bed: Testbed, scenarios: Iterable[Scenario]) -> None:
        bed = replace(bed, kv_transport=self._options.kv_transport)
        waiting = iter(scenarios)
        scenario = next(waiting, None)
        with tempfile.TemporaryDirectory(prefix="polyphase-chaos-") as temporary:
            while scenario is not None:
                self._suites += 1
                folder = (self._options.keep_logs or Path(temporary)) / f"suite-{self._suites}"
                seed, well = self._options.seed, True
                try:
                    async with running_suite_under_test(bed, folder, self._console, seed) as suite:
                        before = await calm(suite, seed)
                        while well and scenario is not None:
                            users_seed = seed + (len(self.outcomes) if self._options.random_minutes else 0)
                            outcome = await run_scenario(suite, scenario, before, users_seed)
                            scenario, well = next(waiting, None), outcome.well
                            self._add(outcome)
                except (PolyphaseError, TimeoutError) as error:
                    if scenario is not None:  # the suite did not start, or does not serve
                        self._add(Outcome(scenario, broke=f"the suite: {error}"))
                        scenario = next(waiting, None)

    def _add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        number = f"{len(self.outcomes)}/{self._total}" if self._total else f"round {len(self.outcomes)}"
        self._console.print(line(outcome, number))

    def random_result(self, finished: bool) -> Result:
        """Figures and aims of the random mode."""
        found = as_result(self.outcomes, self.took_s, finished)["figures"]
        violations = [f"{each.scenario.name}: {fault}" for each in self.outcomes for fault in each.faults]
        figures = {
            "minutes": round(self.took_s / 60.0, 1),
            "faults": self._drawn.total(),
            "rounds": len(self.outcomes),
            "suites": self._suites,
            **{name: value for name, value in found.items() if name.endswith("_answers")},
            "longest_wait_s": found["longest_wait_s"],
            "slowest_recovery_s": found["slowest_recovery_s"],
            **{f"drawn_{name.replace(' ', '_')}": count for name, count in sorted(self._drawn.items())},
        }
        broken = sum(each.tally.count(*BROKEN) for each in self.outcomes)
        got = "; ".join(violations) or f"{found['whole_answers']} whole, {broken} lost with their gateway"
        aim = {"want": "no violation", "got": got, "met": not violations}
        aims = {"every answer whole or clean, every round recovered": aim}
        return {"figures": figures, "aims": aims if finished else {**aims, **_INTERRUPTED}}


def line(outcome: Outcome, number: str) -> str:
    """A result in the markup of the console."""
    mark = "[green]✔[/]" if outcome.ok else "[red]✘[/]"
    cells = cells_of(outcome)
    text = f"{mark} {number} [bold]{outcome.scenario.name}[/] [dim]{escape(outcome.scenario.does)}: "
    text += f"{cells[0]} whole, {cells[1]} clean errors, longest wait {cells[7]}, back after {cells[8]}, "
    text += f"took {outcome.took_s:.0f} s{''.join(f', {note}' for note in outcome.notes)}[/]"
    for fault in outcome.faults:
        text += f"\n    [red]{escape(fault)}[/]"
    for verdict, example in outcome.tally.examples.items():
        text += f"\n    [dim]{verdict}: {escape(example)}[/]"
    return text


def cells_of(outcome: Outcome) -> tuple[str, ...]:
    """The cells of a row, in the order of _COLUMNS."""
    tally, recovered = outcome.tally, outcome.recovered_s
    counts = [tally.count(Verdict.WHOLE), tally.count(Verdict.ERROR), *(tally.count(v) for v in HARM)]
    counts += [tally.count(*BROKEN), tally.count(*UNCLEAN)]
    back = "never" if recovered is None else f"{recovered:.1f} s"
    return (*map(str, counts), f"{tally.longest_gap_s:.1f} s of {outcome.allowed_gap_s:.1f}", back)


def table(outcomes: Sequence[Outcome]) -> Table:
    grid = Table(box=None, padding=(0, 1), header_style="dim")
    grid.add_column("")
    grid.add_column("scenario", no_wrap=True)
    for name in _COLUMNS:
        grid.add_column(name, justify="right")
    for outcome in outcomes:
        mark = "[green]✔[/]" if outcome.ok else "[red]✘[/]"
        grid.add_row(mark, outcome.scenario.name, *cells_of(outcome))
    return grid


def as_result(outcomes: Sequence[Outcome], took_s: float, finished: bool) -> Result:
    """Figures and aims of the JSON line: one aim for each scenario."""
    aims = {outcome.scenario.name: _aim(outcome) for outcome in outcomes} | ({} if finished else _INTERRUPTED)
    figures: dict[str, float] = {
        "scenarios": len(outcomes),
        "passed": sum(outcome.ok for outcome in outcomes),
        "took_s": round(took_s, 1),
        "answers": sum(outcome.tally.counts.total() for outcome in outcomes),
        **{f"{verdict}_answers": sum(o.tally.count(verdict) for o in outcomes) for verdict in Verdict},
        "longest_wait_s": round(max((o.tally.longest_gap_s for o in outcomes), default=0.0), 3),
        "slowest_recovery_s": round(max((o.recovered_s or 0.0 for o in outcomes), default=0.0), 3),
    }
    return {"figures": figures, "aims": aims}


def _aim(outcome: Outcome) -> Aim:
    want = f"whole, no wait over {outcome.allowed_gap_s:.1f} s, back within {RECOVER_S:.0f} s, nothing left behind"
    counts = ", ".join(f"{count} {verdict}" for verdict, count in outcome.tally.counts.items())
    got = "; ".join(outcome.faults) or ", ".join((counts, *outcome.notes))
    return {"want": want, "got": got, "met": outcome.ok}


def write_docs(folder: Path, outcomes: Sequence[Outcome], seed: int) -> None:
    """Write the page: the part that is written by hand, then the tables of this run."""
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
