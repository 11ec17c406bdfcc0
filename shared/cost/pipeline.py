"""An instance whose layers are divided over unlike accelerators: pipeline parallelism."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.cost.step import Batch, StepTimes
from shared.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages in order, each a step model of its own layers on its own accelerator.

    A batch passes all stages; `lanes` batches are in flight, one behind the other. So a lane's step takes the sum of
    the stages and hops, or, where one stage is the bottleneck, as long as that one needs for one batch of every lane.
    hop_s: fixed cost of handing a batch to the next stage; hop_s_per_token: activations on the wire.
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
        """Seconds of a step of decodes."""
        if count == 0:
            return 0.0
        return self._of(self._each(lambda stage: stage.decode_time_s(count, context_tokens)), count)

    def decode_segments(self, count: int, context_tokens: int, steps: int) -> tuple[tuple[int, float, float], ...]:
        """See `StepTimes`. Cut where any stage's time bends or where the bottleneck may change."""
        segments = {id(stage): stage.decode_segments(count, context_tokens, steps) for stage in self.stages}
        cuts = sorted({cut for each in segments.values() for cut in _cuts(each)})
        runs: list[tuple[int, float, float]] = []
        start = 0
        for stop in cuts:
            runs += self._straight(count, context_tokens, start, stop)
            start = stop
        return tuple(runs)

    def _straight(self, count: int, context: int, start: int, stop: int) -> list[tuple[int, float, float]]:
        """Runs of a stretch in which every stage is linear: halved until sum or bottleneck rules throughout."""
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
        """Of every stage; alike ones are asked once."""
        known: dict[int, float] = {}
        for stage in self.stages:
            if id(stage) not in known:
                known[id(stage)] = time_s(stage)
        return [known[id(stage)] for stage in self.stages]

    def _of(self, stages: Sequence[float], tokens: int) -> float:
        hops = (len(stages) - 1) * (self.hop_s + self.hop_s_per_token * tokens)
        return max(sum(stages) + hops, self.lanes * (max(stages) + (hops if len(stages) > 1 else 0.0) / len(stages)))


def _cuts(segments: Sequence[tuple[int, float, float]]) -> list[int]:
    stops, total = [], 0
    for length, _, _ in segments:
        total += length
        stops.append(total)
    return stops
