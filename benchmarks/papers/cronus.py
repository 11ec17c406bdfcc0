"""Cronus: stage capacities (Table 2) predicted and measured, and the five systems of its evaluation compared by
throughput, TTFT and TBT (5.1, Fig. 4).

`python -m benchmarks.papers.cronus DATA` fits the coefficients to the stage capacities and prints them: how
`coefficients.yaml` was made.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from scipy.optimize import least_squares

from benchmarks.papers.report import Claim, ClaimKind, Figure, Section, section_of
from benchmarks.papers.testbed import (
    CONVERSATION,
    Coefficients,
    Kind,
    Shares,
    Stage,
    Testbed,
    Watermark,
    azure,
    change,
    in_turn,
    instances,
    p99_ttft_s,
    requests_per_s,
    staged,
    weighed,
)
from shared.cost.network import Link
from shared.domain.instance import Role
from shared.policy.dispatch import PowerOfTwo
from shared.policy.papers.cronus import CronusSplit
from shared.policy.papers.huawei import Weighted
from shared.policy.placement import LeastLoad, Policies
from shared.policy.split import FullSplit, NoSplit
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult
from shared.sim.spec import EngineLimits, FirstToken, InstanceSpec, RunSpec
from shared.sim.workload import Workload, evenly

HIGH, LOWS = "A100-SXM-80", ("A10", "A30")
MODELS = ("Llama-3-8B", "Qwen2-7B")
REQUESTS = 1000  # the first of the conversation trace, as in the paper: 1014 tokens in and 247 out on average
INFINIBAND = Link(12.5e9, latency_s=1e-4, efficiency=0.8)  # 100 Gb/s
WHOLE = EngineLimits(batched_tokens=8192, sequences=1)  # the prefill instance computes one prompt at a time (4.4)
CHUNKED = EngineLimits(batched_tokens=512, sequences=256)
LOW_CHUNKED = EngineLimits(batched_tokens=256, sequences=256)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Requests a second of one GPU with one model in one role, derived from Table 2 over Table 3."""

    accelerator: str
    model: str
    role: Role
    measured: float


# The twelve capacities (Cronus, Table 2 over Table 3) are all that the coefficients are fitted to. Eight numbers are
# fitted: each GPU's share of predicted compute (from its prefill) and of predicted bandwidth (from its decode), shared
# by both models, and the cost of a step and of a sequence. Those two follow from the decodes: 25 to 256 sequences run
# at once, and the models differ in the bytes that they read. Means where two hardware columns give the A100's figure.
_MEASURED = {  # prefill and decode of the first model, then of the second
    HIGH: (11.82, 12.95, 12.40, 17.37),
    "A10": (4.15, 1.35, 4.18, 3.42),
    "A30": (6.27, 3.05, 6.66, 6.74),
}
_CASES = tuple((model, role) for model in MODELS for role in Role)
CAPACITIES = tuple(
    Capacity(gpu, *case, rate) for gpu, rates in _MEASURED.items() for case, rate in zip(_CASES, rates, strict=True)
)


@dataclass(frozen=True, slots=True)
class Column:
    """A hardware pair with a model. layers: on the A100 and on the other, by the paper's split after BF16 rates."""

    low: str
    model: str
    layers: tuple[int, int]

    @property
    def name(self) -> str:
        return f"A100+{self.low} {self.model}"


COLUMNS = (
    Column("A10", MODELS[0], (23, 9)),
    Column("A10", MODELS[1], (20, 8)),
    Column("A30", MODELS[0], (21, 11)),
    Column("A30", MODELS[1], (18, 10)),
)
# Table 2: requests a second, in the order of the columns.
TABLE_2 = {
    "DP": (7.28, 8.70, 8.54, 10.85),
    "PP": (3.86, 4.08, 3.96, 3.97),
    "Disagg H-L": (1.31, 3.45, 2.93, 6.74),
    "Disagg L-H": (4.11, 4.35, 6.14, 6.59),
    "Cronus": (7.39, 8.29, 8.70, 10.27),
}
SYSTEMS = tuple(TABLE_2)
OTHERS = SYSTEMS[:-1]
WITHIN = 0.15
LOAD = 0.5  # of what the slower of two compared systems serves; the paper does not state its rates
Rates = Mapping[str, Sequence[float]]


def cronus_section(testbed: Testbed, data: Path) -> Section:
    workload = azure(data, CONVERSATION, REQUESTS)
    at_once = workload.at_once()
    rates = {s: [requests_per_s(run_system(testbed, column, s, at_once)) for column in COLUMNS] for s in SYSTEMS}
    figures: dict[str, Figure] = {}
    claims: dict[str, Claim] = {}
    for at, one in enumerate(CAPACITIES):
        what = f"calibration: {one.accelerator} {one.role} of {one.model}"
        claims[f"stage_{at}"] = Claim("Tables 2, 3", what, ClaimKind.NONE, unit="req/s", shown=f"{one.measured:g}")
        figures[f"stage_{at}"] = modelled(testbed, workload, one)
    for system, claimed in TABLE_2.items():
        for at, column in enumerate(COLUMNS):
            key, what = f"table2_{_word(system)}_{at}", f"{column.name}: {system}"
            claims[key] = Claim("Table 2", what, ClaimKind.VALUE, claimed[at], "req/s", WITHIN)
            figures[key] = rates[system][at]
    for at, column in enumerate(COLUMNS):
        paper, ours = (" > ".join(sorted(SYSTEMS, key=lambda s: -by[s][at])) for by in (TABLE_2, rates))
        claims[f"order_{at}"] = Claim("Table 2", f"{column.name}: order", ClaimKind.ORDER, shown=paper)
        figures[f"order_{at}"] = ours, paper == ours
    for system in ("PP", "Disagg H-L", "Disagg L-H"):
        figures[f"up_to_{_word(system)}"] = max(a / b for a, b in zip(rates["Cronus"], rates[system], strict=True))
    figures |= latencies(testbed, workload, rates)
    return section_of("cronus", "Cronus: partially disaggregated prefill", figures, claims)


def modelled(testbed: Testbed, workload: Workload, capacity: Capacity) -> float:
    """A capacity as the model has it: prompts one after the other; or decodes whose KV is at hand."""
    if capacity.role is Role.PREFILL:
        model = testbed.model(capacity.accelerator, capacity.model)
        return len(workload) / sum(model.prefill_time_s(int(tokens)) for tokens in workload.prompt_tokens)
    feed = Kind(HIGH, capacity.model, limits=replace(WHOLE, sequences=256), link=Link(1e12, 0.0, 1.0), slowed=1e-3)
    decode = Kind(capacity.accelerator, capacity.model, limits=CHUNKED, link=feed.link)
    cluster = (*instances(testbed, feed, Role.PREFILL), *instances(testbed, decode, Role.DECODE))
    run = RunSpec(
        migration=False,
        label="decode alone",
        first_token=FirstToken.DECODE,
        streaming=False,
        decode_admission=Watermark(),
    )
    return requests_per_s(simulate(workload.at_once(), cluster, run))


def run_system(testbed: Testbed, column: Column, system: str, workload: Workload) -> SimResult:
    """One of the five systems on an A100 and an A10 or A30 in different hosts."""
    model, low = column.model, column.low
    placement: LeastLoad | Weighted = LeastLoad()
    split: NoSplit | FullSplit | CronusSplit = NoSplit()
    cluster: tuple[InstanceSpec, ...]
    match system:
        case "DP":  # weights 3 and 1; 3 and 1 requests may wait, beside the one whose prompt is being computed
            placement = Weighted()
            high, small = (
                instances(testbed, Kind(name, model, limits=limits, link=INFINIBAND), Role.DECODE, 1, prefix)[0]
                for name, limits, prefix in ((HIGH, CHUNKED, "high"), (low, LOW_CHUNKED, "low"))
            )
            cluster = replace(weighed(high, 3.0), max_prefills=4), replace(weighed(small, 1.0), max_prefills=2)
        case "PP":  # two micro-batches that take turns, each with half of the KV: the stages do not overlap
            stages = Stage(HIGH, column.layers[0]), Stage(low, column.layers[1])
            spec = staged(testbed, "pp", model, stages, Role.DECODE, CHUNKED, INFINIBAND, INFINIBAND)
            cluster = (in_turn(spec),)
        case "Disagg H-L":
            split, cluster = FullSplit(), _pair(testbed, model, HIGH, low)
        case "Disagg L-H":
            split, cluster = FullSplit(), _pair(testbed, model, low, HIGH)
        case _:  # live, `max_prefills` of the split limits the prefill instance, which here has a limit of its own
            split, cluster = CronusSplit(max_prefills=0), _pair(testbed, model, low, HIGH)
    run = RunSpec(
        migration=False,
        policies=Policies(placement, split, PowerOfTwo()),
        decode_admission=Watermark(),
        first_token=FirstToken.DECODE,
        streaming=False,
        broadcast_s=0.0,
    )
    return simulate(workload, cluster, run)


def _pair(testbed: Testbed, model: str, prefill: str, decode: str) -> tuple[InstanceSpec, ...]:
    """At most two requests are in the prefill instance, so that each split rests on fresh loads (4.2)."""
    first = instances(testbed, Kind(prefill, model, limits=WHOLE, link=INFINIBAND), Role.PREFILL)
    then = instances(testbed, Kind(decode, model, limits=CHUNKED, link=INFINIBAND), Role.DECODE)
    return (*(replace(spec, max_prefills=2) for spec in first), *then)


def latencies(testbed: Testbed, workload: Workload, rates: Rates) -> dict[str, Figure]:
    """P99 of TTFT and TBT of Cronus against each other system, in every column, at a rate that both serve."""
    ttft: dict[str, list[float]] = {system: [] for system in OTHERS}
    tbt: dict[str, list[float]] = {system: [] for system in OTHERS}
    for system in OTHERS:
        for at, column in enumerate(COLUMNS):
            arriving = evenly(workload, LOAD * min(rates["Cronus"][at], rates[system][at]))
            ours, theirs = (run_system(testbed, column, name, arriving) for name in ("Cronus", system))
            ttft[system].append(change(p99_ttft_s(ours), p99_ttft_s(theirs)))
            tbt[system].append(change(ours.gaps.percentile_s(0.99), theirs.gaps.percentile_s(0.99)))

    def higher(changes: Sequence[float]) -> Figure:
        return f"Cronus {', '.join(f'{one:+.0f}' for one in changes)} %", min(changes) > 0

    return {
        "ttft_dp_a10": min(ttft["DP"][:2]),
        "ttft_dp_a30": min(ttft["DP"][2:]),
        "ttft_lh": min(ttft["Disagg L-H"]),
        "ttft_pp": min(ttft["PP"]),
        "ttft_hl": higher(ttft["Disagg H-L"]),
        "tbt_pp": min(tbt["PP"]),
        "tbt_dp": min(tbt["DP"]),
        "tbt_hl": min(tbt["Disagg H-L"]),
        "tbt_lh": higher(tbt["Disagg L-H"]),
    }


def _word(system: str) -> str:
    return system.lower().replace(" ", "_").replace("-", "")


# The fit.

_GPUS = (HIGH, *LOWS)
_START = (*(0.8, 0.8) * len(_GPUS), 3e-3, 5e-5)
_LOW = (*(0.3, 0.3) * len(_GPUS), 1e-3, 1e-6)
_HIGH = (*(1.2, 1.2) * len(_GPUS), 1e-2, 5e-4)


def fitted(known: Coefficients, workload: Workload) -> Coefficients:
    """`known` fitted to the capacities: least squares of the logarithms of the errors."""

    cached: dict[object, float] = {}  # a GPU's shares do not change the others' capacities

    def errors(logs: Sequence[float]) -> list[float]:
        tried = with_values(known, np.exp(logs).tolist())
        keys = [(one, tried.devices[one.accelerator], tried.engine) for one in CAPACITIES]
        for key in keys:
            if key not in cached:
                cached[key] = float(np.log(modelled(Testbed(tried), workload, key[0]) / key[0].measured))
        return [cached[key] for key in keys]

    solution = least_squares(errors, np.log(_START), bounds=(np.log(_LOW), np.log(_HIGH)), diff_step=0.01, max_nfev=12)
    return with_values(known, np.exp(solution.x).tolist())


def with_values(known: Coefficients, values: Sequence[float]) -> Coefficients:
    """values: compute and bandwidth of each GPU, then the engine's two. GPUs of the same chip share the A100's."""
    shares = [Shares(*values[2 * at : 2 * at + 2]) for at in range(len(_GPUS))]
    devices = dict.fromkeys(known.devices, shares[0]) | dict(zip(_GPUS, shares, strict=True))
    mean = Shares(*(float(np.exp(np.mean(np.log(values[at : 2 * len(_GPUS) : 2])))) for at in (0, 1)))
    engine = type(known.engine)(*values[2 * len(_GPUS) :])
    return msgspec.structs.replace(known, engine=engine, default=mean, devices=devices)


if __name__ == "__main__":
    found = fitted(Coefficients.from_file(), azure(Path(sys.argv[1]), CONVERSATION, REQUESTS))
    print(found.engine, found.default, *found.devices.items(), sep="\n")
