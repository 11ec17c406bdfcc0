"""Huawei (high throughput on heterogeneous clusters): placement by accumulated workload, and its baselines."""

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from random import Random
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.domain.instance import Role
from shared.domain.job import JobView
from shared.domain.rates import StepRates
from shared.domain.route import Reason, Work
from shared.errors import InvalidRequest
from shared.policy.decode_admission import ByPrediction, PredictedEnd
from shared.policy.dispatch import Choice, Figures
from shared.policy.index import ClusterIndex, InstanceIds, context_of, usable
from shared.policy.papers.costs import HuaweiCost

MIN_BATCH_S = 1e-9  # a fitted cost may extrapolate below zero; a time may not
Array = NDArray[np.float64]


class Penalty(StrEnum):
    """How the workload grows with the share u of the KV memory that unfinished jobs need (θ: `theta`)."""

    EXP = "exp"  # T · exp(θ·u)
    POWER = "power"  # T · θ^u
    LINEAR = "linear"  # T · (1 + θ·u)

    def factor(self, theta: float, share: Array) -> Array:
        """The factor of T for each u."""
        if self is Penalty.LINEAR:
            return 1.0 + theta * share
        scaled: Array = np.exp((theta if self is Penalty.EXP else np.log(theta)) * share)
        return scaled


def batch_time_s(cost: HuaweiCost, capacity_tokens: int, prompt: int, output: int) -> float:
    """T: seconds of the largest batch of such jobs that fits, over its size. Source: Huawei eqs 5 and 6."""
    batch = max(1, capacity_tokens // max(1, prompt + output))
    seconds = cost.prefill_s(batch, prompt) + (cost.decode_s(batch, prompt, output) if output else 0.0)
    return max(MIN_BATCH_S, seconds / batch)


class _Kind(NamedTuple):
    """Candidates on which a job costs the same."""

    cost: HuaweiCost | None
    capacity_tokens: int
    max_model_len: int
    instance_ids: list[str]
    slots: NDArray[np.intp]  # their positions in the ledger


class _Best(NamedTuple):
    total: float
    time: float
    share: float
    score: float
    instance_id: str


@dataclass(frozen=True, slots=True)
class Memory(ByPrediction):
    """As `workload` with T_rs = 1: only the use of the instances' memories counts. Source: Huawei 5.2, MB."""

    name: ClassVar[str] = "memory"
    end: PredictedEnd = PredictedEnd.MIDDLE
    theta: float = 2.0

    def __post_init__(self) -> None:
        ByPrediction.__post_init__(self)
        if not 0.0 < self.theta < inf:
            raise InvalidRequest(f"{self.name}: theta must be positive and finite, got {self.theta}")

    def choose(self, job: JobView, index: ClusterIndex, exclude: InstanceIds, now: float, rng: Random) -> Choice | None:
        output = self.output_tokens(job) if index.placing is Role.DECODE else 0
        context = context_of(job, index.placing)
        kinds = index.cached("workload kinds", lambda: _kinds(index, rng))
        fitting = [kind for kind in kinds if kind.max_model_len >= context]
        times = self._times(fitting, job.prompt_tokens, output)
        bests = (self._least_of(kind, time, index, exclude) for kind, time in zip(fitting, times, strict=True))
        best = min(bests, key=lambda one: one.total, default=None)
        view = index.candidates.get(best.instance_id) if best is not None and best.total < inf else None
        if best is None or view is None:
            return None
        figures: Figures = {
            "chosen": best.instance_id,
            "queued": round(best.total - best.score, 6),
            "time": round(best.time, 6),
            "memory_share": round(best.share, 4),
            "workload": round(best.score, 6),
        }
        work = Work(best.score, job.prompt_tokens + output)
        return Choice(view, (Reason(f"placement:{self.name}", figures),), work=work)

    def _least_of(self, kind: _Kind, time: float, index: ClusterIndex, exclude: InstanceIds) -> _Best:
        """The instance of a kind with the least sum of its queued work and the work that the job adds."""
        ledger = index.ledger
        share = ledger.tokens[kind.slots] / kind.capacity_tokens
        score = time * self._factor(share)
        total = ledger.scores[kind.slots] + score
        if exclude:
            total[[one in exclude for one in kind.instance_ids]] = inf
        at = int(total.argmin())
        return _Best(float(total[at]), time, float(share[at]), float(score[at]), kind.instance_ids[at])

    def _times(self, kinds: list[_Kind], prompt: int, output: int) -> list[float]:
        return [1.0] * len(kinds)

    def _factor(self, share: Array) -> Array:
        return Penalty.EXP.factor(self.theta, share)


@dataclass(frozen=True, slots=True)
class Workload(Memory):
    """The instance with the least Q_s + W_rs, where Q_s is the sum of W of its unfinished jobs.

    W_rs = T_rs · factor(u_s); T_rs is the time of a batch of jobs like r that fills the instance, over its size; u_s
    the share of the instance's KV that its unfinished jobs need, prompt and predicted output. On a prefill instance
    the output does not count. Kinds without a measured batch cost get the mean T of the measured ones, or 1.
    Source: Huawei eqs 5–8 and algorithm 2; `penalty` exp is a reading of eq. 7, the others are alternatives to it.
    Ours: equal scores are broken at random, once a broadcast.
    """

    name: ClassVar[str] = "workload"
    penalty: Penalty = Penalty.EXP

    def _times(self, kinds: list[_Kind], prompt: int, output: int) -> list[float]:
        times = [batch_time_s(k.cost, k.capacity_tokens, prompt, output) if k.cost else None for k in kinds]
        known = [time for time in times if time is not None]
        unknown = sum(known) / len(known) if known else 1.0
        return [unknown if time is None else time for time in times]

    def _factor(self, share: Array) -> Array:
        return self.penalty.factor(self.theta, share)


def _kinds(index: ClusterIndex, rng: Random) -> list[_Kind]:
    views = list(index.candidates.views)
    rng.shuffle(views)  # the first of equal scores wins: another one each broadcast, and another one at each scheduler
    groups: dict[tuple[StepRates | None, int, int, int], list[str]] = {}
    for view in views:
        info = view.info
        capacity_tokens = max(1, info.total_blocks * info.block_size)
        alike = info.rates.step, info.chunk_size, capacity_tokens, info.max_model_len
        groups.setdefault(alike, []).append(info.instance_id)
    return [
        _Kind(
            None if steps is None else HuaweiCost.from_steps(steps, chunk),
            capacity_tokens,
            max_model_len,
            ids,
            index.ledger.slots(ids),
        )
        for (steps, chunk, capacity_tokens, max_model_len), ids in groups.items()
    ]


@dataclass(frozen=True, slots=True)
class Weighted:
    """Each candidate in turn, as often as its `rates.weight` says, spread evenly over the turns.

    Source: Huawei 5.2, WRR. Ours: the order of the turns (`ledger.Rotation`).
    """

    name: ClassVar[str] = "weighted"

    def choose(self, job: JobView, index: ClusterIndex, exclude: InstanceIds, now: float, rng: Random) -> Choice | None:
        candidates, context = index.candidates, context_of(job, index.placing)
        weights = index.cached(
            self.name, lambda: {view.info.instance_id: view.info.rates.weight for view in candidates.views}
        )
        for instance_id in index.ledger.rotation(self.name, weights).order():
            view = candidates.get(instance_id)
            if view is not None and usable(view, context, exclude):
                figures: Figures = {"chosen": instance_id, "weight": weights[instance_id]}
                return Choice(view, (Reason("placement:weighted", figures),))
        return None


@dataclass(frozen=True, slots=True)
class Single:
    """All jobs on one instance: the one with the id `instance`, or the first by id; on the next one only when it cannot
    take a job. Source: Huawei 5.2, SI.
    """

    name: ClassVar[str] = "single"
    instance: str = ""

    def choose(self, job: JobView, index: ClusterIndex, exclude: InstanceIds, now: float, rng: Random) -> Choice | None:
        candidates, context = index.candidates, context_of(job, index.placing)
        named = candidates.get(self.instance)
        for view in candidates.views if named is None else (named, *candidates.views):
            if usable(view, context, exclude):
                return Choice(view, (Reason("placement:single", {"chosen": view.instance_id}),))
        return None
