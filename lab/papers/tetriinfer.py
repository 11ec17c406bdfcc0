"""TetriInfer: its five workloads (5.1), its interference study (2.2) and its schedulers (5.2)."""

from dataclasses import dataclass
from statistics import fmean

from lab.papers.chart import Chart
from lab.papers.clusters import busy_s, change, mean_jct_s, mean_ttft_s
from lab.papers.rows import Row, Section, between, gain, points, ratio_gain
from lab.papers.testbed import Testbed
from lab.papers.tetriinfer_micro import micro_rows
from lab.papers.tetriinfer_schedulers import scheduler_rows
from lab.papers.tetriinfer_testbed import SEEDS, coupled, disaggregated
from shared.sim.outcomes import SimResult
from shared.sim.workload import tetri


@dataclass(frozen=True, slots=True)
class _Claim:
    workload: str
    where: str
    ttft: float | None  # changes in percent
    jct: float
    resource: float
    perf: float  # ratio


_CLAIMS = (
    _Claim("LPLD", "Fig 11", -44.0, -40.0, 0.0, 1.4),
    _Claim("LPHD", "Fig 12", -97.0, -47.0, -38.0, 2.4),
    _Claim("HPLD", "Fig 13", -9.0, -23.0, 43.0, 0.86),
    _Claim("HPHD", "Fig 14", None, -19.0, 7.0, 1.1),
    _Claim("Mixed", "Fig 15", -85.0, -50.0, -21.0, 1.9),
)


def tetriinfer_section(testbed: Testbed) -> Section:
    """All of it."""
    micro, interference = micro_rows(testbed)
    workloads = [_workload_rows(testbed, claim) for claim in _CLAIMS]
    rows = (*micro, *(row for group in workloads for row in group), *scheduler_rows(testbed))
    return Section(
        "tetriinfer",
        "TetriInfer: inference without interference",
        rows,
        (
            interference,
            _chart("ttft", "mean TTFT", [claim.ttft or 0.0 for claim in _CLAIMS], rows),
            _chart("jct", "mean JCT", [claim.jct for claim in _CLAIMS], rows),
            _chart("resource", "resource time", [claim.resource for claim in _CLAIMS], rows),
        ),
    )


def _workload_rows(testbed: Testbed, claim: _Claim) -> tuple[Row, ...]:
    pairs = []
    for seed in SEEDS:
        workload = tetri(claim.workload, 128, seed)
        pairs.append((coupled(testbed, workload), disaggregated(testbed, workload, seed=seed)))
    ttft = fmean(change(mean_ttft_s(ours), mean_ttft_s(base)) for base, ours in pairs)
    jct = fmean(change(mean_jct_s(ours), mean_jct_s(base)) for base, ours in pairs)
    resource = fmean(change(busy_s(ours), base.duration_s) for base, ours in pairs)
    perf = fmean(_perf(ours, busy_s(ours)) / _perf(base, base.duration_s) for base, ours in pairs)
    name, kind, where = claim.workload.lower(), claim.workload, claim.where
    return (
        gain(f"{name}_ttft", where, f"{kind}: mean TTFT", claim.ttft, ttft)
        if claim.ttft is not None
        else between(f"{name}_ttft", where, f"{kind}: mean TTFT", "%", -100.0, -9.0, ttft, "< -9 (more than HPLD's)"),
        gain(f"{name}_jct", where, f"{kind}: mean JCT", claim.jct, jct),
        gain(f"{name}_resource", where, f"{kind}: resource time", claim.resource, resource)
        if claim.resource
        else points(f"{name}_resource", where, f"{kind}: resource time", claim.resource, resource, 10.0),
        ratio_gain(f"{name}_perf", where, f"{kind}: perf/$", claim.perf, perf),
    )


def _perf(result: SimResult, resource_s: float) -> float:
    return 1.0 / (mean_jct_s(result) * resource_s)


def _chart(what: str, title: str, paper: list[float], rows: tuple[Row, ...]) -> Chart:
    ours = {row.key: row.figure or 0.0 for row in rows}
    kinds = tuple(claim.workload for claim in _CLAIMS)
    return Chart(
        f"tetriinfer_{what}",
        f"TetriInfer, Figs 11–15: change of {title}",
        "%",
        kinds,
        {"paper": paper, "ours": [ours[f"{kind.lower()}_{what}"] for kind in kinds]},
    )
