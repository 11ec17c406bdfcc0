"""`polyphase bench chaos` and `bench troubles`: run the chosen scenarios, each on a healthy suite."""

import asyncio
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from benchmarks.chaos.random_mode import ROUND, random_round
from benchmarks.chaos.report import as_result, line, random_result, table, write_docs
from benchmarks.chaos.scenario import Outcome, Scenario, calm, run_scenario
from benchmarks.chaos.scenarios import SCENARIOS, TROUBLES
from benchmarks.chaos.testbeds import OPEN, Testbed
from benchmarks.chaos.under_test import SuiteUnderTest, running_suite_under_test
from benchmarks.results import Result
from services.launcher.up import until_stopped
from shared.errors import InvalidRequest, PolyphaseError, Unavailable

MAX_STARTS = 5  # failed starts in a row that end the random mode
FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 30.0  # after a failed start; doubles with each further one


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """only: names, or parts of names; empty: all scenarios."""

    only: tuple[str, ...] = ()
    seed: int = 1
    random_minutes: float = 0.0
    write_docs: Path | None = None
    keep_logs: Path | None = None
    kv_transport: str = "tcp"


def run_chaos_bench(options: ChaosOptions, console: Console, scenarios: Sequence[Scenario] = SCENARIOS) -> Result:
    """Returns figures and aims. Raises InvalidRequest when a word of `only` names no scenario."""
    chosen = () if options.random_minutes else choose(options.only, scenarios)
    bench = _Bench(options, console, len(chosen))
    work = bench.run_random() if options.random_minutes else bench.run(chosen)
    finished = asyncio.run(until_stopped(work, console)) is not None
    if options.random_minutes:
        return random_result(bench.outcomes, bench.took_s, finished, bench.drawn, bench.suites)
    console.print(table(bench.outcomes))
    if options.write_docs is not None and finished:
        write_docs(options.write_docs, bench.outcomes, options.seed)
    return as_result(bench.outcomes, bench.took_s, finished)


def run_troubles_bench(options: ChaosOptions, console: Console) -> Result:
    """The same with the scenarios whose problem the monitor's verdict must name."""
    return run_chaos_bench(options, console, TROUBLES)


def choose(only: Sequence[str], scenarios: Sequence[Scenario] = SCENARIOS) -> tuple[Scenario, ...]:
    """Scenarios whose name is one of the words, or contains one. Raises InvalidRequest that lists the names."""
    names = [scenario.name for scenario in scenarios]
    chosen = set() if only else set(names)
    for word in only:
        found = {word} if word in names else {name for name in names if word in name}
        if not found:
            raise InvalidRequest(f"no scenario named {word}; known: {', '.join(names)}")
        chosen |= found
    return tuple(scenario for scenario in scenarios if scenario.name in chosen)


def show_scenarios(options: ChaosOptions, console: Console) -> None:
    for scenario in choose(options.only):
        line = f"{scenario.name:24} {scenario.description} [dim]({scenario.bed.name})[/]"
        console.print(line, highlight=False, soft_wrap=True)


def start_pause_s(failed_starts: int) -> float:
    """The pause after so many failed starts in a row."""
    return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (failed_starts - 1))


class _Bench:
    """Runs scenarios one after the other; a suite serves those of its testbed until it is not healthy any more."""

    def __init__(self, options: ChaosOptions, console: Console, total: int) -> None:
        self.outcomes: list[Outcome] = []
        self._options = options
        self._console = console
        self._total = total
        self._began = time.monotonic()
        self.suites = 0
        self._failed_starts = 0  # in a row
        self.drawn: Counter[str] = Counter()

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
                yield random_round(self._options.seed, first, self.drawn, log)

        await self._run_on(OPEN, rounds())
        return True

    async def _run_on(self, bed: Testbed, scenarios: Iterable[Scenario]) -> None:
        with tempfile.TemporaryDirectory(prefix="polyphase-chaos-") as temporary:
            async with AsyncExitStack() as running:
                suite: SuiteUnderTest | None = None
                for scenario in scenarios:
                    serves = suite is not None
                    try:
                        if suite is None:
                            suite = await running.enter_async_context(self._suite(bed, Path(temporary)))
                            before = await calm(suite, self._options.seed)
                        serves, self._failed_starts = True, 0
                        seed = self._options.seed + (len(self.outcomes) if self._options.random_minutes else 0)
                        outcome = await run_scenario(suite, scenario, before, seed)
                    except (PolyphaseError, TimeoutError) as error:  # the suite did not start, or does not serve
                        outcome = Outcome(scenario, broke=f"the suite: {error}")
                    self._add(outcome)
                    if not outcome.suite_is_healthy:
                        await running.aclose()
                        suite = None
                    if not serves and self._options.random_minutes:
                        await self._pause_after_failed_start(outcome)

    async def _pause_after_failed_start(self, outcome: Outcome) -> None:
        """Raises Unavailable after `MAX_STARTS` failed starts in a row."""
        self._failed_starts += 1
        if self._failed_starts >= MAX_STARTS:
            raise Unavailable(f"no suite started {MAX_STARTS} times in a row: {outcome.broke}")
        await asyncio.sleep(start_pause_s(self._failed_starts))

    def _suite(self, bed: Testbed, folder: Path) -> AbstractAsyncContextManager[SuiteUnderTest]:
        self.suites += 1
        folder = (self._options.keep_logs or folder) / f"suite-{self.suites}"
        bed = replace(bed, kv_transport=self._options.kv_transport)
        return running_suite_under_test(bed, folder, self._console, self._options.seed)

    def _add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        number = f"{len(self.outcomes)}/{self._total}" if self._total else f"round {len(self.outcomes)}"
        self._console.print(line(outcome, number))
