"""Placement by load: the instance that would be done with the prompt first."""

from collections.abc import Collection
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from shared.domain.instance import InstanceView
from shared.domain.job import JobView
from shared.domain.route import Reason
from shared.policy.availability import context_of, usable
from shared.policy.choice import Choice
from shared.policy.index import ClusterIndex

LOOK = 2  # instances of each class of speed: the best and a runner-up


@dataclass(frozen=True, slots=True)
class LeastLoad:
    """The instance that would finish this prefill first.

    score = backlog + k_p * prompt + b_p, in seconds (tokens where no rate is measured). Of each class of speed
    the two shortest backlogs are scored, so a decision costs O(classes), not O(instances); within a class
    speeds differ by 10 % at most, and so may the job's own time from the least. In a coupled cluster decodes slow
    the prefill of their instance down (see `speeds.chunked_rate`).
    Source: TetriInfer 3.2 (least load); Cronus eq. 2 for the cost of a prefill, eq. 3 beside decodes.
    """

    name: ClassVar[str] = "least_load"

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `Placement`."""
        backlog, get, tokens = index.backlog, index.candidates.get, job.prompt_tokens
        context = context_of(job, index.placing)
        scored: list[tuple[float, int, InstanceView]] = []
        for keys in backlog.classes():
            looked = 0
            for waits_s, _, instance_id in keys:
                view = get(instance_id)
                if view is not None and usable(view, context, exclude):
                    scored.append((waits_s + backlog.cost_s(instance_id, tokens), len(scored), view))
                    looked += 1
                    if looked == LOOK:
                        break
        if not scored:
            return None
        scored.sort()
        score, _, chosen = scored[0]
        figures: dict[str, float | str] = {"chosen": chosen.info.instance_id, "score": round(score, 6)}
        if len(scored) > 1:
            figures["runner_up"] = scored[1][2].info.instance_id
            figures["runner_up_score"] = round(scored[1][0], 6)
        return Choice(chosen, (Reason("placement:least_load", figures),))
