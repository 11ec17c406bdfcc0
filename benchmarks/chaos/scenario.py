"""A scenario: a fault and its highest cost to clients. Its run has load, the fault, and recovery; then nothing may be
left behind.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos.faults import Fault
from benchmarks.chaos.load import BROKEN, HARM, UNCLEAN, Load, Tally, Verdict
from benchmarks.chaos.recovery import POLL_S, RECOVER_S, Footprint, footprint, left_behind, missing, stall_watch
from benchmarks.chaos.testbeds import EMULATED, Testbed
from benchmarks.chaos.under_test import SuiteUnderTest

HANG_S = 1.0  # a wait beyond the scenario's outage that passes
WARM_S = 30.0
CALM_S = 3.0
BEFORE_S = 1.0  # the machine's speed may have changed since: the rate just before the fault counts too
_RATE_SHARE = 0.6  # of the calm rate, over _WINDOW_S: with few users chance alone moves it by a fifth or so
_WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """One fault under load, and its highest cost to clients."""

    name: str
    description: str
    fault: Fault
    bed: Testbed = EMULATED
    outage_s: float = 0.0  # clients may wait for so long, beside the time that the fault measures (`suite.outage`)
    errors: bool = False  # clients may get typed errors
    breaks: bool = False  # the fault takes a gateway away, and with it the connections of its clients
    bound_s: float = 40.0  # the longest time of the fault itself
    resets: bool = False  # the bench resets roles afterwards; otherwise the suite has to recover without help


# All scenarios by family, in the order of the report. The modules of `scenarios` fill them.
_ORDER = "processes, roles, links, frames, clients, bodies, connections, database, control plane, failover, losses"
VERDICTS = "verdicts"  # the family of `bench troubles`
FAMILIES: dict[str, list[Scenario]] = {
    name: [] for name in (*f"{_ORDER}, clocks, versions, strangers, KV, mobility, one request".split(", "), VERDICTS)
}


def scenario(
    family: str, name: str, description: str, fault: Fault | None = None, *, bed: Testbed = EMULATED, **costs: Any
) -> Callable[[Fault], None]:
    """Add a scenario to a family; without `fault` a decorator of the fault.

    costs: `outage_s`, `errors`, `breaks`, `bound_s` of `Scenario`.
    """

    def add(fault: Fault) -> None:
        FAMILIES[family].append(Scenario(name, description, fault, bed, **costs))

    if fault is not None:
        add(fault)
    return add


@dataclass(slots=True)
class Outcome:
    scenario: Scenario
    tally: Tally = field(default_factory=Tally)
    outage_s: float = 0.0
    calm_gap_s: float = 0.0  # the longest wait without a fault, on this machine
    stalled_s: float = 0.0  # the longest time for which the machine kept the bench from running
    recovered_s: float | None = None  # None: not within the bound
    missing: list[str] = field(default_factory=list)  # what was not back within the bound
    left: list[str] = field(default_factory=list)  # what was left behind, without users
    died: list[str] = field(default_factory=list)  # processes that ended and were not the fault's targets
    broke: str = ""  # why the fault could not be carried out, or what it found
    took_s: float = 0.0
    notes: list[str] = field(default_factory=list)  # measurements of the fault
    figures: dict[str, float] = field(default_factory=dict)  # the same, for the JSON

    @property
    def allowed_gap_s(self) -> float:
        """The longest wait between two signs of life that passes."""
        return max(self.outage_s, self.scenario.outage_s) + HANG_S + self.calm_gap_s + self.stalled_s

    @property
    def faults(self) -> list[str]:
        found = [f"{self.tally.count(v)} {v}" for v in (*HARM, *UNCLEAN) if self.tally.count(v)]
        if not self.scenario.errors and (count := self.tally.count(Verdict.ERROR)):
            found.append(f"{count} refused or failed")
        if not self.scenario.breaks:
            found += [f"{self.tally.count(v)} {v}" for v in BROKEN if self.tally.count(v)]
        if self.tally.longest_gap_s > self.allowed_gap_s:
            found.append(f"a wait of {self.tally.longest_gap_s:.1f} s, {self.allowed_gap_s:.1f} s allowed")
        if self.recovered_s is None:
            found.append(f"not back after {RECOVER_S:.0f} s: {'; '.join(self.missing)}")
        if self.left:
            found.append(f"left behind: {'; '.join(self.left)}")
        return [*([self.broke] if self.broke else []), *self.died, *found]

    @property
    def ok(self) -> bool:
        return not self.faults

    @property
    def suite_is_healthy(self) -> bool:
        """Whether the next scenario can use the suite."""
        return self.recovered_s is not None and not (self.broke or self.left)


@dataclass(frozen=True, slots=True)
class Calm:
    """The undisturbed suite, with which the suite after a fault is compared."""

    rate: float  # tokens per second
    gap_s: float
    footprint: Footprint


async def calm(suite: SuiteUnderTest, seed: int) -> Calm:
    """Load the suite for some seconds. Raises TimeoutError when it does not serve."""
    async with suite.users(seed) as load:
        await load.warm(WARM_S)
        began = time.monotonic()
        await asyncio.sleep(CALM_S)
        rate = load.rate(began, time.monotonic())
    await left_behind(suite, footprint(suite), time.time())
    return Calm(rate, load.tally.longest_gap_s, footprint(suite))


async def run_scenario(suite: SuiteUnderTest, scenario: Scenario, before: Calm, seed: int) -> Outcome:
    """Run a scenario on a healthy suite. Failures are in the outcome."""
    outcome = Outcome(scenario, calm_gap_s=before.gap_s)
    began, suite.outage_s, now = time.monotonic(), 0.0, footprint(suite)
    suite.notes, suite.figures = outcome.notes, outcome.figures
    suite.processes.touched.clear()
    since_s = time.time()
    async with stall_watch() as stalled:
        async with suite.users(seed) as load:
            suite.load, outcome.tally = load, load.tally
            try:
                await load.warm(WARM_S)
            except TimeoutError:
                outcome.broke = f"before the fault, not every user was answered within {WARM_S:.0f} s"
            await asyncio.sleep(BEFORE_S)
            rate = load.rate(time.monotonic() - BEFORE_S, time.monotonic())
            await _fault(suite, scenario, outcome)
            resetting = [asyncio.create_task(suite.reset_roles())] if scenario.resets else []
            await _recover(suite, load, min(rate, before.rate), outcome)
            await asyncio.gather(*resetting, return_exceptions=True)
        outcome.left = await left_behind(suite, before.footprint, since_s)
    outcome.died = [
        f"{name} died by itself: {status.note or 'it was restarted'}"
        for name, status in suite.processes.statuses.items()
        if status.restarts > now.restarts[name] and name not in suite.processes.touched
    ]
    outcome.stalled_s, outcome.outage_s = stalled[0], suite.outage_s
    outcome.took_s = time.monotonic() - began
    return outcome


async def _fault(suite: SuiteUnderTest, scenario: Scenario, outcome: Outcome) -> None:
    try:
        async with asyncio.timeout(scenario.bound_s):
            await scenario.fault(suite)
    except TimeoutError:
        outcome.broke = f"the fault did not end within {scenario.bound_s:.0f} s"
    except Exception as error:  # a boundary: a scenario that breaks must not end the bench
        outcome.broke = f"{type(error).__name__}: {error}"
    finally:
        await suite.restore()


async def _recover(suite: SuiteUnderTest, load: Load, calm_rate: float, outcome: Outcome) -> None:
    """Wait until all processes serve and users get tokens at the former rate; RECOVER_S and a window at most."""
    since_mono, whole_s = time.monotonic(), 0.0
    while time.monotonic() < since_mono + RECOVER_S + _WINDOW_S:
        outcome.missing = await missing(suite)
        now = time.monotonic()
        whole_s = 0.0 if outcome.missing else whole_s or now
        rate = load.rate(now - _WINDOW_S, now)
        enough = rate >= _RATE_SHARE * calm_rate and load.served_since(since_mono)
        if whole_s and enough and now - _WINDOW_S >= since_mono:
            outcome.recovered_s = max(whole_s, now - _WINDOW_S) - since_mono
            return
        if whole_s and not enough:
            outcome.missing = [f"{rate:.0f} tokens/s of {calm_rate:.0f}"]
        await asyncio.sleep(POLL_S)
