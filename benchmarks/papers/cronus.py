"""Cronus: stage capacities (Table 2) predicted and measured, and the five systems of its evaluation compared by TTFT
and TBT (5.1, Fig. 4)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.papers.report import Chart, Row, Section, gain, informative, order, ratio_gain, value
from benchmarks.papers.testbed import (
    CONVERSATION,
    Kind,
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
from shared.policy.placement import LeastLoad, Placement, Policies
from shared.policy.split import FullSplit, NoSplit, Split
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult
from shared.sim.spec import EngineLimits, FirstToken, InstanceSpec, RunSpec
from shared.sim.workload import Workload, evenly

# Stage capacities: what each GPU does alone as prefill or decode stage, derived from Table 2 over Table 3. The twelve
# are all that the coefficients are fitted to (FORMULAS section 6). Eight numbers are fitted: each GPU's share of
# predicted compute (from its prefill) and of predicted bandwidth (from its decode), shared by both models, and the
# cost of a step and of a sequence. Those two follow from the decodes: 25 to 256 sequences run at once, and the models
# differ in the bytes that they read.

HIGH, LOWS = "A100-SXM-80", ("A10", "A30")
MODELS = ("Llama-3-8B", "Qwen2-7B")
REQUESTS = 1000
INFINIBAND = Link(12.5e9, latency_s=1e-4, efficiency=0.8)  # 100 Gb/s
WHOLE = EngineLimits(batched_tokens=8192, sequences=1)  # the prefill instance computes one prompt at a time (4.4)
CHUNKED = EngineLimits(batched_tokens=512, sequences=256)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Requests a second of one GPU with one model in one role."""

    accelerator: str
    model: str
    role: Role
    measured: float


# Means where two hardware columns give the A100's figure.
CAPACITIES = (
    Capacity(HIGH, MODELS[0], Role.PREFILL, 11.82),
    Capacity(HIGH, MODELS[0], Role.DECODE, 12.95),
    Capacity(HIGH, MODELS[1], Role.PREFILL, 12.40),
    Capacity(HIGH, MODELS[1], Role.DECODE, 17.37),
    Capacity("A10", MODELS[0], Role.PREFILL, 4.15),
    Capacity("A10", MODELS[0], Role.DECODE, 1.35),
    Capacity("A10", MODELS[1], Role.PREFILL, 4.18),
    Capacity("A10", MODELS[1], Role.DECODE, 3.42),
    Capacity("A30", MODELS[0], Role.PREFILL, 6.27),
    Capacity("A30", MODELS[0], Role.DECODE, 3.05),
    Capacity("A30", MODELS[1], Role.PREFILL, 6.66),
    Capacity("A30", MODELS[1], Role.DECODE, 6.74),
)


def requests(data: Path) -> Workload:
    """The paper's: the first 1000 of the conversation trace, 1014 tokens in and 247 out on average."""
    return azure(data, CONVERSATION, REQUESTS)


def modelled(testbed: Testbed, workload: Workload, capacity: Capacity) -> float:
    """The same of the model: prompts one after the other; or decodes whose KV is at hand."""
    if capacity.role is Role.PREFILL:
        model = testbed.model(capacity.accelerator, capacity.model)
        return len(workload) / sum(model.prefill_time_s(int(tokens)) for tokens in workload.prompt_tokens)
    anything = replace(WHOLE, sequences=256)
    feed = Kind(HIGH, capacity.model, limits=anything, link=Link(1e12, 0.0, 1.0), slowed=1e-3)
    cluster = (
        *instances(testbed, feed, Role.PREFILL),
        *instances(testbed, Kind(capacity.accelerator, capacity.model, limits=CHUNKED, link=feed.link), Role.DECODE),
    )
    run = RunSpec(label="decode alone", first_token=FirstToken.DECODE, streaming=False, decode_admission=Watermark())
    return requests_per_s(simulate(workload.at_once(), cluster, run))


def capacities(testbed: Testbed, workload: Workload) -> Mapping[Capacity, float]:
    return {capacity: modelled(testbed, workload, capacity) for capacity in CAPACITIES}


# The five systems of the evaluation (5.1), on an A100 and an A10 or A30 in different hosts.

SYSTEMS = ("DP", "PP", "Disagg H-L", "Disagg L-H", "Cronus")
_LOW_CHUNKED = EngineLimits(batched_tokens=256, sequences=256)
# Layers on the A100 and on the other, by the paper's split after BF16 rates.
_LAYERS = {
    ("A10", "Llama-3-8B"): (23, 9),
    ("A30", "Llama-3-8B"): (21, 11),
    ("A10", "Qwen2-7B"): (20, 8),
    ("A30", "Qwen2-7B"): (18, 10),
}


@dataclass(frozen=True, slots=True)
class Column:
    """A hardware pair with a model."""

    low: str
    model: str

    @property
    def name(self) -> str:
        return f"A100+{self.low} {self.model}"


def run_system(testbed: Testbed, column: Column, system: str, workload: Workload) -> SimResult:
    return _BUILDERS[system](testbed, column, workload)


def _dp(testbed: Testbed, column: Column, workload: Workload) -> SimResult:
    """Weights 3 and 1; 3 and 1 requests may wait, beside the one whose prompt is being computed."""
    high, low = (
        instances(testbed, Kind(accelerator, column.model, limits=limits, link=INFINIBAND), Role.DECODE, 1, prefix)[0]
        for accelerator, limits, prefix in ((HIGH, CHUNKED, "high"), (column.low, _LOW_CHUNKED, "low"))
    )
    cluster = (replace(weighed(high, 3.0), max_prefills=4), replace(weighed(low, 1.0), max_prefills=2))
    return _simulate(workload, cluster, Weighted(), NoSplit())


def _pp(testbed: Testbed, column: Column, workload: Workload) -> SimResult:
    """Two micro-batches that take turns, each with half of the KV: the stages do not overlap (see `prose.yaml`)."""
    layers = _LAYERS[column.low, column.model]
    stages = (Stage(HIGH, layers[0]), Stage(column.low, layers[1]))
    spec = staged(testbed, "pp", column.model, stages, Role.DECODE, CHUNKED, INFINIBAND, INFINIBAND)
    return _simulate(workload, (in_turn(spec),), LeastLoad(), NoSplit())


def _disaggregated(first: str | None, second: str | None) -> "Builder":
    """Prefill on one GPU, decode on the other; None is the column's low-end one."""

    def build(testbed: Testbed, column: Column, workload: Workload) -> SimResult:
        cluster = _pair(testbed, column, first or column.low, second or column.low)
        return _simulate(workload, cluster, LeastLoad(), FullSplit())

    return build


def _cronus(testbed: Testbed, column: Column, workload: Workload) -> SimResult:
    """The policy as it is; the prefill instance's own limit (`_pair`) is what `max_prefills` of the split does live."""
    split = CronusSplit(max_prefills=0)
    return _simulate(workload, _pair(testbed, column, column.low, HIGH), LeastLoad(), split)


def _pair(testbed: Testbed, column: Column, first: str, second: str) -> tuple[InstanceSpec, ...]:
    """At most two requests are in the prefill instance, so that each split rests on fresh loads (4.2)."""
    prefill = Kind(first, column.model, limits=WHOLE, link=INFINIBAND)
    decode = Kind(second, column.model, limits=CHUNKED, link=INFINIBAND)
    return (
        *(replace(spec, max_prefills=2) for spec in instances(testbed, prefill, Role.PREFILL)),
        *instances(testbed, decode, Role.DECODE),
    )


def _simulate(workload: Workload, cluster: tuple[InstanceSpec, ...], placement: Placement, split: Split) -> SimResult:
    run = RunSpec(
        policies=Policies(placement, split, PowerOfTwo()),
        decode_admission=Watermark(),
        first_token=FirstToken.DECODE,
        streaming=False,
        broadcast_s=0.0,
    )
    return simulate(workload, cluster, run)


Builder = Callable[[Testbed, Column, Workload], SimResult]
_BUILDERS: dict[str, Builder] = {
    "DP": _dp,
    "PP": _pp,
    "Disagg H-L": _disaggregated(HIGH, None),
    "Disagg L-H": _disaggregated(None, HIGH),
    "Cronus": _cronus,
}

_COLUMNS = tuple(Column(low, model) for low in LOWS for model in MODELS)
# Requests a second, in the order of the columns.
_TABLE_2 = {
    "DP": (7.28, 8.70, 8.54, 10.85),
    "PP": (3.86, 4.08, 3.96, 3.97),
    "Disagg H-L": (1.31, 3.45, 2.93, 6.74),
    "Disagg L-H": (4.11, 4.35, 6.14, 6.59),
    "Cronus": (7.39, 8.29, 8.70, 10.27),
}
_WITHIN = 0.15
_LOAD = 0.5


def cronus_section(testbed: Testbed, data: Path) -> Section:
    workload = requests(data)
    rates = {
        system: tuple(requests_per_s(run_system(testbed, column, system, workload.at_once())) for column in _COLUMNS)
        for system in SYSTEMS
    }
    rows = (
        *_stage_rows(testbed, workload),
        *_table_rows(rates),
        *_order_rows(rates),
        *_ratio_rows(rates),
        *_latency_rows(testbed, workload, rates),
    )
    charts = tuple(
        Chart(
            f"cronus_{column.low.lower()}_{column.model.split('-')[0].lower()}",
            f"Cronus, Table 2: {column.name}",
            "req/s",
            SYSTEMS,
            {"paper": [_TABLE_2[s][at] for s in SYSTEMS], "ours": [rates[s][at] for s in SYSTEMS]},
        )
        for at, column in enumerate(_COLUMNS)
    )
    return Section("cronus", "Cronus: partially disaggregated prefill", rows, charts)


def _stage_rows(testbed: Testbed, workload: Workload) -> tuple[Row, ...]:
    rows = []
    for at, (one, ours) in enumerate(capacities(testbed, workload).items()):
        what = f"calibration: {one.accelerator} {one.role} of {one.model}"
        rows.append(informative(f"stage_{at}", "Tables 2, 3", what, "req/s", f"{one.measured:g}", ours))
    return tuple(rows)


def _table_rows(rates: Mapping[str, tuple[float, ...]]) -> tuple[Row, ...]:
    rows = []
    for system in SYSTEMS:
        for at, column in enumerate(_COLUMNS):
            key, what = f"table2_{_word(system)}_{at}", f"{column.name}: {system}"
            rows.append(value(key, "Table 2", what, "req/s", _TABLE_2[system][at], rates[system][at], _WITHIN))
    return tuple(rows)


def _order_rows(rates: Mapping[str, tuple[float, ...]]) -> tuple[Row, ...]:
    rows = []
    for at, column in enumerate(_COLUMNS):
        paper, ours = (sorted(SYSTEMS, key=lambda s: -figures[s][at]) for figures in (_TABLE_2, rates))
        what = f"{column.name}: order"
        rows.append(order(f"order_{at}", "Table 2", what, " > ".join(paper), " > ".join(ours), paper == ours))
    return tuple(rows)


def _ratio_rows(rates: Mapping[str, tuple[float, ...]]) -> tuple[Row, ...]:
    rows = []
    for system, claimed in (("PP", 2.58), ("Disagg H-L", 5.64), ("Disagg L-H", 1.9)):
        most = max(a / b for a, b in zip(rates["Cronus"], rates[system], strict=True))
        rows.append(ratio_gain(f"up_to_{_word(system)}", "5.2", f"throughput against {system}, up to", claimed, most))
    return tuple(rows)


def _latency_rows(testbed: Testbed, workload: Workload, rates: Mapping[str, tuple[float, ...]]) -> tuple[Row, ...]:
    """P99 of TTFT and TBT of Cronus against each other system, in every column, at a rate that both serve."""
    ttft: dict[str, list[float]] = {}
    tbt: dict[str, list[float]] = {}
    for system in SYSTEMS[:-1]:
        for at, column in enumerate(_COLUMNS):
            arriving = evenly(workload, _LOAD * min(rates["Cronus"][at], rates[system][at]))
            ours, theirs = (run_system(testbed, column, name, arriving) for name in ("Cronus", system))
            ttft.setdefault(system, []).append(change(p99_ttft_s(ours), p99_ttft_s(theirs)))
            tbt.setdefault(system, []).append(change(_p99_tbt_s(ours), _p99_tbt_s(theirs)))

    def lower(key: str, metric: str, system: str, changes: list[float]) -> Row:
        what, ours = f"{metric} P99 of {system} lower than Cronus'", f"Cronus {_signed(changes)} %"
        return order(key, "Fig 4", what, "in every column", ours, min(changes) > 0)

    what = "P99 against"
    return (
        gain("ttft_dp_a10", "Fig 4", f"TTFT {what} DP, A10, up to", -55.0, min(ttft["DP"][:2])),
        gain("ttft_dp_a30", "Fig 4", f"TTFT {what} DP, A30, up to", -26.0, min(ttft["DP"][2:])),
        gain("ttft_lh", "Fig 4", f"TTFT {what} Disagg L-H, up to", -84.0, min(ttft["Disagg L-H"])),
        gain("ttft_pp", "Fig 4", f"TTFT {what} PP, up to", -58.0, min(ttft["PP"])),
        lower("ttft_hl", "TTFT", "Disagg H-L", ttft["Disagg H-L"]),
        gain("tbt_pp", "Fig 4", f"TBT {what} PP, up to", -70.0, min(tbt["PP"])),
        gain("tbt_dp", "Fig 4", f"TBT {what} DP, up to", -63.0, min(tbt["DP"])),
        gain("tbt_hl", "Fig 4", f"TBT {what} Disagg H-L, up to", -51.0, min(tbt["Disagg H-L"])),
        lower("tbt_lh", "TBT", "Disagg L-H", tbt["Disagg L-H"]),
    )


def _p99_tbt_s(result: SimResult) -> float:
    return result.gaps.percentile_s(0.99)


def _signed(changes: list[float]) -> str:
    return ", ".join(f"{one:+.0f}" for one in changes)


def _word(system: str) -> str:
    return system.lower().replace(" ", "_").replace("-", "")
