"""Placement by accumulated workload: each job's time on each kind of instance, weighed by how full its memory is."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from random import Random
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.domain.instance import Role
from shared.domain.job import JobView
from shared.domain.rates import HuaweiCost
from shared.domain.route import Reason, Work
from shared.errors import InvalidRequest
from shared.policy.choice import Choice, context_of
from shared.policy.index import ClusterIndex
from shared.policy.lengths import PredictedEnd, predicted_tokens

UNPREDICTED_TOKENS = 128
LEAST_S = 1e-9  # a fit may extrapolate below zero; a time may not
Array = NDArray[np.float64]


class Penalty(StrEnum):
    """How the workload grows with the share u of the memory that unfinished jobs want (θ: `theta`)."""

    EXP = "exp"  # T · exp(θ·u)
    POWER = "power"  # T · θ^u
    LINEAR = "linear"  # T · (1 + θ·u)

    def factor(self, theta: float, share: Array) -> Array:
        """What T is multiplied by, for each u."""
        if self is Penalty.LINEAR:
            return 1.0 + theta * share
        scaled: Array = np.exp((theta if self is Penalty.EXP else np.log(theta)) * share)
        return scaled


@dataclass(frozen=True, slots=True)
class Workload:
    """The instance with the least Q_s + W_rs, where Q_s is the sum of W of its unfinished jobs.

    W_rs = T_rs · factor(u_s); T_rs is the time of a batch of jobs like r that fills the instance, over its size; u_s
    the share of the instance's KV that its unfinished jobs want, prompt and predicted output. On a prefill instance
    the output counts nothing. Kinds without a measured batch cost get the mean T of the measured ones, or 1.
    Source: Huawei eqs 5–8 (R) and algorithm 2; `penalty` exp is a reading of eq. 7, the others are alternatives to it.
    F: equal scores are broken at random, once a broadcast.
    """

    name: ClassVar[str] = "workload"
    theta: float = 2.0
    penalty: Penalty = Penalty.EXP
    end: PredictedEnd = PredictedEnd.MIDDLE
    unpredicted_tokens: int = UNPREDICTED_TOKENS

    def __post_init__(self) -> None:
        _check(self.name, self.theta, self.unpredicted_tokens)

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `Placement`."""
        output = _output(job, index, self.end, self.unpredicted_tokens)
        weigh = _Weigh(self.name, self.penalty, self.theta, _times)
        return weigh.least(job, output, index, exclude, rng)


@dataclass(frozen=True, slots=True)
class Memory:
    """As `workload` with every T_rs = 1: only how full the instances' memories are counts. Source: Huawei 5.2, MB."""

    name: ClassVar[str] = "memory"
    theta: float = 2.0
    end: PredictedEnd = PredictedEnd.MIDDLE
    unpredicted_tokens: int = UNPREDICTED_TOKENS

    def __post_init__(self) -> None:
        _check(self.name, self.theta, self.unpredicted_tokens)

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `Placement`."""
        output = _output(job, index, self.end, self.unpredicted_tokens)
        weigh = _Weigh(self.name, Penalty.EXP, self.theta, _ones)
        return weigh.least(job, output, index, exclude, rng)


def batch_time_s(cost: HuaweiCost, capacity_tokens: int, prompt: int, output: int) -> float:
    """T: seconds of the largest batch of such jobs that fits, over its size. Source: Huawei eqs 5 and 6 (R)."""
    batch = max(1, capacity_tokens // max(1, prompt + output))
    seconds = cost.prefill_s(batch, prompt) + (cost.decode_s(batch, prompt, output) if output else 0.0)
    return max(LEAST_S, seconds / batch)


class _Alike(NamedTuple):
    """What makes a job cost two instances the same."""

    cost: HuaweiCost | None
    capacity_tokens: int
    max_model_len: int


class _Kind(NamedTuple):
    """Candidates that are alike in this way."""

    cost: HuaweiCost | None
    capacity_tokens: int
    max_model_len: int
    instance_ids: list[str]
    slots: NDArray[np.intp]  # theirs, in the ledger


class _Best(NamedTuple):
    total: float
    time: float
    share: float
    score: float
    instance_id: str


Times = Callable[[list[_Kind], int, int], list[float]]


class _Weigh(NamedTuple):
    """One of the two policies: how time and memory make a score."""

    name: str
    penalty: Penalty
    theta: float
    times: Times

    def least(
        self, job: JobView, output: int, index: ClusterIndex, exclude: Collection[str], rng: Random
    ) -> Choice | None:
        """The candidate with the least sum of what is queued there and what the job adds."""
        context = context_of(job, index.placing)
        kinds = index.cached("workload kinds", lambda: _find_kinds(index, rng))
        fitting = [kind for kind in kinds if kind.max_model_len >= context]
        best: _Best | None = None
        for kind, time in zip(fitting, self.times(fitting, job.prompt_tokens, output), strict=True):
            found = self._least_of(kind, time, index, exclude)
            if found.total < (best.total if best else inf):
                best = found
        view = index.candidates.get(best.instance_id) if best else None
        if best is None or view is None:
            return None
        figures: dict[str, float | str] = {
            "chosen": best.instance_id,
            "queued": round(best.total - best.score, 6),
            "time": round(best.time, 6),
            "memory_share": round(best.share, 4),
            "workload": round(best.score, 6),
        }
        work = Work(best.score, job.prompt_tokens + output)
        return Choice(view, (Reason(f"placement:{self.name}", figures),), work=work)

    def _least_of(self, kind: _Kind, time: float, index: ClusterIndex, exclude: Collection[str]) -> _Best:
        ledger = index.ledger
        share = ledger.tokens[kind.slots] / kind.capacity_tokens
        score = time * self.penalty.factor(self.theta, share)
        total = ledger.scores[kind.slots] + score
        if exclude:
            total[[one in exclude for one in kind.instance_ids]] = inf
        at = int(total.argmin())
        return _Best(float(total[at]), time, float(share[at]), float(score[at]), kind.instance_ids[at])


def _times(kinds: list[_Kind], prompt: int, output: int) -> list[float]:
    found = [batch_time_s(k.cost, k.capacity_tokens, prompt, output) if k.cost else None for k in kinds]
    known = [time for time in found if time is not None]
    unknown = sum(known) / len(known) if known else 1.0
    return [unknown if time is None else time for time in found]


def _ones(kinds: list[_Kind], prompt: int, output: int) -> list[float]:
    return [1.0] * len(kinds)


def _find_kinds(index: ClusterIndex, rng: Random) -> list[_Kind]:
    views = list(index.candidates.views)
    rng.shuffle(views)  # the first of equals wins: another one each broadcast, and another one at each scheduler
    groups: dict[_Alike, list[str]] = {}
    for view in views:
        info = view.info
        alike = _Alike(info.rates.batch, max(1, info.total_blocks * info.block_size), info.max_model_len)
        groups.setdefault(alike, []).append(info.instance_id)
    return [_Kind(*alike, ids, index.ledger.slots(ids)) for alike, ids in groups.items()]


def _output(job: JobView, index: ClusterIndex, end: PredictedEnd, unpredicted_tokens: int) -> int:
    return predicted_tokens(job, end, unpredicted_tokens) if index.placing is Role.DECODE else 0


def _check(name: str, theta: float, unpredicted_tokens: int) -> None:
    if not 0.0 < theta < inf or unpredicted_tokens < 0:
        raise InvalidRequest(f"{name}: theta must be positive, unpredicted_tokens must not be negative")
