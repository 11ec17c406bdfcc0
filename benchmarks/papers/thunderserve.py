"""ThunderServe: the ratio study (Figs 6 and 14), KV in 4 bits against 16 (Tables 5 and 8), and the loss of 4 of 32
GPUs (5.4, Appendix G)."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.papers.report import Row, Section, between, informative, order, ratio_gain, value
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

TRACES = {"coding": CODING, "conversation": CONVERSATION}
NETWORK = Link(5e9)  # 40 Gb/s, of which `Link` reaches 58 % as the paper measured
INSIDE = Link(16e9, latency_s=1e-4)  # between stages of one host, over PCIe
CONTEXT_TOKENS = 2048  # the model's
RUN = RunSpec(label="ThunderServe", codec=Codec.INT4, decode_admission=Watermark())
LIMITS = EngineLimits(batched_tokens=2048)
MODEL, LAYERS = "LLaMA-30B", 60


def thunderserve_section(testbed: Testbed, data: Path) -> Section:
    rows = (*_ratio_rows(testbed, data), *kv_rows(testbed), *_link_rows(testbed), *_loss_rows(testbed, data))
    return Section("thunderserve", "ThunderServe: heterogeneous GPUs in the cloud", rows)


# Figs 6 and 14: the best ratio of prefill to decode instances, of 8 with two A5000 each.

INSTANCES, REQUESTS = 8, 800


def _ratio_rows(testbed: Testbed, data: Path) -> list[Row]:
    kind = Kind("RTX-A5000", "Llama-2-13B", 2, LIMITS, NETWORK)
    rows, best = [], {}
    for (name, trace), paper in zip(TRACES.items(), (5, 3), strict=True):
        workload = azure(data, trace, REQUESTS, CONTEXT_TOKENS).at_once()
        by = {}  # tokens a second by the number of prefill instances
        for prefills in range(1, INSTANCES):
            prefill = instances(testbed, kind, Role.PREFILL, prefills)
            decode = instances(testbed, kind, Role.DECODE, INSTANCES - prefills)
            by[prefills] = tokens_per_s(simulate(workload, (*prefill, *decode), RUN))
        ranked = sorted(by, key=lambda prefills: -by[prefills])
        best[name] = ranked[0]
        listed = ", ".join(f"{_ratio(prefills)} {by[prefills]:,.0f}" for prefills in ranked[:3])
        what, held = f"best P:D of 8 instances, {name}", best[name] == paper
        rows.append(order(f"ratio_{name}", "Figs 6, 14", what, _ratio(paper), listed, held))
    what = "more prefill than decode for coding, less for conversation"
    ours, held = " and ".join(map(_ratio, best.values())), best["coding"] > INSTANCES / 2 > best["conversation"]
    return [*rows, order("ratio_sides", "Figs 6, 14", what, "yes", ours, held)]


def _ratio(prefills: int) -> str:
    return f"{prefills}:{INSTANCES - prefills}"


# Tables 5 and 8 and section 4: 4 A40 and 4 3090 Ti, coupled and split, with 4 and with 16 bits of KV.

OUTPUT = 28  # mean of coding; the paper gives the input alone
OUTPUT_MEDIAN = 13  # of coding (Appendix E)
PROMPTS = (512, 1024, 2048)


def kv_rows(testbed: Testbed) -> list[Row]:
    """Transfer times of one prompt, and their share of a request's time.

    The two times are what the link's efficiency was taken from (`Link`: 0.56 and 0.61 of nominal, 0.58), so that
    they have no aim; their ratio and the shares do not follow from it alone.
    """
    model = testbed.geometry(MODEL)
    raw, packed = (1e3 * transfer_time_s(model, 1024, NETWORK, codec) for codec in (Codec.RAW, Codec.INT4))
    rows = [
        informative("kv_16bit", "Table 8", "KV of 1024 tokens, LLaMA-30B, 40 Gb/s, 16 bits (fitted)", "ms", "584", raw),
        informative("kv_4bit", "Table 8", "the same, 4 bits, ours 4.75 (fitted)", "ms", "133", packed),
        value("kv_ratio", "Table 8", "16 bits over 4 bits", "x", 584.0 / 133.0, raw / packed),
    ]
    for codec, bits, low, high in ((Codec.RAW, 16, 16.0, 30.0), (Codec.INT4, 4, 4.0, 9.0)):
        shares = [_kv_share(testbed, prompt, codec) for prompt in PROMPTS]
        key, shown = f"share_{codec.value}", f"{low:g}–{high:g}"
        what = f"KV's share of a request, LLaMA-7B, 2 A5000, {bits} bits, mean of prompts 512–2048"
        rows.append(between(key, "4", what, "%", low, high, sum(shares) / len(shares)))
        rows += [
            informative(f"{key}_{at}", "4", f"… prompt of {prompt}, {bits} bits", "%", shown, share)
            for at, (prompt, share) in enumerate(zip(PROMPTS, shares, strict=True))
        ]
    return rows


def _kv_share(testbed: Testbed, prompt: int, codec: Codec) -> float:
    """Percent of prefill, transfer and decode that the transfer takes, for a request that runs alone."""
    model = testbed.model("RTX-A5000", "Llama-2-7B")
    prefill_s = model.prefill_time_s(prompt)
    transfer_s = transfer_time_s(model.geometry, prompt, NETWORK, codec)
    decode_s = sum(model.decode_time_s(1, prompt + at) for at in range(OUTPUT_MEDIAN - 1))
    return 100.0 * transfer_s / (prefill_s + transfer_s + decode_s)


def _link_rows(testbed: Testbed) -> tuple[Row, ...]:
    """Gains of splitting and of compression at 40 Gb/s."""
    workload = synthetic(200, 1024, OUTPUT)
    split = _best(testbed, "A40", Role.PREFILL, LIMITS), _best(testbed, "RTX-3090-Ti", Role.DECODE, LIMITS)
    first = replace(LIMITS, prefill_first=True)
    coupled = tuple(_best(testbed, accelerator, Role.DECODE, first) for accelerator in ("A40", "RTX-3090-Ti"))
    packed = tokens_per_s(simulate(workload, split, RUN))
    raw = tokens_per_s(simulate(workload, split, replace(RUN, codec=Codec.RAW)))
    base = tokens_per_s(simulate(workload, coupled, RunSpec(label="coupled", decode_admission=Watermark())))
    against = "throughput: split over 40 Gb/s against two coupled"
    return (
        ratio_gain("split", "Table 5", against, 3292 / 1610, packed / base),
        ratio_gain("bits", "Table 8", "throughput: KV in 4 bits against 16", 3292 / 2450, packed / raw),
        informative("split_tokens", "Table 5", "throughput: split, 4 bits", "tokens/s", "3292", packed),
    )


def _best(testbed: Testbed, accelerator: str, role: Role, limits: EngineLimits) -> InstanceSpec:
    """4 accelerators as (TP, PP) by the paper's rule: least prefill latency, or highest decode throughput (3.3)."""

    def worth(spec: InstanceSpec) -> float:
        if role is Role.PREFILL:
            assert spec.rates.step is not None
            return -spec.rates.step.prefill_s(1024, 0)
        batch = max(1, spec.kv_tokens // spec.lanes // 1100)
        return spec.lanes * batch / spec.model.decode_time_s(batch, batch * 1050)

    candidates = [
        staged(
            testbed,
            f"{accelerator}-{role}",
            MODEL,
            (Stage(accelerator, LAYERS * degree // 4, degree),) * (4 // degree),
            role,
            limits,
            NETWORK,
            INSIDE,
        )
        for degree in (4, 2, 1)
    ]
    return max(candidates, key=worth)


# 5.4 and Appendix G: 4 of 32 GPUs go offline; roles flip (13 s), a new plan is searched (157 s), or nothing happens.
# The deployments are those of the paper's Table 3. Lost: the 4 A6000 that are two decode instances.

P, D = Role.PREFILL, Role.DECODE
HALF = LAYERS // 2
MIXED = (Stage("RTX-A5000", HALF, 2), Stage("RTX-3090-Ti", HALF, 2))
A40, A40_HALVES = (Stage("A40", LAYERS, 2),), (Stage("A40", HALF),) * 2
A6000, A6000_HALVES = (Stage("RTX-A6000", LAYERS, 2),), (Stage("RTX-A6000", HALF),) * 2
A5000, A5000_HALVES = (Stage("RTX-A5000", LAYERS, 4),), (Stage("RTX-A5000", HALF, 2),) * 2
TI_HALVES = (Stage("RTX-3090-Ti", HALF, 2),) * 2
LOST = "a6000-lost"
Groups = Mapping[str, tuple[Role, int, tuple[Stage, ...]]]  # role, instances and stages by name
DEPLOYMENTS: Mapping[str, Groups] = {
    "coding": {
        "a40": (P, 4, A40),
        "a5000": (P, 1, A5000),
        "a6000": (P, 2, A6000),
        "mixed-p": (P, 1, MIXED),
        "3090ti": (D, 1, TI_HALVES),
        LOST: (D, 2, A6000_HALVES),
        "mixed-d": (D, 1, MIXED),
    },
    "conversation": {
        "a40": (P, 3, A40),
        "mixed-p": (P, 1, MIXED),
        "3090ti": (D, 1, TI_HALVES),
        "a40-d": (D, 1, A40_HALVES),
        "a5000": (D, 1, A5000_HALVES),
        LOST: (D, 2, A6000_HALVES),
        "a6000": (D, 2, A6000_HALVES),
        "mixed-d": (D, 1, MIXED),
    },
}
FLIPPED = {"coding": "a5000", "conversation": "a40"}  # the group that the paper's rescheduling takes an instance of
LIGHT_S, SEARCH_S, RELOAD_S = 13.0, 54.0, 103.0  # Table 4
LOST_AT_S = 60.0
LOSS_REQUESTS = 1200
LOAD = 0.9  # of what the whole cluster serves
SCALES = (2.0, 3.0, 4.0, 5.0, 6.0, 8.0)  # deadlines: so often a request's time alone on two A100


def _loss_rows(testbed: Testbed, data: Path) -> list[Row]:
    return [row for name in DEPLOYMENTS for row in _rows_of_a_loss(testbed, data, name)]


def _rows_of_a_loss(testbed: Testbed, data: Path, name: str) -> tuple[Row, ...]:
    groups, flips = DEPLOYMENTS[name], FLIPPED[name]
    cluster = tuple(_cluster(testbed, groups))
    left = tuple(spec for spec in cluster if not spec.instance_id.startswith(LOST))
    requests = azure(data, TRACES[name], LOSS_REQUESTS, CONTEXT_TOKENS)
    arriving = poisson(requests, LOAD * len(requests) / simulate(requests.at_once(), cluster, RUN).duration_s)
    model = testbed.model("A100-SXM-80", MODEL, 2)
    pairs = zip(arriving.prompt_tokens.tolist(), arriving.output_tokens.tolist(), strict=True)
    alone_s = np.array([model.prefill_time_s(p) + model.decode_span_s(1, p, o - 1) for p, o in pairs])
    before, none = (_attainment(simulate(arriving, specs, RUN), alone_s) for specs in (cluster, left))
    flipped = {
        group: _attainment(simulate(arriving, _with_flip(left, group), RUN), alone_s)
        for group, (role, *_) in groups.items()
        if role is P
    }
    light = flipped[flips]
    while_s = LOST_AT_S, LOST_AT_S + SEARCH_S + RELOAD_S
    within = [_attainment(run, alone_s, *while_s) for run in _rescheduled(arriving, cluster, flips)]
    ranked = sorted(flipped, key=lambda group: -flipped[group])
    against = f"{light:.1f} % against {none:.1f} % ({before:.1f} % with them)"
    without = f"{name}: attainment without the 4 GPUs, a role flipped against nothing done"
    after = f"{name}: attainment in the 157 s after it, a flip against planning anew"
    anew, which = f"{within[0]:.1f} % against {within[1]:.1f} %", f"{name}: the group that gives an instance"
    listed = ", ".join(f"{group} {flipped[group]:.1f} %" for group in ranked)
    return (
        order(f"loss_{name}", "5.4, Fig 11", without, "higher", against, light > none),
        order(f"loss_{name}_while", "5.4, Fig 11", after, "higher", anew, within[0] > within[1]),
        order(f"loss_{name}_which", "App. G", which, flips, listed, ranked[0] == flips),
    )


def _cluster(testbed: Testbed, groups: Groups) -> Iterable[InstanceSpec]:
    for name, (role, count, stages) in groups.items():
        spec = staged(testbed, name, MODEL, stages, role, LIMITS, NETWORK, INSIDE)
        for at in range(count):
            yield spec.renamed(f"{name}-{at}")


def _with_flip(cluster: tuple[InstanceSpec, ...], group: str) -> tuple[InstanceSpec, ...]:
    name = f"{group}-0"
    return tuple(spec.renamed(name, spec.role.other) if spec.instance_id == name else spec for spec in cluster)


def _rescheduled(workload: Workload, cluster: tuple[InstanceSpec, ...], group: str) -> tuple[SimResult, SimResult]:
    """Runs with the loss in them: a flip after 13 s; and a new plan (here: the same), for which all reload weights.

    The search for the new plan runs beside the service.
    """
    lost = tuple(Loss(spec.instance_id, LOST_AT_S) for spec in cluster if spec.instance_id.startswith(LOST))
    gone = {loss.instance_id for loss in lost}
    down, back = LOST_AT_S + SEARCH_S, LOST_AT_S + SEARCH_S + RELOAD_S
    reloads = tuple(Loss(spec.instance_id, down, back) for spec in cluster if spec.instance_id not in gone)
    light = replace(RUN, losses=lost, flips=(Flip(f"{group}-0", LOST_AT_S + LIGHT_S),))
    full = replace(RUN, losses=(*lost, *reloads), flips=(Flip(f"{group}-0", back),))
    return simulate(workload, cluster, light), simulate(workload, cluster, full)


def _attainment(result: SimResult, alone_s: Times, begin_s: float = 0.0, end_s: float = np.inf) -> float:
    """Percent of the requests that arrive in that span and end within the SLO, mean over the SLO's scales."""
    out = result.outcomes
    inside = (out.arrival_s >= begin_s) & (out.arrival_s < end_s)
    shares = [(out.completed & (out.jct_s <= scale * alone_s))[inside].mean() for scale in SCALES]
    return 100.0 * float(np.mean(shares))
