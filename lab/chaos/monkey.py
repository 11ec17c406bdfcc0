"""The random mode: faults drawn from a seed, overlapping, under load, for as long as told.

Always: no answer lost, doubled, wrong, crashed or hung. Every ROUND draws the faults end, and the suite must be back
within the bound, with nothing left behind; a suite that is not is replaced by a fresh one, and the run goes on.
"""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from lab.chaos.arena import Arena, running_arena
from lab.chaos.clusters import OPEN
from lab.chaos.draws import Draw, draw
from lab.chaos.judge import BROKEN, HARM, UNCLEAN, Tally, Verdict
from lab.chaos.recovery import died, footprint, look_behind, recovered
from lab.chaos.runner import WARM_S, Calm, calm

ROUND = 12
_END_S = 30.0  # the longest that a fault may take to end


@dataclass(slots=True)
class Findings:
    """What a run found so far."""

    seed: int
    console: Console
    began_s: float = field(default_factory=time.monotonic)
    tally: Tally = field(default_factory=Tally)
    drawn: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    rounds: int = 0
    suites: int = 0
    slowest_s: float = 0.0

    def say(self, text: str) -> None:
        """One line of the log."""
        self.console.print(f"[dim]{time.monotonic() - self.began_s:7.1f} s[/]  {text}", highlight=False, soft_wrap=True)

    def violate(self, first: int, what: str) -> None:
        """Something that must not be; `first` is the first draw of its round."""
        self.violations.append(f"draws {first} to {first + ROUND - 1}: {what}")
        self.say(f"[red]{escape(what)}[/]")


async def random_run(folder: Path, seconds: float, seed: int, console: Console, first: int = 0) -> dict[str, Any]:
    """Figures and aims. Raises StartFailed or Unavailable when the suite does not start."""
    found, number = Findings(seed, console), first
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        found.suites += 1
        async with running_arena(OPEN, folder / f"suite-{found.suites}", console, seed) as arena:
            before, well = await calm(arena, seed), True
            while well and time.monotonic() < end_s:
                well = await _round(arena, before, found, number)
                number += ROUND
    found.say(f"{number - first} faults in {found.rounds} rounds; {len(found.violations)} violations")
    return _result(found, number - first)


async def _round(arena: Arena, before: Calm, found: Findings, first: int) -> bool:
    """ROUND faults and a look at what they left; whether the suite is well."""
    arena.processes.touched.clear()
    now, since_s = footprint(arena), time.time()
    async with arena.users(found.seed + first) as load:
        load.tally = Tally()
        try:
            await load.warm(WARM_S)
        except TimeoutError:
            found.violate(first, f"not every user was answered within {WARM_S:.0f} s, without any fault")
            return False
        await _faults(arena, found, first)
        await arena.restore()
        healed_s = time.monotonic()
        putting_back = asyncio.create_task(arena.roles.as_first(_END_S))
        recovery = await recovered(arena, load, before.rate, healed_s)
        await asyncio.gather(putting_back, return_exceptions=True)
    await look_behind(arena, before.footprint, recovery, since_s)
    left = [*recovery.left, *recovery.ghosts, *died(arena, now)]
    _judge(found, load.tally, first)
    found.rounds += 1
    found.slowest_s = max(found.slowest_s, recovery.recovered_s or 0.0)
    if recovery.recovered_s is None:
        found.violate(first, f"not back: {'; '.join(recovery.missing)}")
    if left:
        found.violate(first, f"left behind: {'; '.join(left)}")
    back = "not back" if recovery.recovered_s is None else f"back after {recovery.recovered_s:.1f} s"
    found.say(f"draws {first} to {first + ROUND - 1}: {_summary(load.tally)}, {back}")
    return recovery.recovered_s is not None and not recovery.left


async def _faults(arena: Arena, found: Findings, first: int) -> None:
    """They begin when they were drawn to, whether or not the one before has ended."""
    running: list[asyncio.Task[None]] = []
    try:
        for number in range(first, first + ROUND):
            drawn = draw(found.seed, number)
            await asyncio.sleep(drawn.pause_s)
            running.append(asyncio.create_task(_act(arena, drawn, found, first)))
        await asyncio.wait(running, timeout=_END_S)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _act(arena: Arena, drawn: Draw, found: Findings, first: int) -> None:
    found.drawn[drawn.name] += 1
    began = time.monotonic()
    try:
        whom = await drawn.act(arena, drawn.rng, drawn.seconds)
    except Exception as error:  # a boundary: a fault that cannot be made is a finding, not the end
        whom = f"could not be made: {type(error).__name__}: {error}"
        found.violate(first, f"{drawn.name} {whom}")
    found.say(f"{drawn.number:4} {drawn.name}: {escape(whom)}, {time.monotonic() - began:.1f} s")


def _judge(found: Findings, tally: Tally, first: int) -> None:
    for verdict in (*HARM, *UNCLEAN):
        if count := tally.count(verdict):
            found.violate(first, f"{count} {verdict}: {tally.examples[verdict]}")
    found.tally.counts += tally.counts
    found.tally.longest_gap_s = max(found.tally.longest_gap_s, tally.longest_gap_s)


def _summary(tally: Tally) -> str:
    counts = ", ".join(f"{count} {verdict}" for verdict, count in tally.counts.items())
    return f"{counts}, longest wait {tally.longest_gap_s:.1f} s"


def _result(found: Findings, faults: int) -> dict[str, Any]:
    figures: dict[str, float] = {
        "minutes": round((time.monotonic() - found.began_s) / 60.0, 1),
        "faults": faults,
        "rounds": found.rounds,
        "suites": found.suites,
        **{f"{v}_answers": found.tally.count(v) for v in Verdict},
        "longest_wait_s": round(found.tally.longest_gap_s, 3),
        "slowest_recovery_s": round(found.slowest_s, 3),
        **{f"drawn_{name.replace(' ', '_')}": count for name, count in sorted(found.drawn.items())},
    }
    whole = found.tally.count(Verdict.WHOLE)
    broken = found.tally.count(*BROKEN)
    got = "; ".join(found.violations) or f"{whole} whole, {broken} lost with their gateway"
    aim = {"want": "no violation", "got": got, "met": not found.violations}
    return {"figures": figures, "aims": {"every answer whole or clean, every round recovered": aim}}
