"""`polyphase bench mobility`: what it brings to move KV between any two instances.

Each section is a function: `chats` simulates clusters whose placement pulls prefixes from the instances that hold them,
and the same clusters without pulls; `goodput` and `traces` clusters with each mechanism and without; `host` a cluster
with and without host tiers. `pulls` and `migration` are live.
"""

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median

import numpy as np

from benchmarks.experiment import Row
from benchmarks.goodput import goodput
from benchmarks.migrations import KINDS, LONG_STREAMS, drained, figures_of, moved_streams
from benchmarks.policies import COARSE, LASTS_S, MIN_REQUESTS, RESOLUTION, SHORT_S, Runs
from benchmarks.prefix import TRACES, traces
from benchmarks.pulls import live_pulls
from benchmarks.results import Aim, Result, aim, at_least, at_most, merged, progress, result, run_parts
from benchmarks.scenarios import (
    SEED,
    TARGET,
    Scenario,
    all_scenarios,
    chat_scenarios,
    instances,
    shipped,
    slo_scenarios,
)
from shared.domain.instance import Role
from shared.domain.job import Slo
from shared.domain.prompt import BLOCK_TOKENS
from shared.sim.cluster import simulate
from shared.sim.metrics import attainment, summary
from shared.sim.outcomes import SimResult
from shared.sim.spec import with_words
from shared.sim.traces import read_trace
from shared.sim.workload import CHATS, TURNS_A_CHAT, Workload, conversations, oracle_tokens, poisson

WITH = "adaptive"
WITHOUT = "placement=adaptive:pull=false+split=adaptive+dispatch=adaptive"


def run_mobility_bench(
    data: Path, sections: Sequence[str] = (), *, processes: int = 2, results: Path | None = None
) -> Result:
    """sections: names; empty for all. results: see `Runs`. Raises NotFound without traces, InvalidRequest for an
    unknown section, Unavailable where this machine allows no quotas.
    """
    parts: dict[str, Callable[[], Result]] = {
        "chats": partial(simulated_chats, data, processes),
        "goodput": partial(simulated_goodput, results, processes),
        "traces": partial(traced_goodput, data, processes),
        "host": partial(simulated_host, processes),
        "pulls": live_pulls,
        "migration": live_migrations,
    }
    return run_parts(parts, sections)


# Chats: Mooncake's traces and a synthetic one, on instances of both roles and of two kinds, and on equal instances that
# serve whole requests.

REQUESTS = 4_000  # the first of each trace
SHARES = (0.5, 0.9)  # of what `least_load` serves when all come at once
HITS, TTFT = 0.95, 0.6  # aims: of the pooled oracle's hits, of the mean TTFT of `least_load`
SLO = Slo()  # the default class
SYSTEMS = {"pull": WITH, "no_pull": WITHOUT}
LEAST_LOAD = {  # by cluster
    "chats": "least_load+split=full+power_of_two",
    "prefix": "least_load+split=none+power_of_two",
}
TABLE = "chats, simulated"
SHOWN = {"ttft_mean_s": 3, "ttft_p50_s": 3, "ttft_p99_s": 2, "tpot_mean_s": 4, "attainment": 4}  # and their digits


@dataclass(frozen=True, slots=True)
class Chats:
    """A workload of chats on a cluster. file: of a trace; None for the synthetic one."""

    cluster: str
    name: str
    file: Path | None

    def workload(self, rate: float | None = None) -> Workload:
        """At so many requests a second. The synthetic chats keep their pauses: more of them begin in a second."""
        if self.file is None:
            return conversations(REQUESTS, SEED, rate / TURNS_A_CHAT if rate is not None else 1.0)
        trace = read_trace(self.file).head(REQUESTS)
        return trace.at_rate(rate) if rate is not None else trace

    def run(self, words: str, work: Workload, slo: Slo = SLO, *, aggregated: bool = False) -> SimResult:
        """aggregated: each instance serves whole requests."""
        specs = instances(self.cluster)
        if aggregated:
            specs = tuple(replace(spec, role=Role.DECODE) for spec in specs)
        spec = replace(shipped(self.cluster).run, slo=slo, seed=SEED)
        return simulate(work, specs, with_words(spec, words))


def simulated_chats(data: Path, processes: int) -> Result:
    files = [*zip(TRACES, traces(data), strict=True), (CHATS, None)]
    cases = [Chats(cluster, name, file) for cluster in LEAST_LOAD for name, file in files]
    notes = [
        f"chats: {REQUESTS:,} requests; rates are shares of what least_load serves; TTFT {SLO.ttft_s:g} s, TPOT "
        f"{SLO.tpot_s:g} s",
        "oracle: one cache as large as the KV memory of all instances together, which holds each prompt and its answer "
        "from the arrival of the request; half: of half the memory, as where a prefill and a decode instance hold each "
        "prompt; unlimited: without a bound",
    ]
    with ProcessPoolExecutor(processes) as pool:
        return merged(*pool.map(compared_chats, cases), {"notes": notes})


def compared_chats(case: Chats) -> Result:
    """Mean TTFT and prompt tokens that were not computed: with pulls, without, and of `least_load`."""
    work, least, head = case.workload(), LEAST_LOAD[case.cluster], f"{case.cluster}_{case.name}"
    capacity = len(work) / case.run(least, work.at_once()).duration_s
    figures: dict[str, float] = {}
    aims: dict[str, Aim] = {}
    rows: list[Row] = []
    for share in SHARES:
        at, timed = f"{head}_at_{round(100 * share)}_percent", case.workload(share * capacity)
        seen = {name: case.run(words, timed) for name, words in (SYSTEMS | {"least_load": least}).items()}
        total = int(timed.prompt_tokens.sum())
        pooled, halved, unlimited = (pooled_tokens(case.cluster, timed, part) for part in (1.0, 0.5, None))
        figures[f"{at}_oracle_saved_share"] = round(pooled / total, 4)
        figures[f"{at}_half_oracle_saved_share"] = round(halved / total, 4)
        figures[f"{at}_unlimited_saved_share"] = round(unlimited / total, 4)
        ttft_s, hits = {}, {}
        for name, one in seen.items():
            known, saved = summary(one, SLO), total - sum(use.prefill_tokens for use in one.instances)
            ttft_s[name], hits[name] = known["ttft_mean_s"], saved / pooled
            row: Row = {
                "cluster": case.cluster,
                "trace": case.name,
                "per_s": round(share * capacity, 3),
                "system": name,
            }
            row |= {key: round(known[key], digits) for key, digits in SHOWN.items()}
            row |= {"saved_share": round(saved / total, 4), "hits_of_oracle": round(hits[name], 4)}
            rows.append(row | {"pulls": one.pulls, "pulled_share": round(one.pulled_tokens / total, 4)})
        figures[f"{at}_no_pull_hits_of_oracle"] = round(hits["no_pull"], 4)
        figures[f"{at}_no_pull_ttft_over_least_load"] = round(ttft_s["no_pull"] / ttft_s["least_load"], 3)
        aims[f"{at}_hits_of_oracle"] = at_least(HITS, hits["pull"], 4)
        aims[f"{at}_ttft_over_least_load"] = at_most(TTFT, ttft_s["pull"] / ttft_s["least_load"])
        progress(f"{at}: hits {hits}, TTFT {ttft_s}")
    return result(figures, aims) | {"tables": {TABLE: rows}}


def pooled_tokens(cluster: str, work: Workload, share: float | None = 1.0) -> int:
    """Prompt tokens that one cache for all instances would save, of that share of their memory; None: of any size."""
    assert work.prefixes is not None  # these workloads name them
    assert work.answers is not None
    blocks = sum(node.kv_tokens for node in instances(cluster)) // work.prefix_block_tokens
    prompts = list(zip(work.prefixes, work.prompt_tokens.tolist(), strict=True))
    bound = round(share * blocks) if share is not None else None
    return sum(oracle_tokens(prompts, work.prefix_block_tokens, bound, work.answers))


# Goodput in the scenarios of `bench policies`, whose requests have no common prefixes, and of chats on their clusters:
# with each mechanism and without, and where every instance serves whole requests, or none does.

CHAT_SEEDS = 3  # where answers are long, single requests decide: goodput varies by a tenth
NEITHER = f"{WITHOUT}+migration=off"
ARMS = {
    "mobile": WITH,
    "no_keep": "placement=adaptive:keep=false+split=adaptive+dispatch=adaptive",
    "neither": NEITHER,
    "aggregated": NEITHER,
    "disaggregated": "placement=adaptive:pull=false+split=full+dispatch=adaptive+migration=off",
}
CHAT_ARMS = ARMS | {"no_migration": f"{WITH}+migration=off", "no_pull": WITHOUT}


def simulated_goodput(results: Path | None, processes: int) -> Result:
    """results: a file in which runs are kept (`Runs`)."""
    kept, cases = Runs(results), [*all_scenarios(), *chat_scenarios(), *slo_scenarios()]
    with ProcessPoolExecutor(processes) as pool:
        return merged(*pool.map(partial(compared_goodput, kept), cases))


def compared_goodput(kept: Runs, case: Scenario) -> Result:
    """Requests a second within their targets, by arm; means over the seeds."""
    arms, count = (CHAT_ARMS, CHAT_SEEDS) if case.kind == CHATS else (ARMS, 1)
    found = [_goodputs(kept, replace(case, seed=case.seed + at), arms) for at in range(count)]
    means = dict(zip(arms, map(fmean, zip(*found, strict=True)), strict=True))
    progress(f"{case.name}: {means}; by seed {found}")
    figures = {f"goodput_{case.name}_{arm}_per_s": round(mean, 3) for arm, mean in means.items()}
    ratio = means["mobile"] / max(1e-9, means["neither"])
    return result(figures, {f"goodput_{case.name}_mobile_over_neither": at_least(1.0, ratio)})


def _goodputs(kept: Runs, case: Scenario, arms: Mapping[str, str]) -> list[float]:
    rough = goodput(kept.meets(case, WITH, MIN_REQUESTS, SHORT_S), 8.0, COARSE)
    requests = max(MIN_REQUESTS, round(LASTS_S * rough))
    cases = [replace(case, aggregated=arm == "aggregated") for arm in arms]
    served = zip(cases, arms.values(), strict=True)
    return [goodput(kept.meets(one, words, requests), rough, RESOLUTION) for one, words in served]


# Host tiers: questions about long documents, whose KV is some times as large as the KV memory of all instances. The
# popularity of documents follows Zipf's law.

HOST_CLUSTER = "host_tier"
SIZES = (2, 10)  # of the documents' KV, in units of the KV memory of all instances
QUESTIONS, CLIENTS = 16_000, 256  # a closed loop; the first half of the requests fills the caches and is not counted
DOCUMENT_TOKENS, QUESTION_TOKENS, REPLY_TOKENS, ZIPF = 8_192, 192, 128, 0.8
OPEN_SHARE = 0.9  # of the throughput without a tier: the rate at which TTFT is compared
UNAWARE = "placement=adaptive:host_tier=false+split=adaptive+dispatch=adaptive"
TIERS = {"no_tier": WITH, "ignored": UNAWARE, "known": WITH}
HOST_TABLE = "host tier, simulated"


@dataclass(frozen=True, slots=True)
class Questions:
    """A cluster whose documents' KV is `size` times its own. arm: a key of TIERS."""

    size: int
    arm: str

    def workload(self, count: int) -> Workload:
        rng, block = np.random.default_rng(SEED), BLOCK_TOKENS
        documents = round(self.size * sum(node.kv_tokens for node in instances(HOST_CLUSTER)) / DOCUMENT_TOKENS)
        popularity = np.arange(1, documents + 1) ** -ZIPF
        asked = rng.choice(documents, count, p=popularity / popularity.sum())
        shared, own = DOCUMENT_TOKENS // block, QUESTION_TOKENS // block
        prefixes = tuple(
            (*range(one * shared, (one + 1) * shared), *range(-row * own - own, -row * own))
            for row, one in enumerate(asked.tolist())
        )
        prompts = np.full(count, DOCUMENT_TOKENS + QUESTION_TOKENS)
        return Workload("documents", np.zeros(count), prompts, np.full(count, REPLY_TOKENS), prefixes, block)

    def run(self, count: int, rate: float = 0.0) -> "Served":
        """In a closed loop, or as a Poisson process of that rate."""
        nodes = instances(HOST_CLUSTER)
        if self.arm == "no_tier":
            nodes = tuple(replace(node, limits=replace(node.limits, host=None)) for node in nodes)
        spec = replace(shipped(HOST_CLUSTER).run, slo=SLO, seed=SEED, concurrency=0 if rate else CLIENTS)
        work = self.workload(count)
        seen = simulate(poisson(work, rate, SEED) if rate else work, nodes, with_words(spec, TIERS[self.arm]))
        return Served.of(seen, count // 2)


@dataclass(frozen=True, slots=True)
class Served:
    """The requests from number `first` on. computed_share: of all prompt tokens of the run."""

    per_s: float
    ttft_mean_s: float
    ttft_p99_s: float
    computed_share: float

    @classmethod
    def of(cls, seen: SimResult, first: int) -> "Served":
        rows, computed = seen.outcomes, sum(use.prefill_tokens for use in seen.instances)
        ttft_s = rows.ttft_s[first:]
        lasted_s = float(np.sort(rows.last_token_s)[-1] - np.sort(rows.last_token_s)[first - 1])
        return cls(
            (len(rows.last_token_s) - first) / lasted_s,
            float(ttft_s.mean()),
            float(np.percentile(ttft_s, 99)),
            computed / float(rows.prompt_tokens.sum()),
        )


def simulated_host(processes: int, count: int = QUESTIONS) -> Result:
    notes = [
        f"host: questions of {QUESTION_TOKENS} tokens about documents of {DOCUMENT_TOKENS:,} (Zipf {ZIPF:g}), answers "
        f"of {REPLY_TOKENS}; {CLIENTS} clients in a closed loop, and a Poisson process at {OPEN_SHARE:.0%} of the "
        f"throughput without a tier; the second half of {count:,} requests"
    ]
    cases = [Questions(size, arm) for size in SIZES for arm in TIERS]
    with ProcessPoolExecutor(processes) as pool:
        closed = dict(zip(cases, pool.map(partial(Questions.run, count=count), cases), strict=True))
        rates = [OPEN_SHARE * closed[Questions(case.size, "no_tier")].per_s for case in cases]
        opened = dict(zip(cases, pool.map(Questions.run, cases, [count] * len(cases), rates), strict=True))
    figures: dict[str, float] = {}
    aims: dict[str, Aim] = {}
    rows: list[Row] = []
    for case in cases:
        at, busy, calm = f"host_{case.size}_times_{case.arm}", closed[case], opened[case]
        row: Row = {"documents": f"{case.size} x KV", "tier": case.arm, "per_s": round(busy.per_s, 2)}
        row |= {"busy_ttft_mean_s": round(busy.ttft_mean_s, 3), "busy_ttft_p99_s": round(busy.ttft_p99_s, 3)}
        row |= {"ttft_mean_s": round(calm.ttft_mean_s, 4), "ttft_p99_s": round(calm.ttft_p99_s, 4)}
        rows.append(row | {"computed_share": round(busy.computed_share, 4)})
        figures |= {f"{at}_per_s": round(busy.per_s, 3), f"{at}_ttft_mean_s": round(calm.ttft_mean_s, 4)}
        figures[f"{at}_ttft_p99_s"] = round(calm.ttft_p99_s, 4)
    for size in SIZES:
        none, ignored, known = (Questions(size, arm) for arm in TIERS)
        head = f"host_{size}_times_known"
        aims[f"{head}_per_s_over_no_tier"] = at_least(1.0, closed[known].per_s / closed[none].per_s)
        aims[f"{head}_per_s_over_ignored"] = at_least(1.0, closed[known].per_s / closed[ignored].per_s)
        aims[f"{head}_ttft_over_no_tier"] = at_most(1.0, opened[known].ttft_mean_s / opened[none].ttft_mean_s)
    return result(figures, aims, notes) | {"tables": {HOST_TABLE: rows}}


# Goodput on Mooncake's traces, on the cluster with both roles, at several targets.

TRACED_SLOS = {
    "tight": Slo("default", 5.0, 0.05),
    "usual": Slo("default", 10.0, 0.1),
    "loose": Slo("default", 20.0, 0.2),
}
TRACED_REQUESTS = 1_000  # the first of each trace


def traced_goodput(data: Path, processes: int) -> Result:
    cases = [(name, file, slo) for name, file in zip(TRACES, traces(data), strict=True) for slo in TRACED_SLOS]
    with ProcessPoolExecutor(processes) as pool:
        return merged(*pool.map(compared_trace, *zip(*cases, strict=True)))


def compared_trace(name: str, file: Path, slo_name: str) -> Result:
    """Requests a second within these targets, by arm."""
    case, slo, found = Chats("chats", name, file), TRACED_SLOS[slo_name], {}
    work = read_trace(file).head(TRACED_REQUESTS)
    near = len(work) / case.run(WITH, work.at_once()).duration_s / 2.0

    def met(words: str, aggregated: bool, rate: float) -> bool:
        seen = case.run(words, work.at_rate(rate), slo, aggregated=aggregated)
        return attainment(seen.outcomes, slo).every >= TARGET

    for arm, words in ARMS.items():
        found[arm] = goodput(partial(met, words, arm == "aggregated"), near, RESOLUTION)
    head = f"goodput_{name}_{slo_name}"
    progress(f"{head}: {found}")
    ratio = found["mobile"] / max(1e-9, found["neither"])
    figures = {f"{head}_{arm}_per_s": round(rate, 3) for arm, rate in found.items()}
    return result(figures, {f"{head}_mobile_over_neither": at_least(1.0, ratio)})


# Migration: answers on real engines that are moved again and again, and drains and flips beside emulated long streams.

MOVES, MOVED_TOKENS = 10, 1200  # of each answer
KILLS = len(KINDS) // 3  # answers of which a target is killed
FLIPS = 100
GAP_MS, DRAIN_S, FLIP_GAP_MS = 100.0, 1.0, 150.0  # aims: above a step; above the time of the bytes; above a step


def live_migrations() -> Result:
    with tempfile.TemporaryDirectory(prefix="polyphase-migrations-") as folder:
        return merged(*asyncio.run(_migrations(Path(folder))))


async def _migrations(folder: Path) -> tuple[Result, Result]:
    found = await moved_streams(folder / "moved", moves=MOVES, tokens=MOVED_TOKENS, kills=KILLS)
    figures = figures_of(found)
    progress(f"migration: {figures}")
    wrong, lost = len(found.wrong), found.lost_tokens
    moved = result(
        {f"migration_{name}": value for name, value in figures.items()},
        {
            "migration_wrong_streams": aim(0, wrong, not wrong),
            "migration_lost_tokens": aim(0, lost, not lost),
            "migration_gap_over_step_p99_ms": at_most(GAP_MS, figures["gap_over_step_p99_ms"]),
        },
        [f"migration: {len(KINDS)} answers, {MOVES} moves of each, targets killed in {KILLS}", *found.wrong],
    )
    one = await drained(folder / "drained", streams=LONG_STREAMS, flips=FLIPS)
    step_ms, longest_ms = 1e3 * median(one.gaps_s), 1e3 * max(one.gaps_s)
    drains = result(
        {
            "drain_s": round(one.drain_s, 3),
            "drain_bytes_s": round(one.bytes_s, 3),
            "drain_step_ms": round(step_ms, 1),
            "flips_gap_p99_9_ms": round(1e3 * float(np.percentile(one.gaps_s, 99.9)), 1),
        },
        {
            "drain_over_bytes_s": at_most(DRAIN_S, one.drain_s - one.bytes_s),
            "flips_longest_gap_over_step_ms": at_most(FLIP_GAP_MS, longest_ms - step_ms, 1),
        },
        [f"drain and flips: {LONG_STREAMS} emulated long streams, {FLIPS} flips"],
    )
    return moved, drains
