"""Placement in turn, and on one instance alone: what other policies are compared with."""

from collections.abc import Collection
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from shared.domain.job import JobView
from shared.domain.route import Reason
from shared.policy.availability import context_of, usable
from shared.policy.choice import Choice
from shared.policy.index import ClusterIndex


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Each candidate in turn, by id; the index counts the turns."""

    name: ClassVar[str] = "round_robin"

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `Placement`."""
        views, context = index.candidates.views, context_of(job, index.placing)
        for step in range(len(views)):
            view = views[(index.turn + step) % len(views)]
            if usable(view, context, exclude):
                figures: dict[str, float | str] = {"chosen": view.instance_id, "turn": index.turn}
                return Choice(view, (Reason("placement:round_robin", figures),))
        return None


@dataclass(frozen=True, slots=True)
class Weighted:
    """Each candidate in turn, as often as its `rates.weight` says, spread evenly over the turns.

    Source: Huawei 5.2, WRR. F: the order of the turns (see `ledger.Rotation`).
    """

    name: ClassVar[str] = "weighted"

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `Placement`."""
        candidates, context = index.candidates, context_of(job, index.placing)
        weights = index.cached(
            self.name, lambda: {view.info.instance_id: view.info.rates.weight for view in candidates.views}
        )
        for instance_id in index.ledger.rotation(self.name, weights).order():
            view = candidates.get(instance_id)
            if view is not None and usable(view, context, exclude):
                figures: dict[str, float | str] = {"chosen": instance_id, "weight": weights[instance_id]}
                return Choice(view, (Reason("placement:weighted", figures),))
        return None


@dataclass(frozen=True, slots=True)
class Single:
    """All jobs on one instance: the one named, or the first by id; on the next one only while it cannot take them.

    Source: Huawei 5.2, SI.
    """

    name: ClassVar[str] = "single"
    instance: str = ""

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `Placement`."""
        candidates, context = index.candidates, context_of(job, index.placing)
        named = candidates.get(self.instance)
        for view in candidates.views if named is None else (named, *candidates.views):
            if usable(view, context, exclude):
                return Choice(view, (Reason("placement:single", {"chosen": view.instance_id}),))
        return None
