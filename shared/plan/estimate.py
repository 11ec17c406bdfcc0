"""What a deployment would serve, in closed form: cheap enough for thousands, accurate enough to drop most of them.

Flows come from a linear programme, waits for prefill from a queue with several servers, decode batches from Little's
law, and the share of requests within their SLO from these over a sample of the workload. The simulator judges the rest.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from shared.domain.instance import Role
from shared.domain.kv import wire_share
from shared.errors import Incompatible
from shared.plan.group import Group
from shared.plan.layouts import Layouts
from shared.plan.problem import Problem
from shared.plan.routes import (
    Costs,
    EngineCost,
    EngineCosts,
    Flows,
    Places,
    Route,
    best_flows,
    decode_capacity,
    prefill_capacity,
)
from shared.policy.queueing import NO_WAIT, Wait, queue_wait
from shared.sim.workload import Times


def prefill_wait(costs: Sequence[EngineCost], flows: NDArray[np.float64]) -> Wait:
    """The wait for engines to which these flows of prompts come, and which take waiting prompts when they are free."""
    used = [(cost, flow) for cost, flow in zip(costs, flows.tolist(), strict=True) if flow > 0.0]
    if not used:
        return NO_WAIT
    speed = sum(cost.prefills_per_s for cost, _ in used)
    load = sum(flow for _, flow in used) / speed
    servers = sum(cost.lanes for cost, _ in used)
    times = np.concatenate([cost.prefill_s for cost, _ in used])
    variation = float(times.var() / times.mean() ** 2)
    return queue_wait(load, servers, speed, (1.0 + variation) / 2.0)


_SPREAD = 0.7  # deviation of a batch over a request's life, in square roots of the batch (a Poisson instant has 1)
_BESIDE = 1.1  # factor of a prompt's time in steps that decode, too
_HALVINGS = 9


@dataclass(frozen=True, slots=True)
class Estimate:
    """goodput: requests a second at the target attainment. most: that get through, whatever they wait.

    attainment, mean ttft_s and tpot_s, flows: at goodput, or at the requested rate. prefill, decode: the groups of the
    flows' rows and columns, by position.
    """

    goodput: float
    most: float
    attainment: float
    ttft_s: float
    tpot_s: float
    flows: Flows
    prefill: tuple[int, ...]
    decode: tuple[int, ...]


_Flowing = tuple[Flows, tuple[int, ...], tuple[int, ...]]  # flows with the groups of their rows and columns


class Estimator:
    """Estimates of one problem. costs: of its engines; by default the cost model's."""

    def __init__(self, problem: Problem, costs: EngineCosts | None = None) -> None:
        self.problem = problem
        self.costs = costs or Costs(problem)
        self.layouts = Layouts(problem, self.costs)
        sample = problem.sample
        self._wire = self.costs.kv_bytes * wire_share(problem.codec)
        self.places = Places(problem.inventory, self._wire * float(sample.prompts.mean()))
        self._sent = np.minimum(sample.prompts, problem.limits.batched_tokens) * self._wire
        self._flowed: dict[tuple[tuple[Group, ...], bool], _Flowing] = {}
        self._known: dict[tuple[tuple[Group, ...], bool, float], Estimate] = {}
        contexts = sample.prompts + sample.outputs / 2.0
        self._for_crowds: Estimator | None = None
        self.crowded = False  # whether decodes wait for seats, as in bursts they do
        self.context_variation = 1.0 + float(
            contexts.var() / contexts.mean() ** 2
        )  # contexts that vary: fewer seats pool waits
        self._outputs = np.maximum(1, sample.outputs - 1).astype(np.float64)

    def cost(self, group: Group) -> EngineCost:
        """The cost of a group. Raises Incompatible where it does not hold the model and the longest request."""
        problem = self.problem
        found = self.costs.cost_of(group.kind(problem.inventory, problem.dtype))
        if found is None:
            raise Incompatible(
                f"{group.words(problem.inventory)}, {group.layout}: no room for {problem.models.geometry.name} and a "
                f"request of {problem.longest} tokens in each lane"
            )
        return found

    def for_crowds(self) -> "Estimator":
        """An estimator that counts waits for seats in the batches of small groups. Too low where batches are large."""
        if self._for_crowds is None:
            self._for_crowds = copy(self)
            self._for_crowds.crowded, self._for_crowds._known = True, {}
        return self._for_crowds

    def max_rate(self, groups: Sequence[Group], *, local: bool = True) -> float:
        """Requests a second that get through, whatever they wait."""
        return self._flowing(groups, local)[0].rate

    def estimate(
        self,
        groups: Sequence[Group],
        *,
        local: bool = True,
        rate: float = 0.0,
        worth: NDArray[np.float64] | None = None,
    ) -> Estimate:
        """rate: for latencies and attainment; 0: at goodput. worth: see `best_flows`."""
        if worth is not None:
            return self._estimated(groups, self._flows(groups, local, worth), rate)
        key = (tuple(groups), local, rate)
        if key not in self._known:
            self._known[key] = self._estimated(groups, self._flowing(groups, local), rate)
        return self._known[key]

    def reaches(self, groups: Sequence[Group], rate: float) -> bool:
        """Whether enough requests meet their SLO at that rate: cheaper than the highest such rate."""
        flows, prefill, decode = self._flowing(groups, True)
        if flows.rate <= rate:
            return False
        return _Sides(self, groups, prefill, decode).met(flows.times(rate / flows.rate))[0] >= self.problem.target

    def estimate_along(self, groups: Sequence[Group], routes: Sequence[Route], *, rate: float = 0.0) -> Estimate:
        """The estimate with the requests divided as the routes say."""
        best, prefill, decode = self._flowing(groups, True)
        sent, own = np.zeros((len(prefill), len(decode))), np.zeros(len(decode))
        for route in routes:
            j = decode.index(route.decode)
            if route.prefill is None:
                own[j] += route.share
            else:
                sent[prefill.index(route.prefill), j] += route.share
        return self._estimated(groups, (Flows(sent, own).times(best.rate), prefill, decode), rate)

    def _estimated(self, groups: Sequence[Group], flowing: _Flowing, rate: float) -> Estimate:
        flows, prefill, decode = flowing
        sides, most = _Sides(self, groups, prefill, decode), flows.rate
        low, high = 0.0, 1.0  # the largest factor of the flows at which enough requests meet their SLO
        for _ in range(_HALVINGS if most > 0 else 0):
            middle = (low + high) / 2.0
            if sides.met(flows.times(middle))[0] >= self.problem.target:
                low = middle
            else:
                high = middle
        goodput = most * low
        at = (rate or goodput) / most if most > 0 else 0.0
        flows = flows.times(min(at, 1.0))
        attained, ttft_s, tpot_s = sides.met(flows) if most > 0 and at > 0 else (0.0, inf, inf)
        return Estimate(goodput, most, attained, ttft_s, tpot_s, flows, prefill, decode)

    def _flowing(self, groups: Sequence[Group], local: bool) -> _Flowing:
        key = (tuple(groups), local)
        if key not in self._flowed:
            self._flowed[key] = self._flows(groups, local)
        return self._flowed[key]

    def _flows(self, groups: Sequence[Group], local: bool, worth: NDArray[np.float64] | None = None) -> _Flowing:
        prefill = tuple(at for at, group in enumerate(groups) if group.role is Role.PREFILL)
        decode = tuple(at for at, group in enumerate(groups) if group.role is Role.DECODE)
        tpot_s, output = self.problem.slo.tpot_s, self.problem.sample.output
        before = [prefill_capacity(self.cost(groups[at]), 1.0) for at in prefill]
        after = [decode_capacity(self.cost(groups[at]), tpot_s, output, 1.0) for at in decode]
        joints = self.places.joints([groups[at] for at in prefill], [groups[at] for at in decode])
        return best_flows(before, after, joints, local=local, worth=worth), prefill, decode

    def transfer_s(self, source: Group, target: Group) -> Times:
        """Seconds from a request's first token to its decode, of each sampled request."""
        inventory = self.problem.inventory
        link = self.places.link(source.place(inventory), target.place(inventory))
        moved: Times = link.latency_s + self._sent / (link.bandwidth_bytes_s * link.efficiency)
        return moved

    @property
    def outputs(self) -> Times:
        return self._outputs


class _Sides:
    """The prefill and decode groups of one deployment, and what becomes of requests that flow through them."""

    def __init__(
        self, estimator: Estimator, groups: Sequence[Group], prefill: tuple[int, ...], decode: tuple[int, ...]
    ) -> None:
        self._estimator = estimator
        self._groups = groups
        self._prefill = prefill
        self._decode = decode
        self._before = [estimator.cost(groups[at]) for at in prefill]
        self._after = [estimator.cost(groups[at]) for at in decode]
        count = len(estimator.outputs)
        self._prefill_s = np.array([cost.prefill_s for cost in self._before]).reshape(-1, count)
        self._local_s = np.array([cost.prefill_s for cost in self._after]).reshape(-1, count) * _BESIDE
        self._transfers: dict[tuple[int, int], Times] = {}

    def met(self, flows: Flows) -> tuple[float, float, float]:
        """The share of requests within their SLO, and mean TTFT and TPOT."""
        slo = self._estimator.problem.slo
        step_s, spread_s, seats = self._decode_sides(flows)
        from_, to = np.nonzero(flows.sent)
        alone = np.flatnonzero(flows.local)
        wait = prefill_wait(self._before, flows.sent.sum(axis=1))
        own = prefill_wait(self._after, flows.local)
        prefill_s = np.concatenate([self._prefill_s[from_], self._local_s[alone]])
        in_time = np.concatenate(
            [wait.within(slo.ttft_s - self._prefill_s)[from_], own.within(slo.ttft_s - self._local_s)[alone]]
        )
        waits_s = np.repeat([wait.mean_s, own.mean_s], [len(from_), len(alone)])
        more_s = np.zeros_like(prefill_s)  # for each token, for the transfer of the KV
        for row, (i, j) in enumerate(zip(from_.tolist(), to.tolist(), strict=True)):
            more_s[row] = self._more_s(i, j)
        at = np.concatenate([to, alone])
        token_s = step_s[at][:, None] + more_s
        steady = ndtr((slo.tpot_s - token_s) / spread_s[at])
        if self._estimator.crowded:
            left_s = (slo.tpot_s - token_s) * self._estimator.outputs  # that a decode may wait for a seat
            steady *= np.array([seats[j].within(one) for j, one in zip(at.tolist(), left_s, strict=True)]).reshape(
                steady.shape
            )
        weight = np.concatenate([flows.sent[from_, to], flows.local[alone]]) / flows.rate
        weight[np.isinf(step_s[at])] = 0.0  # the queue grows without end: none of these requests is in time
        kept = weight > 0.0
        weight = weight[kept]
        met = weight @ (in_time * steady).mean(axis=1)[kept]
        ttft_s = weight @ (prefill_s.mean(axis=1) + waits_s)[kept]
        return float(met), float(ttft_s), float(weight @ token_s.mean(axis=1)[kept])

    def _decode_sides(self, flows: Flows) -> tuple[Times, Times, list[Wait]]:
        """Seconds a token of each group that decodes, shape [d], their spread by request, shape [d, n], and the wait
        for a seat in a batch. The seconds are infinite where the queue grows without end.
        """
        coming = (flows.sent.sum(axis=0) + flows.local).tolist()
        step_s, spread_s = np.full(len(self._after), inf), np.ones((len(self._after), len(self._estimator.outputs)))
        seats = [NO_WAIT] * len(self._after)
        for j, cost in enumerate(self._after):
            side = self._decode_side(cost, coming[j], float(flows.local[j]) / cost.prefills_per_s)
            if side is not None:
                step_s[j], spread_s[j] = side
                if not self._estimator.crowded:
                    continue
                life_s = self._estimator.problem.sample.output * float(step_s[j])
                count = cost.lanes * cost.batch / self._estimator.context_variation
                seats[j] = queue_wait(coming[j] * life_s / count, count, count / life_s)
        return step_s, spread_s, seats

    def _decode_side(self, cost: EngineCost, rate: float, share: float) -> tuple[float, Times] | None:
        """Seconds a token where `rate` requests a second decode, and their spread by request; None: too many."""
        if share >= 1.0:
            return None
        output = self._estimator.problem.sample.output
        load = rate * output / (cost.lanes * (1.0 - share))  # tokens a second of a lane, in its time for decodes
        if load * cost.more_s >= 1.0:
            return None
        batch = load * cost.base_s / (1.0 - load * cost.more_s)
        if batch > cost.batch:
            return None
        step_s = cost.decode_s(max(1.0, batch)) / (1.0 - share)
        crowd = _SPREAD * sqrt(max(1.0, batch)) * cost.more_s / (1.0 - share)
        prefill_s = cost.prefill_s
        burst = share * step_s * float((prefill_s**2).mean() / prefill_s.mean()) / self._estimator.outputs
        return step_s, np.sqrt(crowd**2 + burst + (0.02 * step_s) ** 2)

    def _more_s(self, i: int, j: int) -> Times:
        """By how much the transfer of its KV lengthens each token of each request."""
        if (i, j) not in self._transfers:
            source, target = self._groups[self._prefill[i]], self._groups[self._decode[j]]
            self._transfers[i, j] = self._estimator.transfer_s(source, target) / self._estimator.outputs
        return self._transfers[i, j]
