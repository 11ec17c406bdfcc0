"""Placement that knows what each instance would not have to compute."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from shared.domain.instance import InstanceView
from shared.domain.job import JobView
from shared.domain.route import Reason
from shared.errors import InvalidRequest
from shared.policy.choice import Choice, context_of, usable
from shared.policy.index import ClusterIndex
from shared.policy.prefix_index import saved_tokens

LOOK = 2  # of each class of speed, as least_load


@dataclass(frozen=True, slots=True)
class PrefixPlacement:
    """The instance that would finish this prefill first, what it holds of the prompt taken off.

    score = backlog + k_p * (prompt - saved) + b_p, in seconds (tokens where no rate is measured): that of `least_load`
    and its candidates, and beside them `holders` instances with the longest runs of the prompt's blocks. So an instance
    is at most so much busier than another one as its prefix saves time.
    """

    name: ClassVar[str] = "prefix"
    uses_prefixes: ClassVar[bool] = True
    holders: int = 8

    def __post_init__(self) -> None:
        if self.holders < 1:
            raise InvalidRequest(f"{self.name}: holders must be at least 1, not {self.holders}")

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `Placement`."""
        backlog, context = index.backlog, context_of(job, index.placing)
        best: tuple[float, InstanceView, int] | None = None
        for view in self._candidates(job, index, context, exclude):
            saved = saved_tokens(index.prefixes, view, job)
            instance_id = view.info.instance_id
            score = backlog.waits_s(instance_id) + backlog.cost_s(instance_id, job.prompt_tokens - saved)
            if best is None or score < best[0]:
                best = score, view, saved
        if best is None:
            return None
        score, chosen, saved = best
        figures: dict[str, float | str] = {
            "chosen": chosen.info.instance_id,
            "score": round(score, 6),
            "saved_tokens": saved,
        }
        return Choice(chosen, (Reason("placement:prefix", figures),))

    def _candidates(
        self, job: JobView, index: ClusterIndex, context: int, exclude: Collection[str]
    ) -> Iterable[InstanceView]:
        found: dict[str, InstanceView] = {}
        for keys in index.backlog.classes():
            looked = 0
            for _, _, instance_id in keys:
                view = index.candidates.get(instance_id)
                if view is not None and usable(view, context, exclude):
                    found[instance_id] = view
                    looked += 1
                    if looked == LOOK:
                        break
        for instance_id, _ in index.prefixes.holders(job.prefix, self.holders):
            view = index.candidates.get(instance_id)
            if view is not None and usable(view, context, exclude):
                found[instance_id] = view
        return found.values()
