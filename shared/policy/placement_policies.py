"""More placement policies: by accumulated workload (Huawei), by cached prefixes, and by the routes of a plan."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from random import Random
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.domain.instance import InstanceView, Role
from shared.domain.job import JobView
from shared.domain.rates import HuaweiCost
from shared.domain.route import Reason, Work
from shared.errors import InvalidRequest
from shared.policy.decode_admission import UNPREDICTED_TOKENS, PredictedEnd, predicted_tokens
from shared.policy.dispatch import Choice, Figures
from shared.policy.index import ClusterIndex, context_of, usable
from shared.policy.ledger import pair_key
from shared.policy.placement import PER_CLASS, LeastLoad
from shared.policy.prefix_index import saved_tokens

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


@dataclass(frozen=True, slots=True)
class Workload:
    """The instance with the least Q_s + W_rs, where Q_s is the sum of W of its unfinished jobs.

    W_rs = T_rs · factor(u_s); T_rs is the time of a batch of jobs like r that fills the instance, over its size; u_s
    the share of the instance's KV that its unfinished jobs need, prompt and predicted output. On a prefill instance
    the output does not count. Kinds without a measured batch cost get the mean T of the measured ones, or 1.
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
        scoring = _Scoring(self.name, self.penalty, self.theta, _mean_batch_times)
        return scoring.least(job, _output(job, index, self.end, self.unpredicted_tokens), index, exclude, rng)


@dataclass(frozen=True, slots=True)
class Memory:
    """As `workload` with T_rs = 1: only the use of the instances' memories counts. Source: Huawei 5.2, MB."""

    name: ClassVar[str] = "memory"
    theta: float = 2.0
    end: PredictedEnd = PredictedEnd.MIDDLE
    unpredicted_tokens: int = UNPREDICTED_TOKENS

    def __post_init__(self) -> None:
        _check(self.name, self.theta, self.unpredicted_tokens)

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        scoring = _Scoring(self.name, Penalty.EXP, self.theta, lambda kinds, prompt, output: [1.0] * len(kinds))
        return scoring.least(job, _output(job, index, self.end, self.unpredicted_tokens), index, exclude, rng)


def batch_time_s(cost: HuaweiCost, capacity_tokens: int, prompt: int, output: int) -> float:
    """T: seconds of the largest batch of such jobs that fits, over its size. Source: Huawei eqs 5 and 6 (R)."""
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


class _Scoring(NamedTuple):
    """How one of the two policies makes a score of time and memory."""

    name: str
    penalty: Penalty
    theta: float
    times: Callable[[list[_Kind], int, int], list[float]]

    def least(
        self, job: JobView, output: int, index: ClusterIndex, exclude: Collection[str], rng: Random
    ) -> Choice | None:
        """The candidate with the least sum of its queued work and the work that the job adds."""
        context = context_of(job, index.placing)
        kinds = index.cached("workload kinds", lambda: _kinds(index, rng))
        fitting = [kind for kind in kinds if kind.max_model_len >= context]
        best: _Best | None = None
        for kind, time in zip(fitting, self.times(fitting, job.prompt_tokens, output), strict=True):
            found = self._least_of(kind, time, index, exclude)
            if found.total < (best.total if best else inf):
                best = found
        view = index.candidates.get(best.instance_id) if best else None
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

    def _least_of(self, kind: _Kind, time: float, index: ClusterIndex, exclude: Collection[str]) -> _Best:
        ledger = index.ledger
        share = ledger.tokens[kind.slots] / kind.capacity_tokens
        score = time * self.penalty.factor(self.theta, share)
        total = ledger.scores[kind.slots] + score
        if exclude:
            total[[one in exclude for one in kind.instance_ids]] = inf
        at = int(total.argmin())
        return _Best(float(total[at]), time, float(share[at]), float(score[at]), kind.instance_ids[at])


def _mean_batch_times(kinds: list[_Kind], prompt: int, output: int) -> list[float]:
    times = [batch_time_s(k.cost, k.capacity_tokens, prompt, output) if k.cost else None for k in kinds]
    known = [time for time in times if time is not None]
    unknown = sum(known) / len(known) if known else 1.0
    return [unknown if time is None else time for time in times]


def _kinds(index: ClusterIndex, rng: Random) -> list[_Kind]:
    views = list(index.candidates.views)
    rng.shuffle(views)  # the first of equal scores wins: another one each broadcast, and another one at each scheduler
    groups: dict[tuple[HuaweiCost | None, int, int], list[str]] = {}
    for view in views:
        info = view.info
        alike = info.rates.batch, max(1, info.total_blocks * info.block_size), info.max_model_len
        groups.setdefault(alike, []).append(info.instance_id)
    return [_Kind(*alike, ids, index.ledger.slots(ids)) for alike, ids in groups.items()]


def _output(job: JobView, index: ClusterIndex, end: PredictedEnd, unpredicted_tokens: int) -> int:
    return predicted_tokens(job, end, unpredicted_tokens) if index.placing is Role.DECODE else 0


def _check(name: str, theta: float, unpredicted_tokens: int) -> None:
    if not 0.0 < theta < inf or unpredicted_tokens < 0:
        raise InvalidRequest(f"{name}: theta must be positive, unpredicted_tokens must not be negative")


@dataclass(frozen=True, slots=True)
class PrefixPlacement:
    """The instance that would finish this prefill first, without the part of the prompt that it holds.

    score = backlog + k_p * (prompt - saved) + b_p, in seconds (tokens where no rate is measured): the score of
    `least_load`, over its candidates and the `holders` instances that hold the longest runs of the prompt's blocks. So
    an instance is preferred to a less busy one only as far as its prefix saves time.
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
        backlog, context, candidates = index.backlog, context_of(job, index.placing), index.candidates
        found = {view.info.instance_id: view for _, view in backlog.candidates(candidates, context, exclude, PER_CLASS)}
        for instance_id, _ in index.prefixes.holders(job.prefix, self.holders):
            view = candidates.get(instance_id)
            if view is not None and usable(view, context, exclude):
                found[instance_id] = view
        best: tuple[float, InstanceView, int] | None = None
        for instance_id, view in found.items():
            saved = saved_tokens(index.prefixes, view, job)
            score = backlog.waits_s(instance_id) + backlog.cost_s(instance_id, job.prompt_tokens - saved)
            if best is None or score < best[0]:
                best = score, view, saved
        if best is None:
            return None
        score, chosen, saved = best
        figures: Figures = {"chosen": chosen.info.instance_id, "score": round(score, 6), "saved_tokens": saved}
        return Choice(chosen, (Reason("placement:prefix", figures),))


class PlanRoute(NamedTuple):
    """A pair of instances and its share of the jobs, relative to the other pairs' shares. Without `prefill` the decode
    instance computes whole jobs.
    """

    prefill: str
    decode: str
    share: float


@dataclass(frozen=True, slots=True)
class PlanRoutes:
    """The pair whose turn it is by the shares of the plan; the decode instance is fixed, too.

    Pairs that are not ready have no turn, and their share goes to the others in proportion. While no pair can take the
    job, the least loaded candidate does.
    Source: ThunderServe 3.3 for routes as shares of pairs. F: the order of the turns (`ledger.Rotation`).
    """

    name: ClassVar[str] = "plan"
    routes: tuple[PlanRoute, ...] = ()

    def __post_init__(self) -> None:
        keys = {pair_key(route.prefill, route.decode) for route in self.routes}
        if len(keys) < len(self.routes):
            raise InvalidRequest("plan: a pair of instances is listed twice")
        for route in self.routes:
            if not (0.0 < route.share < inf and route.decode):
                raise InvalidRequest(f"plan: a route needs a decode instance and a positive share: {list(route)}")

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        ready, weights = index.cached(self, lambda: self._ready(index))
        for key in index.ledger.rotation(self.name, weights).order():
            route = ready[key]
            prefill, decode = index.prefill.get(route.prefill), index.decode.get(route.decode)
            if decode is None or not usable(decode, context_of(job, Role.DECODE), exclude):
                continue
            figures: Figures = {"prefill": route.prefill, "decode": route.decode, "share": route.share}
            reasons = (Reason("placement:plan", figures),)
            if not route.prefill:
                return Choice(decode, reasons)
            if prefill is not None and usable(prefill, context_of(job, Role.PREFILL), exclude):
                return Choice(prefill, reasons, decode)
        instead = LeastLoad().choose(job, index, exclude, now, rng)
        if instead is None:
            return None
        why = Reason("placement:plan, none of its routes can take the job", {"ready_routes": len(ready)})
        return Choice(instead.instance, (why, *instead.reasons))

    def _ready(self, index: ClusterIndex) -> tuple[Mapping[str, PlanRoute], Mapping[str, float]]:
        """The routes whose instances are ready, and their shares, by pair."""
        ready = {
            pair_key(route.prefill, route.decode): route
            for route in self.routes
            if index.decode.get(route.decode) and (not route.prefill or index.prefill.get(route.prefill))
        }
        return ready, {key: route.share for key, route in ready.items()}


def parse_routes(where: str, value: Any) -> tuple[PlanRoute, ...]:
    """Routes from JSON: a list of [prefill id or "", decode id, share]. Raises InvalidRequest."""
    routes = []
    for row in value if isinstance(value, list | tuple) else [value]:
        match row:
            case [str(prefill), str(decode), int() | float() as share] if not isinstance(share, bool):
                routes.append(PlanRoute(prefill, decode, float(share)))
            case _:
                raise InvalidRequest(f"{where} must list [prefill, decode, share], not {row!r}")
    return tuple(routes)
