"""Runs one scenario: load, fault, recovery, and a look at what is left."""

import asyncio
import time
from dataclasses import dataclass

from lab.chaos.arena import Arena, StallWatch
from lab.chaos.recovery import Footprint, Recovery, died, footprint, look_behind, recovered
from lab.chaos.scenario import Outcome, Scenario

WARM_S = 30.0
CALM_S = 3.0
BEFORE_S = 1.0  # the machine's speed may have changed since: the rate just before the fault counts too


@dataclass(frozen=True, slots=True)
class Calm:
    """The suite when nothing disturbs it: what faults are compared with."""

    rate: float  # tokens a second
    gap_s: float
    footprint: Footprint


async def calm(arena: Arena, seed: int) -> Calm:
    """Load it for some seconds. Raises TimeoutError when it does not serve."""
    async with arena.users(seed) as load:
        await load.warm(WARM_S)
        began = time.monotonic()
        await asyncio.sleep(CALM_S)
        rate = load.rate(began, time.monotonic())
    await look_behind(arena, footprint(arena), Recovery(), time.time())
    return Calm(rate, load.tally.longest_gap_s, footprint(arena))


async def run_scenario(arena: Arena, scenario: Scenario, before: Calm, seed: int) -> Outcome:
    """One scenario on a suite that is well. Whatever goes wrong is in the outcome."""
    outcome = Outcome(scenario, seed, calm_gap_s=before.gap_s)
    began, arena.away_s, now = time.monotonic(), 0.0, footprint(arena)
    arena.notes = outcome.notes
    arena.processes.touched.clear()
    since_s = time.time()
    async with StallWatch() as watch:
        async with arena.users(seed) as load:
            arena.load, outcome.tally = load, load.tally
            try:
                await load.warm(WARM_S)
            except TimeoutError:
                outcome.broke = f"before the fault, not every user was answered within {WARM_S:.0f} s"
            await asyncio.sleep(BEFORE_S)
            rate = load.rate(time.monotonic() - BEFORE_S, time.monotonic())
            await _fault(arena, scenario, outcome)
            healed = time.monotonic()
            outcome.recovery = await recovered(arena, load, min(rate, before.rate), healed)
        await look_behind(arena, before.footprint, outcome.recovery, since_s)
    outcome.died = died(arena, now)
    outcome.stalled_s, outcome.away_s = watch.longest_s, arena.away_s
    outcome.took_s = time.monotonic() - began
    return outcome


async def _fault(arena: Arena, scenario: Scenario, outcome: Outcome) -> None:
    try:
        async with asyncio.timeout(scenario.bound_s):
            await scenario.fault(arena)
    except TimeoutError:
        outcome.broke = f"the fault did not end within {scenario.bound_s:.0f} s"
    except Exception as error:  # a boundary: one scenario that breaks must not end the bench
        outcome.broke = f"{type(error).__name__}: {error}"
    finally:
        await arena.restore()
