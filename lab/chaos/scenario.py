"""What a scenario is: a fault in words and in code, and what it may cost."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from lab.chaos.arena import Arena
from lab.chaos.clusters import EMULATED, Testbed
from lab.chaos.judge import BROKEN, HARM, UNCLEAN, Tally, Verdict
from lab.chaos.recovery import RECOVER_S, Recovery

HANG_S = 1.0  # a wait beyond what the scenario takes away
Fault = Callable[[Arena], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One fault under load.

    away_s: for so long clients miss something they cannot do without, beside what the fault itself measures with
    `Arena.away`. errors: whether clients may get clean errors. breaks: whether it takes a gateway away, and with it the
    connections of its clients. bound_s: the longest that the fault itself may take; a scenario that hangs has failed.
    """

    name: str
    does: str
    fault: Fault
    bed: Testbed = EMULATED
    away_s: float = 0.0
    errors: bool = False
    breaks: bool = False
    bound_s: float = 40.0


@dataclass(slots=True)
class Outcome:
    """What became of one run of a scenario."""

    scenario: Scenario
    seed: int
    tally: Tally = field(default_factory=Tally)
    away_s: float = 0.0
    calm_gap_s: float = 0.0  # the longest wait without any fault, on this machine
    stalled_s: float = 0.0  # for so long the bench itself was kept from running
    recovery: Recovery = field(default_factory=Recovery)
    died: list[str] = field(default_factory=list)  # processes that nobody touched
    broke: str = ""  # why the scenario could not be carried out, or what it found by itself
    took_s: float = 0.0
    notes: list[str] = field(default_factory=list)  # what it measured by itself

    @property
    def allowed_gap_s(self) -> float:
        """The longest wait that passes."""
        return max(self.away_s, self.scenario.away_s) + HANG_S + self.calm_gap_s + self.stalled_s

    @property
    def faults(self) -> list[str]:
        """Everything that is not as it should be."""
        found = [f"{self.tally.count(v)} {v}" for v in (*HARM, *UNCLEAN) if self.tally.count(v)]
        if not self.scenario.errors and (count := self.tally.count(Verdict.ERROR)):
            found.append(f"{count} refused or failed")
        if not self.scenario.breaks:
            found += [f"{self.tally.count(v)} {v}" for v in BROKEN if self.tally.count(v)]
        if self.tally.longest_gap_s > self.allowed_gap_s:
            found.append(f"a wait of {self.tally.longest_gap_s:.1f} s, {self.allowed_gap_s:.1f} s allowed")
        if self.recovery.recovered_s is None:
            found.append(f"not back after {RECOVER_S:.0f} s: {'; '.join(self.recovery.missing)}")
        if self.recovery.left:
            found.append(f"left behind: {'; '.join(self.recovery.left)}")
        found += self.recovery.ghosts
        return [*([self.broke] if self.broke else []), *self.died, *found]

    @property
    def ok(self) -> bool:
        """Whether it passed."""
        return not self.faults
