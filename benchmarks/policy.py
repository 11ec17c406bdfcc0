"""`polyphase bench policy`: what one decision costs, in CPU time, with 10, 100 and 1,000 instances."""

import time
from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from statistics import median
from typing import Any

import msgspec

from benchmarks.control_fleet import make_info
from shared.domain.demand import Demand
from shared.domain.instance import ClusterView, InstanceLoad, InstanceState, InstanceView, Role
from shared.domain.job import JobView, LengthPrediction
from shared.domain.prompt import BLOCK_TOKENS
from shared.domain.rates import ChunkedCost, HuaweiCost, LinkRate, PartialPrefillCost, Rates, StepForm, StepRates
from shared.policy import registry
from shared.policy.decode_admission import DecodeMemory, RunningDecode
from shared.policy.index import ClusterIndex
from shared.policy.ledger import WorkloadLedger, assignments
from shared.policy.papers.cronus import Balance, best_split
from shared.policy.placement import Policies, place
from shared.policy.prefill_order import PrefillQueue, WaitingJob
from shared.policy.prefix_index import MAX_BLOCKS, PrefixIndex
from shared.policy.role_flip import FlipContext, FlipHistory, RoleFlip

SIZES = (10, 100, 1_000)
KNOWN_BLOCKS = MAX_BLOCKS // SIZES[-1]  # of prompts, at each instance
FAMILIES, FAMILY_BLOCKS = 16, 62  # of prompts that begin alike; what the longest prompt has
ROUNDS = 7
ROUND_S = 0.01  # CPU time of one round, at least
# The most that each may cost.
AIMS = {
    "dispatch_power_of_two_1000_us": 20.0,
    "split_cronus_1000_us": 1_000.0,
    "split_cronus_all_candidates_us": 1_000.0,
    "place_1000_us": 30.0,
    "placement_adaptive_1000_us": 150.0,
    "index_1000_ms": 3.0,
}
RATES = tuple(  # three generations of accelerators
    Rates(
        PartialPrefillCost(2.4e-4 * factor, 0.004 * factor),
        ChunkedCost(2e-6 * factor, 6e-8 * factor, 0.11 * factor),
        HuaweiCost(*(2e-4 * factor, 1e-4, 1e-6, 0.02 * factor) * 2),
        StepRates(
            StepForm(0.02 * factor, 2e-4 * factor, 1e-8 * factor),
            StepForm(0.02 * factor, 0.0, 0.0, 1e-4 * factor, 2e-7 * factor),
            StepForm(0.02 * factor, 2e-4 * factor, 1e-8 * factor, 1e-4 * factor, 4e-7 * factor),
        ),
        LinkRate(2e9 / factor, 1e-3),
    )
    for factor in (1.0, 0.5, 0.25)
)
DEMAND = Demand(100.0, 1.0, 1_000.0, 1_000.0, 2e6, 200.0, 2.0, 0.05)
Decide = Callable[[int], object]
Case = tuple[str, Decide]


def run_policy_bench() -> dict[str, Any]:
    """Median CPU time of a decision, of several rounds.

    Returns {"figures": {name_unit: number}, "aims": {name: {"want", "got", "met"}}, "notes": [str]}. Names end in the
    number of instances where the cost may depend on it.
    """
    figures: dict[str, float] = {}
    for size in SIZES:
        for name, decide in _sized(size):
            figures[f"{name}_{size}_us"] = round(1e6 * cpu_s(decide), 2)
        view = cluster(size)
        build_s = cpu_s(lambda _, view=view: ClusterIndex(view, rng=Random(0)).backlog)  # type: ignore[misc]
        figures[f"index_{size}_ms"] = round(1e3 * build_s, 4)
    for name, decide in _unsized():
        figures[f"{name}_us"] = round(1e6 * cpu_s(decide), 2)
    aims = {
        name: {"want": f"<= {most:g}", "got": figures[name], "met": figures[name] <= most}
        for name, most in AIMS.items()
    }
    return {
        "figures": figures,
        "aims": aims,
        "notes": [
            "CPU time of this process on one core, median of rounds. coupled: no prefill instances, placement among "
            "all. Prompts have beginnings that some instances hold, of 1,000 blocks that each does. place: the whole "
            "decision with least_load and a full split; place_book: with what its booking costs."
        ],
    }


def cpu_s(decide: Decide, rounds: int = ROUNDS, round_s: float = ROUND_S) -> float:
    """Median CPU seconds of a call over some rounds, each with as many calls as take `round_s`."""
    calls, taken = 1, _round_s(decide, 1)
    while taken < round_s:
        calls *= 2
        taken = _round_s(decide, calls)
    return median(_round_s(decide, calls) / calls for _ in range(rounds))


def _round_s(decide: Decide, calls: int) -> float:
    started = time.process_time()
    for call in range(calls):
        decide(call)
    return time.process_time() - started


def _sized(size: int) -> Iterator[Case]:
    """Decisions whose cost may depend on the number of instances."""
    jobs = some_jobs()
    for kind, coupled in (("placement", False), ("coupled", True)):
        for name in registry.PLACEMENT:
            yield f"{kind}_{name}", _placement(name, size, coupled, jobs)
    views, rng = _index(size).decode.views, Random(1)
    for name in registry.DISPATCH:
        policy = registry.dispatch(name)
        yield f"dispatch_{name}", lambda call, p=policy: p.choose(jobs[call % 64], views, (), 0.0, rng)  # type: ignore[misc]
    yield from _whole(size, jobs)
    for name in registry.ROLE_FLIP:
        flips, view = registry.role_flip(name), cluster(size)
        yield f"role_flip_{name}", _role_flip(flips, view)


def _role_flip(flips: RoleFlip, view: ClusterView) -> Decide:
    """Under a demand that requires other roles: the costliest case."""
    return lambda call: flips.propose(view, float(call), FlipHistory(), FlipContext(DEMAND))


def _placement(name: str, size: int, coupled: bool, jobs: list[JobView]) -> Decide:
    index, rng = _index(size, coupled), Random(1)
    policy = registry.placement(name, {"routes": _routes(index)} if name == "plan" else {})
    fill = Policies(policy, registry.split("full"), registry.dispatch("random"))
    for number in range(2 * size):  # unfinished work, for those that look at it
        job = msgspec.structs.replace(jobs[number % 64], job_id=f"before-{number}")
        index.ledger.add(job, place(job, index, fill, 0.0, rng))
    return lambda call: policy.choose(jobs[call % 64], index, (), 0.0, rng)


def _whole(size: int, jobs: list[JobView]) -> Iterator[Case]:
    """The whole of `place`, without and with what its driver does after it; the search of the cronus split in it."""
    full = Policies(registry.placement("least_load"), registry.split("full"), registry.dispatch("power_of_two"))
    cronus = Policies(full.placement, registry.split("cronus"), full.dispatch)
    index, rng = _index(size), Random(1)
    yield "place", lambda call: place(jobs[call % 64], index, full, 0.0, rng)
    yield "place_cronus", lambda call: place(jobs[call % 64], index, cronus, 0.0, rng)
    prefills, decodes = index.prefill.views, index.decode.views
    yield (
        "split_cronus",
        lambda call: cronus.split.choose(
            jobs[call % 64], prefills[call % len(prefills)], decodes[call % len(decodes)], rng
        ),
    )
    booked = _index(size)

    def place_and_book(call: int) -> None:
        job = jobs[call % 64]
        route = place(job, booked, full, 0.0, rng)
        for assignment in assignments(job, route, 0.0):
            booked.book(assignment)
        booked.ledger.add(job, route)

    yield "place_book", place_and_book
    yield "for_dispatch", lambda _: index.for_dispatch()


def _unsized() -> Iterator[Case]:
    """Decisions whose cost does not depend on the number of instances."""
    jobs, rng = some_jobs(), Random(1)
    low, high = _index(10).prefill.views[0], _index(10).decode.views[0]
    for name in registry.SPLIT:
        split = registry.split(name)
        yield f"split_{name}", lambda call, p=split: p.choose(jobs[call % 64], low, high, rng)  # type: ignore[misc]
    steep = Balance(8_000, PartialPrefillCost(1e-7, 0.0), ChunkedCost(1e-6, 1e-8, 0.03), 448, 60_000)
    yield "split_cronus_all_candidates", lambda _: best_split(steep)
    for name in registry.PREFILL_ORDER:
        line = PrefillQueue[object](registry.prefill_order(name))
        for job in jobs:
            line.push(object(), WaitingJob(job, job.prompt_tokens))
        yield f"prefill_order_{name}", lambda call, one=line: _turn(one, jobs[call % 64])  # type: ignore[misc]
    running = tuple(RunningDecode(400 + at, at) for at in range(256))
    memory = DecodeMemory(2_000, 16, 10_000, 100_000, running)
    for name in registry.DECODE_ADMISSION:
        admission = registry.decode_admission(name)
        yield f"decode_admission_{name}", lambda call, p=admission: p.admit(jobs[call % 64], memory, 0.0)  # type: ignore[misc]


def _turn(line: PrefillQueue[object], job: JobView) -> object:
    """Push one job and pop one, while 64 wait."""
    line.push(object(), WaitingJob(job, job.prompt_tokens))
    return line.pop()


def some_jobs() -> list[JobView]:
    """64 jobs of different lengths, with predictions, and with prompts whose beginnings some instances hold."""
    rng, jobs = Random(2), []
    for number in range(64):
        lower = 200 * rng.randrange(4)
        prediction = LengthPrediction(lower // 200, lower, lower + 200, 0.8, "observed")
        prompt = rng.randrange(1, 4_000)
        prefix = family(number % FAMILIES)[: prompt // BLOCK_TOKENS]
        jobs.append(JobView(f"j{number}", prompt, 1_000, prediction=prediction, prefix=prefix))
    return jobs


def family(number: int) -> tuple[int, ...]:
    """Blocks of the prompts of a family."""
    return tuple(range(number * FAMILY_BLOCKS, (number + 1) * FAMILY_BLOCKS))


@cache
def known_prefixes(size: int) -> PrefixIndex:
    """What `size` instances hold: each a beginning of the prompts of one family, and many other blocks."""
    rng, known = Random(5), PrefixIndex()
    for number in range(size):
        shared = family(rng.randrange(FAMILIES))[: rng.randrange(FAMILY_BLOCKS + 1)]
        first = (number + 1) << 32
        known.replace(f"i{number:04}", 1, (*shared, *range(first, first + KNOWN_BLOCKS - len(shared))))
    return known


def cluster(size: int, coupled: bool = False) -> ClusterView:
    """`size` instances of three kinds under some load, half of them with either role, or all as decode instances."""
    rng, views = Random(3), []
    for number in range(size):
        role = Role.DECODE if coupled or number % 2 else Role.PREFILL
        info = msgspec.structs.replace(
            make_info(f"i{number:04}", f"tcp://10.0.0.1:{1_000 + number}"),
            total_blocks=20_000,
            max_model_len=16_384,
            max_seqs=128,
            rates=RATES[number % 3],
        )
        decoding = rng.randrange(64) if role is Role.DECODE else 0
        load = InstanceLoad(
            queued_prefill=rng.randrange(5),
            queued_prefill_tokens=rng.randrange(9_000),
            running=decoding,
            decoding=decoding,
            heavy_decodes=rng.randrange(decoding + 1),
            context_tokens=decoding * 900,
            free_blocks=rng.randrange(5_000, 20_000),
            inflight=decoding,
        )
        views.append(InstanceView(info, role, InstanceState.READY, load))
    return ClusterView(1, 0.0, tuple(views))


def _index(size: int, coupled: bool = False) -> ClusterIndex:
    return ClusterIndex(cluster(size, coupled), rng=Random(4), ledger=WorkloadLedger(), prefixes=known_prefixes(size))


def _routes(index: ClusterIndex) -> list[list[Any]]:
    """A plan that pairs each candidate with a decode instance."""
    decodes = [view.instance_id for view in index.decode.views]
    if index.coupled:
        return [["", decode, 1.0] for decode in decodes]
    return [[view.instance_id, decodes[at % len(decodes)], 1.0] for at, view in enumerate(index.prefill.views)]
