"""The planner's question: an inventory, a model, a workload and an SLO."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import ceil, inf, sqrt

import numpy as np

from shared.cost.catalogue import bytes_of
from shared.cost.kinds import EngineKind, EngineModels, Stage
from shared.domain.job import Slo
from shared.domain.kv import Codec
from shared.errors import InvalidRequest
from shared.plan.group import Group
from shared.plan.inventory import Inventory
from shared.sim.spec import EngineLimits
from shared.sim.workload import Lengths, Workload, oracle_tokens

SAMPLE = 48  # requests that represent a workload in estimates
CACHE_SHARE = 0.5  # of the KV memory that prefix caches fill in estimates: a prompt's KV is often at two instances
_OBSERVED = 3000  # requests from which estimates take what prefix caches hold, at most
_FEW = 4 * SAMPLE
_MAX_CROWDS = 64  # beyond them pauses become shorter
_LOOK_BACK = 40_000  # requests before a run that may have left something in the caches
_AHEAD, _MORE_AHEAD = 3, 64  # a crowd may have so many times its share of the requests of a run, and so many more
_MIXED = 64
_GOLDEN = (sqrt(5.0) - 1.0) / 2.0  # multiples of it are spread evenly

Clock = Callable[[], float]


@dataclass(frozen=True)
class Problem:
    """An inventory, a model (the workshop's), the requests of clients, and the SLO that they should get.

    workload: its lengths and the pattern of its arrivals. rate: requests a second that the plan must serve; 0: as many
    as possible. target: SLO attainment at which a rate counts as served. limits: of each engine. one_node: no group
    spans nodes, which vLLM engines require. codec: of KV transfers. longest_tokens: of a request, prompt and answer.
    budget_usd_hour: what the accelerators used may cost. quantised: precisions of weights, besides the model's,
    that groups with the prefill role may have (mixed precision). prefix_cache: of engines without pipelines.
    cache_rate: requests a second at which estimates take what prefix caches hold; 0: the workload's own.
    """

    inventory: Inventory
    models: EngineModels
    workload: Workload
    slo: Slo = field(default_factory=Slo)
    rate: float = 0.0
    target: float = 0.9
    limits: EngineLimits = field(default_factory=EngineLimits)
    one_node: bool = False
    codec: Codec = Codec.RAW
    longest_tokens: int = 0
    budget_usd_hour: float = inf
    dtype: str | None = None
    quantised: tuple[str, ...] = ()
    prefix_cache: bool = True
    cache_rate: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.target < 1.0:
            raise InvalidRequest(f"target must be between 0 and 1, not {self.target}")
        if self.rate < 0:
            raise InvalidRequest(f"rate must not be negative, not {self.rate}")
        if not self.budget_usd_hour > 0:
            raise InvalidRequest(f"budget must be positive, not {self.budget_usd_hour} USD an hour")

    @property
    def caches(self) -> bool:
        """Whether prefix caches are planned with: where engines have them, and the workload names its prefixes."""
        return self.prefix_cache and self.workload.prefixes is not None

    @cached_property
    def sample(self) -> "Sample":
        if not self.caches:
            return Sample.from_workload(self.workload)
        size = len(self.workload)  # of which half come before, to fill the caches, unless they are few
        drawn = self.requests(min(size if size < _FEW else size // 2, _OBSERVED), self.cache_rate)
        device, both = (drawn.oracle_tokens(round(CACHE_SHARE * bound)) for bound in self.cache_tokens)
        return Sample.from_workload(drawn.workload, held=both, hosted=both - device)

    def requests(self, count: int, rate: float) -> "Requests":
        """The requests of a run at that rate."""
        if not self.caches:
            return Requests(repeated(self.workload.without_prefixes(), count))
        return crowd(self.workload, count, rate, self.cache_tokens[1])

    @cached_property
    def cache_tokens(self) -> tuple[int, int]:
        """KV tokens that all accelerators together hold beside the weights, without their host memory and with it.

        Each pool is cut into the smallest groups of one stage that hold the model.
        """
        device = host = 0.0
        geometry = self.models.geometry
        for pool in self.inventory.pools:
            degree = 1
            while degree <= pool.count and geometry.heads % degree == 0:
                kind = EngineKind((Stage(pool.accelerator.name, geometry.layers),), degree, self.dtype)
                if (tokens := self.models.kv_tokens(kind)) >= self.longest:
                    groups = pool.count // degree
                    device += groups * tokens
                    host += groups * self.host_tokens(kind, pool.host_kv_bytes)
                    break
                degree *= 2
        return int(device), int(device + host)

    def host_tokens(self, kind: EngineKind, bytes_each: int) -> int:
        """Tokens whose KV is in the host memory of an engine of one stage, with so many bytes for each accelerator."""
        geometry, width = self.models.geometry, bytes_of(self.models.kv_dtype(kind))
        copies = float(kind.tensor_parallel) if geometry.latent else max(1.0, kind.tensor_parallel / geometry.kv_heads)
        return int(kind.tensor_parallel * bytes_each // (geometry.kv_bytes_per_token(width) * copies))

    @cached_property
    def longest(self) -> int:
        """Tokens of context that each group must hold: `longest_tokens`, else the workload's longest request."""
        return self.longest_tokens or int((self.workload.prompt_tokens + self.workload.output_tokens).max())

    def price_usd_hour(self, groups: Iterable[Group]) -> float:
        return sum(group.price_usd_hour(self.inventory) for group in groups)

    def affords(self, groups: Iterable[Group]) -> bool:
        """Whether the groups are within the budget."""
        return self.price_usd_hour(groups) <= self.budget_usd_hour * (1.0 + 1e-9)

    def on(self, inventory: Inventory) -> "Problem":
        return replace(self, inventory=inventory)


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of a run, in their order, all at time 0.

    before: those that came last before them, where the workload names prefixes; None: caches begin empty.
    """

    workload: Workload
    before: Workload | None = None

    def oracle_tokens(self, cache_tokens: int) -> Lengths:
        """Tokens of each prompt that one cache of that size would save."""
        parts = [self.workload] if self.before is None else [self.before, self.workload]
        prompts = [row for part in parts for row in zip(part.prefixes or (), part.prompt_tokens.tolist(), strict=True)]
        answers = [row for part in parts for row in part.answers or ((),) * len(part)]
        block = self.workload.prefix_block_tokens
        found = oracle_tokens(prompts, block, cache_tokens // block, answers)
        return np.array(found[-len(self.workload) :], dtype=np.int64)


def mixed(workload: Workload, seed: int) -> Workload:
    """The requests in another order, in which every `_MIXED` of them have about the lengths of all: a small inventory,
    whose runs have few requests, is then judged by the same lengths as a large one.
    """
    rng = np.random.default_rng(seed)
    order = np.lexsort((workload.output_tokens, workload.prompt_tokens))
    classes = [rng.permutation(one) for one in np.array_split(order, min(_MIXED, len(order)))]
    blocks = (rng.permutation([one[at] for one in classes if at < len(one)]) for at in range(len(classes[0])))
    return replace(workload.at_once().rows(np.concatenate(list(blocks))), mix=None)


def repeated(workload: Workload, count: int) -> Workload:
    """The first `count` requests, all at time 0, repeated from the first where there are fewer."""
    return replace(workload.at_once().rows(np.arange(count) % len(workload)), mix=None)


def crowd(workload: Workload, count: int, rate: float, cache_tokens: int) -> Requests:
    """`count` requests at `rate` a second, of as many crowds of clients like the workload's as come to that rate.

    Pauses between the turns of a chat stay about as they are: at a higher rate than the workload's own there are more
    chats at a time, not faster ones. Each crowd is at another place in the workload, and what comes before that place,
    as far as caches of `cache_tokens` hold it, has come before the run. Crowds, and repetitions of the workload where
    it is too short, have texts of their own, with their own blocks and sessions: no request finds itself in a cache.
    """
    size = len(workload)
    crowds = min(_MAX_CROWDS, max(1, round(rate / workload.rate))) if rate > 0 else 1
    each = min(count, ceil(_AHEAD * count / crowds) + _MORE_AHEAD) if crowds > 1 else count
    latest = max(0, size - each)
    first = min(size // 2, latest)
    span_s = float(workload.arrival_s[-1] - workload.arrival_s[0]) * size / max(1, size - 1)
    times_s, rows, numbers, past = [], [], [], []
    for nth in range(crowds):
        begin = first + int((nth * _GOLDEN) % 1.0 * (latest - first))
        at = np.arange(max(0, begin - _LOOK_BACK // crowds), begin + each)
        repetition, row = np.divmod(at, size)
        seconds = repetition * span_s + workload.arrival_s[row] if span_s > 0 else at.astype(np.float64)
        times_s.append(seconds - seconds[begin - at[0]])
        rows.append(row)
        numbers.append(nth * (1 + count // size) + repetition)
        past.append(at < begin)
    time_s, row, number, over = map(np.concatenate, (times_s, rows, numbers, past))
    order = np.argsort(time_s, kind="stable")
    later = order[~over[order]][:count]
    earlier = order[over[order]]
    found = _renamed(workload, row[later], number[later])
    kept = _last_to_use(workload, row[earlier], number[earlier], cache_tokens // workload.prefix_block_tokens)
    return Requests(found, _renamed(workload, row[earlier[kept]], number[earlier[kept]]) if kept else None)


def _last_to_use(workload: Workload, rows: Lengths, numbers: Lengths, blocks: int) -> list[int]:
    """Positions of the requests that were the last ones to use some block, back to where so many blocks were used."""
    held: set[tuple[int, int]] = set()
    kept: list[int] = []
    whole = (workload.prompt_tokens // workload.prefix_block_tokens).tolist()
    assert workload.prefixes is not None
    for at in range(len(rows) - 1, -1, -1):
        if len(held) >= blocks:
            break
        row, number = int(rows[at]), int(numbers[at])
        before = len(held)
        held.update((number, block) for block in workload.prefixes[row][: whole[row]])
        if len(held) > before:
            kept.append(at)
    return kept[::-1]


def _renamed(workload: Workload, rows: Lengths, numbers: Lengths) -> Workload:
    """These requests, all at time 0. numbers: of the text of each, shape [n]; texts of unlike numbers have no blocks or
    sessions in common.
    """
    found = replace(workload.at_once().rows(rows), mix=None)
    ids = [*chain.from_iterable(workload.prefixes or ()), *chain.from_iterable(workload.answers or ())]
    span = max(ids, default=0) - min(ids, default=0) + 1
    number: list[int] = numbers.tolist()

    def renamed(known: tuple[tuple[int, ...], ...] | None) -> tuple[tuple[int, ...], ...] | None:
        return known and tuple(
            tuple(block + n * span for block in ids) if n else ids for n, ids in zip(number, known, strict=True)
        )

    sessions = found.sessions and tuple(
        f"{name}.{n}" if name and n else name for n, name in zip(number, found.sessions, strict=True)
    )
    return replace(found, prefixes=renamed(found.prefixes), answers=renamed(found.answers), sessions=sessions)


@dataclass(frozen=True, slots=True)
class Sample:
    """Lengths that represent a workload's, shape [n], the shortest prompt to compute first; and its means.

    held: tokens of each prompt that prefix caches hold, of which `hosted` are in host memory. output: mean output
    tokens. context: mean context of a decode, over all tokens that are decoded.
    """

    prompts: Lengths
    held: Lengths
    hosted: Lengths
    outputs: Lengths
    output: float
    context: float

    @classmethod
    def from_workload(
        cls, workload: Workload, count: int = SAMPLE, held: Lengths | None = None, hosted: Lengths | None = None
    ) -> "Sample":
        """Requests at even distances in the order of what is to be computed of their prompts. held, hosted: of each
        request; None: nothing.
        """
        none = np.zeros_like(workload.prompt_tokens)
        held, hosted = none if held is None else held, none if hosted is None else hosted
        order = np.argsort(workload.prompt_tokens - held, kind="stable")
        picks = order[np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int)]
        prompts, outputs = workload.prompt_tokens, workload.output_tokens
        decoded = float(outputs.sum())
        walked = float((outputs * prompts + outputs * (outputs + 1) / 2.0).sum())
        return cls(
            prompts[picks], held[picks], hosted[picks], outputs[picks], decoded / len(workload), walked / decoded
        )

    def with_held_share(self, share: float) -> "Sample":
        """The same requests where caches hold that share of each prompt."""
        held: Lengths = (share * self.prompts).astype(np.int64)
        return replace(self, held=held, hosted=np.zeros_like(held))
