"""How well a fleet would serve a demand with given roles: queueing formulas over learned rates.

Instances that are about alike make a sort, and roles are counts of each sort, so that the cost does not grow with the
fleet. Prefill instances are one queue with several servers of unlike speed; a decode instance shares its time among its
decodes and the prompts that it computes beside them. Seconds and tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import log2, sqrt
from typing import NamedTuple

from shared.domain.demand import Demand
from shared.domain.instance import InstanceView
from shared.domain.rates import UNKNOWN_STEPS, StepRates
from shared.policy.backlog import speed_class
from shared.policy.estimate import ENDLESS
from shared.policy.harm import missed

HORIZON_S = 30.0  # what cannot be served waits as if it had gathered for so long
SLOWNESS = 0.02  # of a miss, for each target's length of time: roles are to serve in time, and do not change for less
FULL = 0.97  # use beyond which a queue grows rather than settles
TRIED = 5  # shares of the prompts that prefill instances compute, least and most included
HALVINGS = 14
# Gauss-Laguerre with two points: the mean of a function over exponential waits.
WAITS = ((2.0 - sqrt(2.0), (2.0 + sqrt(2.0)) / 4.0), (2.0 + sqrt(2.0), (2.0 - sqrt(2.0)) / 4.0))

Counts = tuple[int, ...]  # of each sort


class Sort(NamedTuple):
    """Instances that are about alike, as one of them is."""

    rates: StepRates
    chunk: int
    seats: int
    kv_tokens: int
    token_move_s: float  # KV of a token over its link


class Roles(NamedTuple):
    """How many of each sort compute prompts, and how many decode."""

    prefills: Counts
    decodes: Counts


class Outlook(NamedTuple):
    """What a demand would meet. harm: the share that is expected to miss a target, and a little for being slow.

    ttft_s, tpot_s: means. prefill_use, decode_use: of the capacity of either role. share: of the prompts, computed by
    prefill instances.
    """

    harm: float
    ttft_s: float
    tpot_s: float
    prefill_use: float
    decode_use: float
    share: float


def sorted_out(views: Iterable[InstanceView]) -> tuple[list[Sort], dict[str, int]]:
    """The sorts, and by instance id which one it is of. Speeds within ten per cent or so count as alike."""
    sorts: list[Sort] = []
    keys: dict[tuple[float, ...], int] = {}
    of: dict[str, int] = {}
    for view in views:
        info = view.info
        steps, chunk, link = info.rates.step or UNKNOWN_STEPS, max(1, info.chunk_size), info.rates.link
        seats, kv_tokens = info.max_seqs or ENDLESS, max(1, info.total_blocks * info.block_size)
        speeds = steps.prefill_s(chunk, 0) / chunk, steps.decode_s(1, 0), steps.decode_s(64, 64_000)
        key = (*(speed_class(max(1e-12, one)) for one in speeds), chunk, seats, round(4 * log2(kv_tokens)))
        if key not in keys:
            keys[key] = len(sorts)
            moves_s = info.kv_bytes_per_token / link.bytes_s if link is not None else 0.0
            sorts.append(Sort(steps, chunk, seats, kv_tokens, moves_s))
        of[info.instance_id] = keys[key]
    return sorts, of


def roles_of(views: Mapping[bool, Sequence[InstanceView]], of: Mapping[str, int], sorts: int) -> Roles:
    """Counts by sort; `views` by whether they compute prompts."""
    counts = {True: [0] * sorts, False: [0] * sorts}
    for prefills, found in views.items():
        for view in found:
            counts[prefills][of[view.instance_id]] += 1
    return Roles(tuple(counts[True]), tuple(counts[False]))


def outlook(demand: Demand, sorts: Sequence[Sort], roles: Roles) -> Outlook:
    """The least harm over the shares of the prompts that the split in force leaves to choose from."""
    least, most = demand.split_least, demand.split_most
    tried = 1 if most - least < 1e-6 else TRIED
    shares = [least + (most - least) * at / max(1, tried - 1) for at in range(tried)]
    prefill = _PrefillSide.of(demand, sorts, roles.prefills)
    return min((_with_share(demand, sorts, roles.decodes, prefill, share) for share in shares), key=lambda o: o.harm)


class _PrefillSide(NamedTuple):
    """servers: prefill instances. capacity: prompts a second of all. service_s: of one prompt, on average."""

    servers: int
    capacity: float
    service_s: float

    @classmethod
    def of(cls, demand: Demand, sorts: Sequence[Sort], counts: Counts) -> "_PrefillSide":
        servers = sum(counts)
        capacity = sum(n / _alone_s(demand, sort) for sort, n in zip(sorts, counts, strict=True) if n)
        return cls(servers, capacity, servers / capacity if servers else 0.0)


def _alone_s(demand: Demand, sort: Sort) -> float:
    """A prompt on an instance that only prefills; one that is not a full chunk shares its step half of the time."""
    form, fresh = sort.rates.prefill, demand.fresh_tokens
    steps = max(fresh / sort.chunk, 0.5)
    return form.fixed_s * steps + fresh * form.token_s + form.position_s * demand.fresh_squares / 2.0


def _with_share(demand: Demand, sorts: Sequence[Sort], decodes: Counts, prefill: _PrefillSide, share: float) -> Outlook:
    first_harm = first_s = use = 0.0
    if share > 0.0:
        use = share * demand.rate / prefill.capacity if prefill.servers else 2.0
        wait_s = _wait_s(use, prefill.servers, prefill.service_s, demand)
        first_harm = share * _first_harm(demand, wait_s, prefill.service_s)
        first_s = share * (wait_s + prefill.service_s)
    decode = _decode(demand, sorts, decodes, share)
    if share < 1.0:
        first_harm += (1.0 - share) * _first_harm(demand, decode.wait_s, decode.service_s)
        first_s += (1.0 - share) * (decode.wait_s + decode.service_s)
    harmed = first_harm + decode.harm
    return Outlook(harmed, first_s, decode.tpot_s, use, decode.use, share)


def _first_harm(demand: Demand, wait_s: float, service_s: float) -> float:
    """Harm of TTFT, over exponential waits and prompts one standard deviation shorter and longer than the mean."""
    spread = _variation(demand)
    return sum(
        weight / 2.0 * _harm((wait_s * wait + service_s * max(0.0, 1.0 + side * spread)) / demand.ttft_s)
        for wait, weight in WAITS
        for side in (-1.0, 1.0)
    )


def _harm(share: float) -> float:
    return missed(share) + SLOWNESS * share


def _variation(demand: Demand) -> float:
    """Of prompt lengths: standard deviation over mean."""
    return sqrt(max(0.0, demand.fresh_squares / max(1.0, demand.fresh_tokens) ** 2 - 1.0))


def _wait_s(use: float, servers: int, service_s: float, demand: Demand) -> float:
    """Mean wait in a queue with several servers; beyond FULL it grows with time.

    Source: Sakasegawa's approximation for M/M/c, with Kingman's factor for arrivals and services that are not
    exponential ((C_a^2 + C_s^2)/2); service times are taken to vary as prompt lengths do.
    """
    if not servers:
        return HORIZON_S
    settled = min(use, FULL)
    varies = (demand.burstiness + _variation(demand) ** 2) / 2.0
    wait_s = varies * settled ** (sqrt(2.0 * (servers + 1.0)) - 1.0) / (servers * (1.0 - settled)) * service_s
    return wait_s + max(0.0, use - FULL) / use * HORIZON_S if use > 0.0 else 0.0


class _Decode(NamedTuple):
    harm: float
    tpot_s: float
    use: float
    wait_s: float  # of a prompt that a decode instance computes
    service_s: float


class _Shared(NamedTuple):
    """One sort of decode instances beside which prompts are computed: a step takes (fixed_s + each_s * b) / left."""

    instances: int
    fixed_s: float
    each_s: float
    left: float  # the share of its time that prompts leave
    most: float  # decodes at once, by seats and KV room
    prompt_s: float  # the prompt itself, beside the decodes: what its tokens add
    chunks: float  # steps that it takes

    def rate(self, step_s: float, output: float) -> float:
        """Requests a second of one instance whose steps take so long; no more than seats and memory allow."""
        batch = min(self.most, max(0.0, (step_s * self.left - self.fixed_s) / self.each_s))
        longest_s = (self.fixed_s + self.each_s * batch) / self.left
        return batch / (output * longest_s)


def _decode(demand: Demand, sorts: Sequence[Sort], counts: Counts, share: float) -> _Decode:
    """All decode instances, each given as much as makes their steps equally long (Little's law for their batches)."""
    local = (1.0 - share) * demand.rate
    sides = [_shared(demand, sort, n) for sort, n in zip(sorts, counts, strict=True) if n]
    speed = sum(one.instances / one.prompt_s for one in sides)  # prompts a second, if they did nothing else
    taken = local / speed if sides else 1.0
    if taken >= FULL:
        over = taken / FULL
        return _Decode(1.0 + _harm(over), HORIZON_S / demand.output_tokens * over, over, HORIZON_S, HORIZON_S)
    sides = [one._replace(left=1.0 - taken) for one in sides]
    output = demand.output_tokens
    capacity = sum(one.instances * one.rate(1e3, output) for one in sides)
    # What is decoded at once varies as arrivals do over the time that an answer takes.
    stays_s = output * min(demand.tpot_s, _step_s(sides, min(demand.rate, FULL * capacity), output))
    spread = min(0.5, sqrt(demand.burstiness / max(1.0, demand.rate * stays_s)))
    moves_s = share * demand.prompt_tokens * max(sort.token_move_s for sort, n in zip(sorts, counts, strict=True) if n)
    harmed = tpot_s = 0.0
    for side in (-spread, spread):
        rate = demand.rate * (1.0 + side)
        step_s = _step_s(sides, min(rate, FULL * capacity), output)
        late_s = max(0.0, rate / capacity - FULL) * HORIZON_S
        token_s = step_s + (late_s + moves_s) / output
        harmed += _harm(token_s / demand.tpot_s) / 2.0
        tpot_s += token_s / 2.0
    busy = sum(one.instances * one.chunks / one.prompt_s for one in sides) / speed  # steps a prompt
    service_s = busy * tpot_s + speed**-1 * sum(one.instances for one in sides)
    servers = sum(one.instances for one in sides)
    wait_s = _wait_s(local * service_s / servers, servers, service_s, demand) if local > 0.0 else 0.0
    return _Decode(harmed, tpot_s, demand.rate / capacity, wait_s, service_s)


def _shared(demand: Demand, sort: Sort, count: int) -> _Shared:
    rates, fresh = sort.rates, demand.fresh_tokens
    context = demand.prompt_tokens + demand.output_tokens / 2.0
    mixed, decode = rates.mixed, rates.decode
    chunks = max(1.0, fresh / sort.chunk)
    adds_s = chunks * max(0.0, mixed.fixed_s - decode.fixed_s) + fresh * mixed.token_s
    adds_s += mixed.position_s * demand.fresh_squares / 2.0
    each_s = max(1e-9, decode.sequence_s + decode.context_s * context)
    most = max(1.0, min(float(sort.seats), sort.kv_tokens / context))
    return _Shared(count, decode.fixed_s, each_s, 1.0, most, max(1e-9, adds_s), chunks)


def _step_s(sides: Sequence[_Shared], rate: float, output: float) -> float:
    """The length of a step at which all of them together complete `rate` requests a second."""
    low = min(one.fixed_s / one.left for one in sides)
    high = max((one.fixed_s + one.each_s * one.most) / one.left for one in sides)
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        if sum(one.instances * one.rate(middle, output) for one in sides) < rate:
            low = middle
        else:
            high = middle
    return high
