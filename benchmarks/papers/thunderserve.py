"""ThunderServe: the ratio study (Figs 6 and 14), KV in 4 bits against 16 (Tables 5 and 8), and the loss of 4 of 32
GPUs (5.4, Appendix G)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.papers.report import Chart, Row, Section, between, informative, order, ratio_gain, value
from benchmarks.papers.testbed import (
    CODING,
    CONVERSATION,
    Kind,
    Stage,
    Testbed,
    Watermark,
    azure,
    instances,
    staged,
    tokens_per_s,
)
from shared.cost.network import Link, transfer_time_s
from shared.domain.instance import Role
from shared.domain.kv import Codec
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult
from shared.sim.spec import EngineLimits, Flip, InstanceSpec, Loss, RunSpec
from shared.sim.workload import Times, Workload, poisson, synthetic

# Figs 6 and 14: the best ratio of prefill to decode instances for coding and conversation.

NETWORK = Link(5e9)  # 40 Gb/s, of which `Link` reaches 58 % as the paper measured
CONTEXT_TOKENS = 2048  # the model's
RUN = RunSpec(label="ThunderServe", codec=Codec.INT4, decode_admission=Watermark())
_KIND = Kind("RTX-A5000", "Llama-2-13B", 2, EngineLimits(batched_tokens=2048), NETWORK)
_INSTANCES = 8
_REQUESTS = 800


def ratio_rows(testbed: Testbed, data: Path) -> tuple[tuple[Row, ...], Chart]:
    found = {
        name: throughputs(testbed, azure(data, trace, _REQUESTS, CONTEXT_TOKENS).at_once())
        for name, trace in (("coding", CODING), ("conversation", CONVERSATION))
    }
    best = {name: max(by, key=lambda prefills: by[prefills]) for name, by in found.items()}
    where, rows = "Figs 6, 14", []
    for name, paper in (("coding", 5), ("conversation", 3)):
        what, ours = f"best P:D of 8 instances, {name}", _ranked(found[name])
        rows.append(order(f"ratio_{name}", where, what, _shown(paper), ours, best[name] == paper))
    what = "more prefill than decode for coding, less for conversation"
    ours = f"{_shown(best['coding'])} and {_shown(best['conversation'])}"
    rows.append(order("ratio_sides", where, what, "yes", ours, best["coding"] > _INSTANCES / 2 > best["conversation"]))
    chart = Chart(
        "thunderserve_ratio",
        "ThunderServe, Fig 6: throughput by P:D, 16 A5000, LLaMA-13B",
        "tokens/s",
        tuple(_shown(prefills) for prefills in found["coding"]),
        {name: list(by.values()) for name, by in found.items()},
    )
    return tuple(rows), chart


def throughputs(testbed: Testbed, workload: Workload) -> dict[int, float]:
    """Tokens a second by the number of prefill instances."""
    found = {}
    for prefills in range(1, _INSTANCES):
        prefill = instances(testbed, _KIND, Role.PREFILL, prefills)
        decode = instances(testbed, _KIND, Role.DECODE, _INSTANCES - prefills)
        found[prefills] = tokens_per_s(simulate(workload, (*prefill, *decode), RUN))
    return found


def _ranked(by: Mapping[int, float]) -> str:
    ranked = sorted(by, key=lambda prefills: -by[prefills])[:3]
    return ", ".join(f"{_shown(prefills)} {by[prefills]:,.0f}" for prefills in ranked)


def _shown(prefills: int) -> str:
    return f"{prefills}:{_INSTANCES - prefills}"


# Tables 5 and 8 and section 4: 4 A40 and 4 3090 Ti, coupled and split, with 4 and with 16 bits of KV.

MODEL, LAYERS = "LLaMA-30B", 60
INSIDE = Link(16e9, latency_s=1e-4)  # between stages of one host, over PCIe
_LIMITS = EngineLimits(batched_tokens=2048)
_COUPLED = EngineLimits(batched_tokens=2048, prefill_first=True)
_OUTPUT = 28  # mean of coding; the paper gives the input alone
_DEGREES = (4, 2, 1)


def link_rows(testbed: Testbed) -> tuple[Row, ...]:
    """Gains of splitting and of compression at 40 Gb/s."""
    workload = synthetic(200, 1024, _OUTPUT)
    prefill = best(testbed, "A40", Role.PREFILL)
    decode = best(testbed, "RTX-3090-Ti", Role.DECODE)
    coupled = tuple(best(testbed, accelerator, Role.DECODE, _COUPLED) for accelerator in ("A40", "RTX-3090-Ti"))
    packed = tokens_per_s(simulate(workload, (prefill, decode), RUN))
    raw = tokens_per_s(simulate(workload, (prefill, decode), replace(RUN, codec=Codec.RAW)))
    base = tokens_per_s(simulate(workload, coupled, RunSpec(label="coupled", decode_admission=Watermark())))
    return (
        ratio_gain(
            "split", "Table 5", "throughput: split over 40 Gb/s against two coupled", 3292 / 1610, packed / base
        ),
        ratio_gain("bits", "Table 8", "throughput: KV in 4 bits against 16", 3292 / 2450, packed / raw),
        informative("split_tokens", "Table 5", "throughput: split, 4 bits", "tokens/s", "3292", packed),
    )


def best(testbed: Testbed, accelerator: str, role: Role, limits: EngineLimits = _LIMITS) -> InstanceSpec:
    """4 accelerators as (TP, PP) by the paper's rule: least prefill latency, or highest decode throughput (3.3)."""
    candidates = []
    for degree in _DEGREES:
        count = 4 // degree
        stages = (Stage(accelerator, LAYERS // count, degree),) * count
        spec = staged(testbed, f"{accelerator}-{role}", MODEL, stages, role, limits, NETWORK, INSIDE)
        candidates.append((_worth(spec, role), degree, spec))
    return max(candidates, key=lambda one: one[:2])[2]


def _worth(spec: InstanceSpec, role: Role) -> float:
    if role is Role.PREFILL:
        cost = spec.rates.prefill
        assert cost is not None
        return -cost.time_s(1024)
    batch = max(1, spec.kv_tokens // spec.lanes // 1100)
    return spec.lanes * batch / spec.model.decode_time_s(batch, batch * 1050)


CODING_OUTPUT = 13  # median output tokens of coding (Appendix E)
PROMPTS = (512, 1024, 2048)


def kv_rows(testbed: Testbed) -> tuple[Row, ...]:
    """Transfer times of one prompt, and their share of a request's time.

    The two times are what the link's efficiency was taken from (`Link`: 0.56 and 0.61 of nominal, 0.58), so that
    they have no aim; their ratio and the shares do not follow from it alone.
    """
    model = testbed.geometry("LLaMA-30B")
    raw, packed = (1e3 * transfer_time_s(model, 1024, NETWORK, codec) for codec in (Codec.RAW, Codec.INT4))
    rows = [
        informative("kv_16bit", "Table 8", "KV of 1024 tokens, LLaMA-30B, 40 Gb/s, 16 bits (fitted)", "ms", "584", raw),
        informative("kv_4bit", "Table 8", "the same, 4 bits, ours 4.75 (fitted)", "ms", "133", packed),
        value("kv_ratio", "Table 8", "16 bits over 4 bits", "x", 584.0 / 133.0, raw / packed),
    ]
    for codec, low, high in ((Codec.RAW, 16.0, 30.0), (Codec.INT4, 4.0, 9.0)):
        shares = [kv_share(testbed, prompt, codec) for prompt in PROMPTS]
        name = "16 bits" if codec is Codec.RAW else "4 bits"
        what = f"KV's share of a request, LLaMA-7B, 2 A5000, {name}, mean of prompts 512–2048"
        rows.append(between(f"share_{codec.value}", "4", what, "%", low, high, sum(shares) / len(shares)))
        shown = f"{low:g}–{high:g}"
        rows += [
            informative(f"share_{codec.value}_{at}", "4", f"… prompt of {prompt}, {name}", "%", shown, share)
            for at, (prompt, share) in enumerate(zip(PROMPTS, shares, strict=True))
        ]
    return tuple(rows)


def kv_share(testbed: Testbed, prompt: int, codec: Codec) -> float:
    """Percent of prefill, transfer and decode that the transfer takes, for a request that runs alone."""
    model = testbed.model("RTX-A5000", "Llama-2-7B")
    prefill = model.prefill_time_s(prompt)
    transfer = transfer_time_s(model.geometry, prompt, NETWORK, codec)
    decode = sum(model.decode_time_s(1, prompt + at) for at in range(CODING_OUTPUT - 1))
    return 100.0 * transfer / (prefill + transfer + decode)


# 5.4 and Appendix G: 4 of 32 GPUs go offline; roles flip (13 s), a new plan is searched (157 s), or nothing happens.
# The deployments are those of the paper's Table 3. Lost: the 4 A6000 that are two decode instances.

_P, _D = Role.PREFILL, Role.DECODE
_HALF = LAYERS // 2
_MIXED = (Stage("RTX-A5000", _HALF, 2), Stage("RTX-3090-Ti", _HALF, 2))
_A40, _A6000 = (Stage("A40", LAYERS, 2),), (Stage("RTX-A6000", LAYERS, 2),)
_A6000_2 = (Stage("RTX-A6000", _HALF),) * 2
_A40_2 = (Stage("A40", _HALF),) * 2
_TI = (Stage("RTX-3090-Ti", _HALF, 2),) * 2
_A5000_4, _A5000_2 = (Stage("RTX-A5000", LAYERS, 4),), (Stage("RTX-A5000", _HALF, 2),) * 2

Group = tuple[str, Role, int, tuple[Stage, ...]]
_LOST = "a6000-lost"
_LIGHT_S, _SEARCH_S, _RELOAD_S = 13.0, 54.0, 103.0  # Table 4
_LOST_AT_S = 60.0
_LOSS_REQUESTS = 1200
_LOAD = 0.9  # of what the whole cluster serves
_SCALES = (2.0, 3.0, 4.0, 5.0, 6.0, 8.0)  # deadlines: so often a request's time alone on two A100


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    trace: Path
    groups: tuple[Group, ...]
    flips: str  # the group that the paper's rescheduling takes an instance of


_CASES = (
    _Case(
        "coding",
        CODING,
        (
            ("a40", _P, 4, _A40),
            ("a5000", _P, 1, _A5000_4),
            ("a6000", _P, 2, _A6000),
            ("mixed-p", _P, 1, _MIXED),
            ("3090ti", _D, 1, _TI),
            (_LOST, _D, 2, _A6000_2),
            ("mixed-d", _D, 1, _MIXED),
        ),
        "a5000",
    ),
    _Case(
        "conversation",
        CONVERSATION,
        (
            ("a40", _P, 3, _A40),
            ("mixed-p", _P, 1, _MIXED),
            ("3090ti", _D, 1, _TI),
            ("a40-d", _D, 1, _A40_2),
            ("a5000", _D, 1, _A5000_2),
            (_LOST, _D, 2, _A6000_2),
            ("a6000", _D, 2, _A6000_2),
            ("mixed-d", _D, 1, _MIXED),
        ),
        "a40",
    ),
)


def loss_rows(testbed: Testbed, data: Path) -> tuple[Row, ...]:
    return tuple(row for case in _CASES for row in _case_rows(testbed, data, case))


def _case_rows(testbed: Testbed, data: Path, case: _Case) -> tuple[Row, ...]:
    cluster = tuple(_cluster(testbed, case.groups))
    left = tuple(spec for spec in cluster if not spec.instance_id.startswith(_LOST))
    requests = azure(data, case.trace, _LOSS_REQUESTS, CONTEXT_TOKENS)
    arriving = poisson(requests, _LOAD * len(requests) / simulate(requests.at_once(), cluster, RUN).duration_s)
    alone = _alone_s(testbed, arriving)
    before, none = (_attainment(simulate(arriving, specs, RUN), alone) for specs in (cluster, left))
    flipped = {
        group: _attainment(simulate(arriving, _with_flip(left, group), RUN), alone)
        for group, role, *_ in case.groups
        if role is _P
    }
    light = flipped[case.flips]
    within = [
        _attainment(run, alone, _LOST_AT_S, _LOST_AT_S + _SEARCH_S + _RELOAD_S)
        for run in _rescheduled(arriving, cluster, case.flips)
    ]
    ranked = sorted(flipped, key=lambda group: -flipped[group])
    where, name = "5.4, Fig 11", case.name
    against = f"{light:.1f} % against {none:.1f} % ({before:.1f} % with them)"
    without = f"{name}: attainment without the 4 GPUs, a role flipped against nothing done"
    after = f"{name}: attainment in the 157 s after it, a flip against planning anew"
    anew = f"{within[0]:.1f} % against {within[1]:.1f} %"
    which = f"{name}: the group that gives an instance"
    groups = ", ".join(f"{group} {flipped[group]:.1f} %" for group in ranked)
    return (
        order(f"loss_{name}", where, without, "higher", against, light > none),
        order(f"loss_{name}_while", where, after, "higher", anew, within[0] > within[1]),
        order(f"loss_{name}_which", "App. G", which, case.flips, groups, ranked[0] == case.flips),
    )


def _cluster(testbed: Testbed, groups: Iterable[Group]) -> Iterable[InstanceSpec]:
    for name, role, count, stages in groups:
        spec = staged(testbed, name, MODEL, stages, role, _LIMITS, NETWORK, INSIDE)
        for at in range(count):
            yield spec.renamed(f"{name}-{at}")


def _with_flip(cluster: tuple[InstanceSpec, ...], group: str) -> tuple[InstanceSpec, ...]:
    name = f"{group}-0"
    return tuple(spec.renamed(name, spec.role.other) if spec.instance_id == name else spec for spec in cluster)


def _rescheduled(workload: Workload, cluster: tuple[InstanceSpec, ...], group: str) -> tuple[SimResult, SimResult]:
    """Runs with the loss in them: a flip after 13 s; and a new plan (here: the same), for which all reload weights.

    The search for the new plan runs beside the service.
    """
    lost = tuple(Loss(spec.instance_id, _LOST_AT_S) for spec in cluster if spec.instance_id.startswith(_LOST))
    gone = {loss.instance_id for loss in lost}
    down, back = _LOST_AT_S + _SEARCH_S, _LOST_AT_S + _SEARCH_S + _RELOAD_S
    reloads = tuple(Loss(spec.instance_id, down, back) for spec in cluster if spec.instance_id not in gone)
    name = f"{group}-0"
    light = replace(RUN, losses=lost, flips=(Flip(name, _LOST_AT_S + _LIGHT_S),))
    full = replace(RUN, losses=(*lost, *reloads), flips=(Flip(name, back),))
    return simulate(workload, cluster, light), simulate(workload, cluster, full)


def _attainment(result: SimResult, alone_s: Times, begin_s: float = 0.0, end_s: float = np.inf) -> float:
    """Percent of the requests that arrive in that span and end within the SLO, mean over the SLO's scales."""
    out = result.outcomes
    inside = (out.arrival_s >= begin_s) & (out.arrival_s < end_s)
    shares = [(out.completed & (out.jct_s <= scale * alone_s))[inside].mean() for scale in _SCALES]
    return 100.0 * float(np.mean(shares))


def _alone_s(testbed: Testbed, workload: Workload) -> Times:
    """Each request's time alone on two A100."""
    model = testbed.model("A100-SXM-80", MODEL, 2)
    pairs = zip(workload.prompt_tokens.tolist(), workload.output_tokens.tolist(), strict=True)
    return np.array([model.prefill_time_s(p) + model.decode_span_s(1, p, o - 1) for p, o in pairs])


def thunderserve_section(testbed: Testbed, data: Path) -> Section:
    ratios, chart = ratio_rows(testbed, data)
    rows = (*ratios, *kv_rows(testbed), *link_rows(testbed), *loss_rows(testbed, data))
    return Section("thunderserve", "ThunderServe: heterogeneous GPUs in the cloud", rows, (chart,))
