"""Huawei's deployment search: the tensor-parallel degree of each machine, by an estimate of its throughput.

Source: Huawei Algorithm 1 and eqs 1-4 (R). Machines are independent: each takes its own best degree, and every instance
does whole requests, which the paper's workload mapper spreads.
"""

from collections.abc import Iterator, Sequence

from shared.cost.kinds import EngineKind, Stage
from shared.cost.linear import huawei_of
from shared.domain.instance import Role
from shared.domain.rates import HuaweiCost
from shared.plan.group import Group, Part
from shared.plan.plan import Plan
from shared.plan.search import Found, Search

POLICIES = "workload+split=none+dispatch=random"
_DEGREES = (1, 2, 4, 8, 16)
_SAMPLE = 200  # requests that batches are packed of

Pairs = Sequence[tuple[int, int]]  # prompt and output tokens of requests


def exhaustive(search: Search) -> Iterator[Found]:
    """One plan: the best degree of every machine that holds the model."""
    groups = exhaustive_groups(search)
    if groups:
        yield search.judged(Plan(groups, policies=POLICIES), local=True)


def exhaustive_groups(search: Search) -> tuple[Group, ...]:
    """Its groups."""
    problem = search.problem
    groups: list[Group] = []
    workload = problem.workload
    pairs = list(zip(workload.prompt_tokens[:_SAMPLE].tolist(), workload.output_tokens[:_SAMPLE].tolist(), strict=True))
    for pool, entry in enumerate(problem.inventory.pools):
        by_degree = machine_throughputs(search, entry.accelerator.name, entry.count, pairs)
        if by_degree:
            best = max(by_degree, key=lambda degree: by_degree[degree])
            group = Group(Role.DECODE, best, (Part(pool, problem.shop.geometry.layers),))
            groups += [group] * (entry.count // best)
    return tuple(groups)


def machine_throughputs(search: Search, accelerator: str, count: int, pairs: Pairs) -> dict[int, float]:
    """Tokens a second of a machine, by the degrees at which its accelerators hold the model."""
    problem = search.problem
    shop, heads, found = problem.shop, problem.shop.geometry.heads, {}
    for degree in _DEGREES:
        if count % degree or heads % degree:
            continue
        kind = EngineKind((Stage(accelerator, shop.geometry.layers),), degree, problem.dtype)
        capacity = shop.kv_tokens(kind)
        if capacity >= problem.longest:
            cost = huawei_of(shop.times(kind))
            found[degree] = count / degree * estimated_throughput(cost, capacity, pairs)
    return found


def estimated_throughput(cost: HuaweiCost, capacity_tokens: int, requests: Pairs) -> float:
    """Tokens a second of one instance. Source: Algorithm 1 (R): batches are timed at their longest lengths."""
    seconds = 0.0
    for batch in packed(capacity_tokens, requests):
        prompt, output = max(p for p, _ in batch), max(o for _, o in batch)
        seconds += cost.prefill_s(len(batch), prompt) + cost.decode_s(len(batch), prompt, output)
    return sum(p + o for p, o in requests) / seconds


def packed(capacity_tokens: int, requests: Pairs) -> Iterator[tuple[tuple[int, int], ...]]:
    """The requests in order, in batches as large as the KV holds when each is padded to the longest.

    One more joins while (b + 1)·(max S + max O) <= capacity; a batch has at least one request.
    """
    batch: list[tuple[int, int]] = []
    for request in requests:
        grown = [*batch, request]
        longest = max(p for p, _ in grown) + max(o for _, o in grown)
        if batch and len(grown) * longest > capacity_tokens:
            yield tuple(batch)
            grown = [request]
        batch = grown
    if batch:
        yield tuple(batch)
