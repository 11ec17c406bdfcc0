"""An instance whose layers are divided over unlike accelerators: pipeline parallelism."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shared.cost.step import Batch, Segment, StepTimes
from shared.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages in order, each a step model of its own layers on its own accelerator.

    A batch passes all stages, and `lanes` batches are in flight, one behind the other. A lane's step takes the sum of
    stages and hops, or, where one stage is the bottleneck, the time of that stage for one batch of each lane. hop_s:
    fixed cost of passing a batch to the next stage; hop_s_per_token: activations on the wire.
    """

    stages: tuple[StepTimes, ...]
    lanes: int = 2
    hop_s: float = 0.0
    hop_s_per_token: float = 0.0

    def __post_init__(self) -> None:
        if not self.stages or self.lanes < 1:
            raise InvalidRequest("a pipeline needs at least one stage and one lane")

    def step_time_s(self, batch: Batch) -> float:
        """Seconds from one step of a lane to its next."""
        return self._of(self._each(lambda stage: stage.step_time_s(batch)), batch.tokens)

    def decode_time_s(self, count: int, context_tokens: int) -> float:
        if count == 0:
            return 0.0
        return self._of(self._each(lambda stage: stage.decode_time_s(count, context_tokens)), count)

    def decode_segments(self, count: int, context_tokens: int, steps: int) -> tuple[Segment, ...]:
        """See `StepTimes`. Cut where any stage's time bends or where the bottleneck may change."""
        segments = {id(stage): stage.decode_segments(count, context_tokens, steps) for stage in self.stages}
        cuts = sorted({cut for each in segments.values() for cut in accumulate(length for length, _, _ in each)})
        runs: list[Segment] = []
        start = 0
        for stop in cuts:
            runs += self._straight(count, context_tokens, start, stop)
            start = stop
        return tuple(runs)

    def _straight(self, count: int, context: int, start: int, stop: int) -> list[Segment]:
        """Segments of a stretch in which each stage is linear, halved until sum or bottleneck rules throughout."""
        first = self.decode_time_s(count, context + start * count)
        last = self.decode_time_s(count, context + (stop - 1) * count)
        if stop - start > 2:
            middle = (start + stop - 1) // 2
            share = (middle - start) / (stop - 1 - start)
            bent = self.decode_time_s(count, context + middle * count) - (first + (last - first) * share)
            if abs(bent) > 1e-9 * last:
                return self._straight(count, context, start, middle) + self._straight(count, context, middle, stop)
        return [(stop - start, first, last)]

    def _each(self, time_s: Callable[[StepTimes], float]) -> list[float]:
        """The time of each stage; stages that share a step model are computed once."""
        known = {id(stage): time_s(stage) for stage in {id(stage): stage for stage in self.stages}.values()}
        return [known[id(stage)] for stage in self.stages]

    def _of(self, stages: Sequence[float], tokens: int) -> float:
        hops = (len(stages) - 1) * (self.hop_s + self.hop_s_per_token * tokens)
        return max(sum(stages) + hops, self.lanes * (max(stages) + (hops if len(stages) > 1 else 0.0) / len(stages)))
