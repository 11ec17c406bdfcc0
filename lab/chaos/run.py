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

from lab.chaos import report
from lab.chaos.arena import Arena, running_arena
from lab.chaos.clusters import Testbed
from lab.chaos.monkey import random_run
from lab.chaos.runner import Calm, calm, run_scenario
from lab.chaos.scenario import Outcome, Scenario
from lab.chaos.scenarios import SCENARIOS
from services.launcher.up import until_stopped
from shared.errors import InvalidRequest, PolyphaseError


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
    console.print(report.table(bench.outcomes))
    if options.write_docs is not None and finished:
        report.write_docs(options.write_docs, bench.outcomes, options.seed)
    return report.as_result(bench.outcomes, bench.took_s, finished)


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
    return found if found is not None else report.interrupted()


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
        self.console.print(report.line(outcome, len(self.outcomes), self.total))
