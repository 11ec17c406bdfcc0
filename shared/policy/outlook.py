"""How a fleet with given roles would serve a demand, by queueing formulas over learned step times.

Instances that are about alike form a class, and roles are counts of each class, so that the cost does not grow with the
fleet. Prefill instances are one queue with several servers of unlike speed; a decode instance shares its time among its
decodes and the prompts that it computes beside them. Seconds and tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import log2, sqrt
from typing import NamedTuple

from shared.domain.demand import Demand
from shared.domain.instance import InstanceView, Role
from shared.domain.rates import UNKNOWN_STEPS, StepRates
from shared.policy.estimate import ENDLESS, miss_probability
from shared.policy.index import speed_class
from shared.policy.queueing import EXPONENTIAL_POINTS, queue_wait

HORIZON_S = 30.0  # work beyond the capacity waits as if it had accumulated for this long
SLOWNESS = 0.02  # cost of each target's length of time; small, so that roles change only for requests that miss
FULL = 0.97  # utilisation beyond which a queue grows without bound
SHARES_TRIED = 5  # shares of the prompts on prefill instances, the least and the largest included
HALVINGS = 14

Counts = tuple[int, ...]  # instances of each class


class InstanceClass(NamedTuple):
    """Instances that are about alike; the figures are those of one of them."""

    rates: StepRates
    chunk: int
    seats: int
    kv_tokens: int
    token_move_s: float  # KV of a token over its link


class RoleCounts(NamedTuple):
    """How many instances of each class compute prompts, and how many decode."""

    prefills: Counts
    decodes: Counts

    @classmethod
    def from_views(cls, views: Iterable[InstanceView], class_of: Mapping[str, int], classes: int) -> "RoleCounts":
        counts = {role: [0] * classes for role in Role}
        for view in views:
            counts[view.role][class_of[view.instance_id]] += 1
        return cls(tuple(counts[Role.PREFILL]), tuple(counts[Role.DECODE]))

    def counts(self, role: Role) -> Counts:
        return self.prefills if role is Role.PREFILL else self.decodes

    def plus(self, role: Role, number: int, count: int) -> "RoleCounts":
        """With `count` more instances of the class of that number in a role."""
        counts = tuple(n + count * (at == number) for at, n in enumerate(self.counts(role)))
        return self._replace(prefills=counts) if role is Role.PREFILL else self._replace(decodes=counts)


class Outlook(NamedTuple):
    """How a demand would be served. Times are means.

    slo_cost: the expected share of requests that miss a target, and a little for being slow. prefill_use, decode_use:
    utilisation of either role. prefill_share: of the prompts, computed by prefill instances.
    """

    slo_cost: float
    ttft_s: float
    tpot_s: float
    prefill_use: float
    decode_use: float
    prefill_share: float


def classify(views: Iterable[InstanceView]) -> tuple[list[InstanceClass], dict[str, int]]:
    """The classes, and the number of each instance's class by its id. Speeds within about ten per cent are alike."""
    classes: list[InstanceClass] = []
    numbers: dict[tuple[float, ...], int] = {}
    class_of: dict[str, int] = {}
    for view in views:
        info = view.info
        steps, chunk, link = info.rates.step or UNKNOWN_STEPS, max(1, info.chunk_size), info.rates.link
        seats, kv_tokens = info.max_seqs or ENDLESS, max(1, info.total_blocks * info.block_size)
        speeds = steps.prefill_s(chunk, 0) / chunk, steps.token_s(1, 0), steps.token_s(64, 64_000), steps.gain
        key = (*(speed_class(max(1e-12, speed)) for speed in speeds), chunk, seats, round(4 * log2(kv_tokens)))
        if key not in numbers:
            numbers[key] = len(classes)
            move_s = info.kv_bytes_per_token / link.bytes_s if link is not None else 0.0
            classes.append(InstanceClass(steps, chunk, seats, kv_tokens, move_s))
        class_of[info.instance_id] = numbers[key]
    return classes, class_of


def outlook(demand: Demand, classes: Sequence[InstanceClass], roles: RoleCounts) -> Outlook:
    """The best outlook over the shares of prompts on prefill instances that the split policy in force allows."""
    least, most = demand.split_least, demand.split_most
    tried = 1 if most - least < 1e-6 else SHARES_TRIED
    shares = [least + (most - least) * at / max(1, tried - 1) for at in range(tried)]
    prefill = _PrefillSide.from_counts(demand, classes, roles.prefills)
    outlooks = (_with_share(demand, classes, roles.decodes, prefill, share) for share in shares)
    return min(outlooks, key=lambda found: found.slo_cost)


class _PrefillSide(NamedTuple):
    """servers: prefill instances. capacity: prompts a second of all. service_s: of one prompt, on average."""

    servers: int
    capacity: float
    service_s: float

    @classmethod
    def from_counts(cls, demand: Demand, classes: Sequence[InstanceClass], counts: Counts) -> "_PrefillSide":
        servers = sum(counts)
        capacity = sum(n / _prompt_s(demand, kind) for kind, n in zip(classes, counts, strict=True) if n)
        return cls(servers, capacity, servers / capacity if servers else 0.0)


def _prompt_s(demand: Demand, kind: InstanceClass) -> float:
    """Seconds of a prompt on a prefill instance; one below half a chunk shares its step with others."""
    form, fresh = kind.rates.prefill, demand.fresh_tokens
    steps = max(fresh / kind.chunk, 0.5)
    return form.fixed_s * steps + fresh * form.token_s + form.position_s * demand.fresh_squares / 2.0


def _with_share(
    demand: Demand, classes: Sequence[InstanceClass], decodes: Counts, prefill: _PrefillSide, share: float
) -> Outlook:
    """The outlook with that share of the prompts on prefill instances."""
    first_cost = first_s = use = 0.0
    if share > 0.0:
        use = share * demand.rate / prefill.capacity if prefill.servers else 2.0
        wait_s = _wait_s(use, prefill.servers, prefill.service_s, demand)
        first_cost = share * _first_token_cost(demand, wait_s, prefill.service_s)
        first_s = share * (wait_s + prefill.service_s)
    decode = _decode(demand, classes, decodes, share)
    if share < 1.0:
        first_cost += (1.0 - share) * _first_token_cost(demand, decode.wait_s, decode.service_s)
        first_s += (1.0 - share) * (decode.wait_s + decode.service_s)
    return Outlook(first_cost + decode.slo_cost, first_s, decode.tpot_s, use, decode.use, share)


def _first_token_cost(demand: Demand, wait_s: float, service_s: float) -> float:
    """Cost of TTFT, over exponential waits and prompts one standard deviation shorter and longer than the mean."""
    spread = _variation(demand)
    return sum(
        weight / 2.0 * _cost((wait_s * multiple + service_s * max(0.0, 1.0 + side * spread)) / demand.ttft_s)
        for multiple, weight in EXPONENTIAL_POINTS
        for side in (-1.0, 1.0)
    )


def _cost(target_share: float) -> float:
    return miss_probability(target_share) + SLOWNESS * target_share


def _variation(demand: Demand) -> float:
    """Of prompt lengths: standard deviation over mean."""
    return sqrt(max(0.0, demand.fresh_squares / max(1.0, demand.fresh_tokens) ** 2 - 1.0))


def _wait_s(use: float, servers: int, service_s: float, demand: Demand) -> float:
    """Mean wait; beyond `FULL` it grows with time. Service times are taken to vary as prompt lengths do."""
    if not servers:
        return HORIZON_S
    if use <= 0.0:
        return 0.0
    variability = (demand.burstiness + _variation(demand) ** 2) / 2.0
    settled = queue_wait(min(use, FULL), servers, servers / service_s, variability)
    return settled.mean_s + max(0.0, use - FULL) / use * HORIZON_S


class _DecodeSide(NamedTuple):
    """use: utilisation. wait_s, service_s: of a prompt that a decode instance computes."""

    slo_cost: float
    tpot_s: float
    use: float
    wait_s: float
    service_s: float


class _DecodeClass(NamedTuple):
    """Decode instances of one class: with b decodes a token of each takes (fixed_s + each_s * b) / free_share."""

    instances: int
    fixed_s: float
    each_s: float
    free_share: float  # of its time, that prompts leave
    max_batch: float  # decodes at once, by seats and KV room
    prompt_s: float  # what a prompt's tokens add to the steps beside whose decodes it is computed
    chunks: float  # steps that a prompt takes, in tokens of a decode beside it

    @classmethod
    def from_class(cls, demand: Demand, kind: InstanceClass, instances: int) -> "_DecodeClass":
        rates, fresh = kind.rates, demand.fresh_tokens
        context = demand.prompt_tokens + demand.output_tokens / 2.0
        mixed, decode = rates.mixed, rates.decode
        chunks = max(1.0, fresh / kind.chunk)
        prompt_s = chunks * max(0.0, mixed.fixed_s - decode.fixed_s) + fresh * mixed.token_s
        prompt_s += mixed.position_s * demand.fresh_squares / 2.0
        token = rates.per_token
        each_s = max(1e-9, token.sequence_s + token.context_s * context)
        max_batch = max(1.0, min(float(kind.seats), kind.kv_tokens / context))
        return cls(instances, token.fixed_s, each_s, 1.0, max_batch, max(1e-9, prompt_s), chunks * rates.gain)

    def rate(self, token_s: float, output_tokens: float) -> float:
        """Requests a second of one instance whose decodes gain a token each `token_s`, as far as seats and memory
        allow.
        """
        batch = min(self.max_batch, max(0.0, (token_s * self.free_share - self.fixed_s) / self.each_s))
        longest_s = (self.fixed_s + self.each_s * batch) / self.free_share
        return batch / (output_tokens * longest_s)


def _decode(demand: Demand, classes: Sequence[InstanceClass], counts: Counts, share: float) -> _DecodeSide:
    """All decode instances, each with as many requests as make their steps equally long (Little's law)."""
    used = [(kind, n) for kind, n in zip(classes, counts, strict=True) if n]
    local = (1.0 - share) * demand.rate
    decoders = [_DecodeClass.from_class(demand, kind, n) for kind, n in used]
    speed = sum(one.instances / one.prompt_s for one in decoders)  # prompts a second, if they did nothing else
    taken = local / speed if decoders else 1.0
    if taken >= FULL:
        over = taken / FULL
        return _DecodeSide(1.0 + _cost(over), HORIZON_S / demand.output_tokens * over, over, HORIZON_S, HORIZON_S)
    decoders = [one._replace(free_share=1.0 - taken) for one in decoders]
    output = demand.output_tokens
    capacity = sum(one.instances * one.rate(1e3, output) for one in decoders)
    # The number of requests that decode at once varies as arrivals do over the time of an answer.
    stays_s = output * min(demand.tpot_s, _token_s(decoders, min(demand.rate, FULL * capacity), output))
    spread = min(0.5, sqrt(demand.burstiness / max(1.0, demand.rate * stays_s)))
    moves_s = share * demand.prompt_tokens * max(kind.token_move_s for kind, _ in used)
    cost = tpot_s = 0.0
    for side in (-spread, spread):
        rate = demand.rate * (1.0 + side)
        token_s = _token_s(decoders, min(rate, FULL * capacity), output)
        late_s = max(0.0, rate / capacity - FULL) * HORIZON_S
        token_s += (late_s + moves_s) / output
        cost += _cost(token_s / demand.tpot_s) / 2.0
        tpot_s += token_s / 2.0
    steps = sum(one.instances * one.chunks / one.prompt_s for one in decoders) / speed  # of a prompt
    servers = sum(one.instances for one in decoders)
    service_s = steps * tpot_s + speed**-1 * servers
    wait_s = _wait_s(local * service_s / servers, servers, service_s, demand) if local > 0.0 else 0.0
    return _DecodeSide(cost, tpot_s, demand.rate / capacity, wait_s, service_s)


def _token_s(decoders: Sequence[_DecodeClass], rate: float, output_tokens: float) -> float:
    """The time of a token at which all instances together complete `rate` requests a second."""
    low = min(one.fixed_s / one.free_share for one in decoders)
    high = max((one.fixed_s + one.each_s * one.max_batch) / one.free_share for one in decoders)
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        if sum(one.instances * one.rate(middle, output_tokens) for one in decoders) < rate:
            low = middle
        else:
            high = middle
    return high
