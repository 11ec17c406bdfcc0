"""What one engine has done: steps, tokens, time, gaps between tokens."""

from dataclasses import dataclass, field

from shared.sim.glide import Glide
from shared.sim.memory import KvMemory
from shared.sim.outcomes import Gaps


@dataclass(slots=True)
class Tally:
    """Running totals. `gaps` counts every gap between two tokens of a request once."""

    gaps: Gaps = field(default_factory=Gaps)
    busy_s: float = 0.0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    peak_share: float = 0.0

    def decodes(self, took_s: float, count: int, fresh: int) -> None:
        """A step in which `count` requests got a token; the gaps of `fresh` ones are counted by the engine."""
        self.decode_tokens += count
        if count > fresh:
            self.gaps.add(took_s, count - fresh)

    def glide(self, glide: Glide, steps: int, count: int, fresh: int) -> None:
        """`steps` decode steps of one batch; only in the first of them any are fresh."""
        self.steps += steps
        self.decode_tokens += steps * count
        if fresh:
            self.gaps.add(glide.first_step_s, -fresh)
        for length, first, last in glide.runs(steps):
            self.gaps.add((first + last) / 2.0, length * count)

    def peak(self, memory: KvMemory) -> None:
        """Remember the most memory that was held."""
        self.peak_share = max(self.peak_share, 1.0 - memory.free / memory.total)
