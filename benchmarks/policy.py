"""`polyphase bench policy`: what one decision costs, in CPU time, with 10, 100 and 1,000 instances."""

import time
from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from statistics import median
from typing import Any

import msgspec

from benchmarks.control import make_info
from benchmarks.results import Result, at_most, result
from benchmarks.scenarios import instances
from shared.domain.demand import Demand
from shared.domain.instance import ClusterView, InstanceLoad, InstanceState, InstanceView, Role
from shared.domain.job import JobView, LengthPrediction
from shared.domain.prompt import BLOCK_TOKENS
from shared.domain.rates import LinkRate
from shared.policy import registry
from shared.policy.decode_admission import DecodeMemory, RunningDecode
from shared.policy.index import ClusterIndex
from shared.policy.ledger import WorkloadLedger
from shared.policy.papers.costs import ChunkedCost, PartialPrefillCost
from shared.policy.papers.cronus import Balance, best_split
from shared.policy.placement import Policies, place
from shared.policy.prefill_order import PrefillQueue, WaitingJob
from shared.policy.prefix_index import MAX_BLOCKS, PrefixIndex
from shared.policy.role_flip import FlipContext, FlipHistory

SIZES = (10, 100, 1_000)
KNOWN_BLOCKS = MAX_BLOCKS // SIZES[-1]  # of prompts, at each instance
FAMILIES, FAMILY_BLOCKS = 16, 62  # of prompts that begin alike; what the longest prompt has
ROUNDS = 7
ROUND_S = 0.01  # CPU time of one round, at least
MAX_COSTS = {
    "dispatch_power_of_two_1000_us": 20.0,
    "split_cronus_1000_us": 1_000.0,
    "split_cronus_all_candidates_us": 1_000.0,
    "place_1000_us": 30.0,
    "placement_adaptive_1000_us": 150.0,
    "index_1000_ms": 3.0,
}
DEMAND = Demand(100.0, 1.0, 1_000.0, 1_000.0, 2e6, 200.0, 2.0, 0.05)  # requires other roles: the costliest case
Decide = Callable[[int], object]  # of the number of the call


def run_policy_bench() -> Result:
    """Names end in the number of instances where the cost may depend on it."""
    figures: dict[str, float] = {}
    for size in SIZES:
        figures |= {f"{name}_{size}_us": round(1e6 * cpu_s(decide), 2) for name, decide in _by_size(size)}
        view = cluster(size)
        build_s = cpu_s(lambda _, view=view: ClusterIndex(view, rng=Random(0)).backlog)  # type: ignore[misc]
        figures[f"index_{size}_ms"] = round(1e3 * build_s, 4)
    figures |= {f"{name}_us": round(1e6 * cpu_s(decide), 2) for name, decide in _of_any_size()}
    note = (
        "CPU time of this process on one core, median of rounds. Prompts have beginnings that some instances hold, of "
        "1,000 blocks that each does. place: the whole decision with least_load and a full split."
    )
    return result(figures, {name: at_most(cost, figures[name]) for name, cost in MAX_COSTS.items()}, [note])


def cpu_s(decide: Decide, rounds: int = ROUNDS, round_s: float = ROUND_S) -> float:
    """Median CPU seconds of a call over some rounds, each with as many calls as take `round_s`."""

    def taken(calls: int) -> float:
        started = time.process_time()
        for call in range(calls):
            decide(call)
        return time.process_time() - started

    calls = 1
    while taken(calls) < round_s:
        calls *= 2
    return median(taken(calls) / calls for _ in range(rounds))


def _by_size(size: int) -> Iterator[tuple[str, Decide]]:
    """Decisions whose cost may depend on the number of instances."""
    jobs, rng, index, view = some_jobs(), Random(1), _index(size), cluster(size)
    prefills, decodes = index.prefill.views, index.decode.views
    full = Policies(registry.placement("least_load"), registry.split("full"), registry.dispatch("power_of_two"))
    for name in registry.PLACEMENT:
        policy = registry.placement(name, {"routes": _routes(index)} if name == "plan" else {})
        loaded, fill = _index(size), Policies(policy, full.split, registry.dispatch("random"))
        for number in range(2 * size):  # unfinished work, for policies that consider it
            job = msgspec.structs.replace(jobs[number % 64], job_id=f"before-{number}")
            loaded.ledger.add(job, place(job, loaded, fill, 0.0, rng).route)
        yield f"placement_{name}", lambda call, p=policy, i=loaded: p.choose(jobs[call % 64], i, (), 0.0, rng)  # type: ignore[misc]
    for name in registry.DISPATCH:
        dispatch = registry.dispatch(name)
        yield f"dispatch_{name}", lambda call, p=dispatch: p.choose(jobs[call % 64], decodes, (), 0.0, rng)  # type: ignore[misc]
    for name in registry.ROLE_FLIP:
        flips = registry.role_flip(name)
        context = FlipContext(DEMAND)
        yield f"role_flip_{name}", lambda call, p=flips, c=context: p.propose(view, float(call), FlipHistory(), c)  # type: ignore[misc]
    yield "place", lambda call: place(jobs[call % 64], index, full, 0.0, rng).route
    cronus = registry.split("cronus")
    yield (
        "split_cronus",
        lambda call: cronus.choose(jobs[call % 64], prefills[call % len(prefills)], decodes[call % len(decodes)], rng),
    )


def _of_any_size() -> Iterator[tuple[str, Decide]]:
    """Decisions whose cost does not depend on the number of instances."""
    jobs, rng, index = some_jobs(), Random(1), _index(10)
    low, high = index.prefill.views[0], index.decode.views[0]
    for name in registry.SPLIT:
        split = registry.split(name)
        yield f"split_{name}", lambda call, p=split: p.choose(jobs[call % 64], low, high, rng)  # type: ignore[misc]
    steep = Balance(8_000, PartialPrefillCost(1e-7, 0.0), ChunkedCost(1e-6, 1e-8, 0.03), 448, 60_000)
    yield "split_cronus_all_candidates", lambda _: best_split(steep)
    for name in registry.PREFILL_ORDER:
        line = PrefillQueue[object](registry.prefill_order(name))
        for job in jobs:
            line.push(object(), WaitingJob(job, job.prompt_tokens))

        def push_and_pop(call: int, line: PrefillQueue[object] = line) -> object:
            line.push(object(), WaitingJob(jobs[call % 64], jobs[call % 64].prompt_tokens))
            return line.pop()

        yield f"prefill_order_{name}", push_and_pop
    memory = DecodeMemory(2_000, 16, 10_000, 100_000, tuple(RunningDecode(400 + at, at) for at in range(256)))
    for name in registry.DECODE_ADMISSION:
        admission = registry.decode_admission(name)
        yield f"decode_admission_{name}", lambda call, p=admission: p.admit(jobs[call % 64], memory, 0.0)  # type: ignore[misc]


def some_jobs() -> list[JobView]:
    """64 jobs of different lengths, with predictions, and with prompts whose beginnings some instances hold."""
    rng, jobs = Random(2), []
    for number in range(64):
        lower = 200 * rng.randrange(4)
        prediction = LengthPrediction(lower // 200, lower, lower + 200, 0.8, "observed")
        prompt = rng.randrange(1, 4_000)
        prefix = family(number % FAMILIES)[: prompt // BLOCK_TOKENS]
        jobs.append(JobView(f"j{number}", prompt, 1_000, prediction=prediction, prefix=prefix, migrates=True))
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


def cluster(size: int) -> ClusterView:
    """`size` instances of three kinds under some load, half of them with either role."""
    rng, views, link = Random(3), [], LinkRate(2e9, 1e-3)
    known = list({spec.accelerator: spec.rates for spec in instances("prefill_heavy")}.values())
    for number in range(size):
        role = Role.DECODE if number % 2 else Role.PREFILL
        info = msgspec.structs.replace(
            make_info(f"i{number:04}", f"tcp://10.0.0.1:{1_000 + number}"),
            total_blocks=20_000,
            max_model_len=16_384,
            max_seqs=128,
            rates=msgspec.structs.replace(known[number % len(known)], link=link),
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


def _index(size: int) -> ClusterIndex:
    return ClusterIndex(cluster(size), rng=Random(4), ledger=WorkloadLedger(), prefixes=known_prefixes(size))


def _routes(index: ClusterIndex) -> list[list[Any]]:
    """A plan that pairs each candidate with a decode instance."""
    prefills, decodes = index.prefill.views, index.decode.views
    return [[view.instance_id, decodes[at % len(decodes)].instance_id, 1.0] for at, view in enumerate(prefills)]
