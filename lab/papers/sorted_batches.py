"""TetriInfer's order of prefill as printed: prompts are sorted batch by batch, and none joins a batch once formed."""

from dataclasses import dataclass
from typing import ClassVar

from shared.domain.rates import StepRates
from shared.policy.prefill_order import WaitingJob


@dataclass(frozen=True, slots=True)
class SortedBatches:
    """The shortest first within each batch of `size` prompts, which is worked off before the next.

    For requests that come at once, numbered in order of arrival as the simulator does: the first one is taken before
    the others are there. Source: TetriInfer 3.3.1 (PrefillSchedBatch).
    """

    name: ClassVar[str] = "sorted_batches"
    size: int = 16

    @property
    def window(self) -> int:
        """The batches bound what overtakes whom."""
        return self.size

    def key(self, waiting: WaitingJob, rates: StepRates | None) -> float:
        """See `PrefillOrder`. What is only decoded here keeps its order of arrival."""
        if waiting.before:
            return 0.0
        batch = (int(waiting.job.job_id) + self.size - 1) // self.size
        return batch * 1e9 + waiting.tokens
