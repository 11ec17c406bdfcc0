"""ThunderServe 5.4 and Appendix G: 4 of 32 GPUs go offline; roles flip (13 s), all is planned anew (157 s), or nothing.

The deployments are those of the paper's Table 3. Lost: the 4 A6000 that are two decode instances.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lab.papers.lengths import CODING, CONVERSATION, azure
from lab.papers.rows import Row, order
from lab.papers.stages import Stage, staged
from lab.papers.testbed import Testbed
from lab.papers.thunderserve_link import INSIDE, LAYERS, MODEL
from lab.papers.thunderserve_ratio import CONTEXT_TOKENS, NETWORK, RUN
from shared.domain.instance import Role
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult
from shared.sim.spec import EngineLimits, Flip, InstanceSpec, Loss
from shared.sim.workload import Times, Workload, poisson

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
_LIMITS = EngineLimits(batched_tokens=2048)
_LIGHT_S, _SEARCH_S, _RELOAD_S = 13.0, 54.0, 103.0  # Table 4
_LOST_AT_S = 60.0
_REQUESTS = 1200
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
    """Both workloads."""
    return tuple(row for case in _CASES for row in _case_rows(testbed, data, case))


def _case_rows(testbed: Testbed, data: Path, case: _Case) -> tuple[Row, ...]:
    cluster = tuple(_cluster(testbed, case.groups))
    left = tuple(spec for spec in cluster if not spec.instance_id.startswith(_LOST))
    requests = azure(data, case.trace, _REQUESTS, CONTEXT_TOKENS)
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
    return (
        order(
            f"loss_{name}",
            where,
            f"{name}: attainment without the 4 GPUs, a role flipped against nothing done",
            "higher",
            f"{light:.1f} % against {none:.1f} % ({before:.1f} % with them)",
            light > none,
        ),
        order(
            f"loss_{name}_while",
            where,
            f"{name}: attainment in the 157 s after it, a flip against planning anew",
            "higher",
            f"{within[0]:.1f} % against {within[1]:.1f} %",
            within[0] > within[1],
        ),
        order(
            f"loss_{name}_which",
            "App. G",
            f"{name}: the group that gives an instance",
            case.flips,
            ", ".join(f"{group} {flipped[group]:.1f} %" for group in ranked),
            ranked[0] == case.flips,
        ),
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
