"""Cronus: Table 2 predicted from its stage capacities, and its comparisons of TTFT and TBT (Fig 4)."""

from collections.abc import Mapping
from pathlib import Path

from lab.papers.chart import Chart
from lab.papers.clusters import change, p99_ttft_s, requests_per_s
from lab.papers.cronus_stages import LOWS, MODELS, capacities, requests
from lab.papers.cronus_systems import SYSTEMS, Column, run_system
from lab.papers.rows import Row, Section, gain, order, ratio_gain, told, value
from lab.papers.testbed import Testbed
from shared.sim.outcomes import SimResult
from shared.sim.workload import Workload, evenly

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
    """All of it."""
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
    return tuple(
        told(
            f"stage_{at}",
            "Tables 2, 3",
            f"calibration: {one.accelerator} {one.role} of {one.model}",
            "req/s",
            f"{one.measured:g}",
            ours,
        )
        for at, (one, ours) in enumerate(capacities(testbed, workload).items())
    )


def _table_rows(rates: Mapping[str, tuple[float, ...]]) -> tuple[Row, ...]:
    return tuple(
        value(
            f"table2_{_word(system)}_{at}",
            "Table 2",
            f"{column.name}: {system}",
            "req/s",
            _TABLE_2[system][at],
            rates[system][at],
            _WITHIN,
        )
        for system in SYSTEMS
        for at, column in enumerate(_COLUMNS)
    )


def _order_rows(rates: Mapping[str, tuple[float, ...]]) -> tuple[Row, ...]:
    rows = []
    for at, column in enumerate(_COLUMNS):
        paper, ours = (sorted(SYSTEMS, key=lambda s: -figures[s][at]) for figures in (_TABLE_2, rates))
        rows.append(
            order(f"order_{at}", "Table 2", f"{column.name}: order", " > ".join(paper), " > ".join(ours), paper == ours)
        )
    return tuple(rows)


def _ratio_rows(rates: Mapping[str, tuple[float, ...]]) -> tuple[Row, ...]:
    return tuple(
        ratio_gain(
            f"up_to_{_word(system)}",
            "5.2",
            f"throughput against {system}, up to",
            claimed,
            max(a / b for a, b in zip(rates["Cronus"], rates[system], strict=True)),
        )
        for system, claimed in (("PP", 2.58), ("Disagg H-L", 5.64), ("Disagg L-H", 1.9))
    )


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
    what = "P99 against"
    return (
        gain("ttft_dp_a10", "Fig 4", f"TTFT {what} DP, A10, up to", -55.0, min(ttft["DP"][:2])),
        gain("ttft_dp_a30", "Fig 4", f"TTFT {what} DP, A30, up to", -26.0, min(ttft["DP"][2:])),
        gain("ttft_lh", "Fig 4", f"TTFT {what} Disagg L-H, up to", -84.0, min(ttft["Disagg L-H"])),
        gain("ttft_pp", "Fig 4", f"TTFT {what} PP, up to", -58.0, min(ttft["PP"])),
        order(
            "ttft_hl",
            "Fig 4",
            "TTFT P99 of Disagg H-L lower than Cronus'",
            "in every column",
            f"Cronus {_signed(ttft['Disagg H-L'])} %",
            min(ttft["Disagg H-L"]) > 0,
        ),
        gain("tbt_pp", "Fig 4", f"TBT {what} PP, up to", -70.0, min(tbt["PP"])),
        gain("tbt_dp", "Fig 4", f"TBT {what} DP, up to", -63.0, min(tbt["DP"])),
        gain("tbt_hl", "Fig 4", f"TBT {what} Disagg H-L, up to", -51.0, min(tbt["Disagg H-L"])),
        order(
            "tbt_lh",
            "Fig 4",
            "TBT P99 of Disagg L-H lower than Cronus'",
            "in every column",
            f"Cronus {_signed(tbt['Disagg L-H'])} %",
            min(tbt["Disagg L-H"]) > 0,
        ),
    )


def _p99_tbt_s(result: SimResult) -> float:
    return result.gaps.percentile_s(0.99)


def _signed(changes: list[float]) -> str:
    return ", ".join(f"{one:+.0f}" for one in changes)


def _word(system: str) -> str:
    return system.lower().replace(" ", "_").replace("-", "")
