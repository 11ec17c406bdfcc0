"""One set of policies, and what became of it."""

from dataclasses import dataclass

from shared.sim.metrics import Goodput
from shared.sim.outcomes import SimResult
from shared.sim.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Run:
    """A simulated run. `figures`: see `shared.sim.metrics.summary`. `wall_s`: what the simulation itself took."""

    spec: RunSpec
    result: SimResult
    figures: dict[str, float]
    wall_s: float
    goodput: Goodput | None = None

    @property
    def label(self) -> str:
        """The policies as they were written."""
        return self.spec.label
