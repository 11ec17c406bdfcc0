"""`polyphase bench prefix`: what placement makes of prefix caches, beside one that does not look at them and an oracle.

Mooncake's traces, which name their prompts' blocks, on simulated nodes whose memory holds a part of them; then chats of
several turns on four real engines of this machine.
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from lab.bench.prefix_live import Run, run_live
from lab.bench.prefix_sim import SHARES, SLO, SYSTEMS, Case, Oracles, Point, cases

HITS, TTFT, BALANCE = 0.9, 0.6, 1.5  # aims: of an oracle's hits, of the other's mean TTFT, busiest over mean


@dataclass(frozen=True, slots=True)
class PrefixOptions:
    """rounds: of both placements on real engines. simulated, live: whether to do that part."""

    rounds: int = 2
    simulated: bool = True
    live: bool = True


@dataclass(frozen=True, slots=True)
class Traced:
    """A trace at several rates. points: by share of capacity and system."""

    trace: str
    prompt_tokens: int
    oracles: Oracles
    points: Mapping[tuple[float, str], Point]


def run_prefix_bench(data: Path, options: PrefixOptions | None = None, processes: int = 2) -> dict[str, Any]:
    """Figures, aims and notes, as every bench gives them. Raises NotFound without the traces, and Unavailable where
    this machine allows no CPU quotas.
    """
    chosen = options or PrefixOptions()
    result: dict[str, Any] = {"figures": {}, "aims": {}, "notes": []}
    if chosen.simulated:
        for one in _simulate(list(cases(data)), processes):
            _add(result, traced(one))
        note = f"simulated: TTFT {SLO.ttft_s:g} s, TPOT {SLO.tpot_s:g} s; rates are shares of what least_load serves"
        result["notes"].append(note)
    if chosen.live:
        _add(result, live(asyncio.run(run_live(chosen.rounds, Console(stderr=True)))))
    return result


def _simulate(found: Sequence[Case], processes: int) -> list[Traced]:
    with ProcessPoolExecutor(processes) as pool:
        rates = list(pool.map(Case.capacity, found))
        oracles = list(pool.map(Case.oracles, found))
        keys = [(at, share, system) for at, share, system in product(range(len(found)), SHARES, SYSTEMS)]
        points = pool.map(
            Case.point, [found[at] for at, *_ in keys], [key[2] for key in keys], [s * rates[at] for at, s, _ in keys]
        )
        by_key = dict(zip(keys, points, strict=True))
    return [
        Traced(
            case.trace,
            int(case.work().prompt_tokens.sum()),
            oracles[at],
            {(share, system): point for (of, share, system), point in by_key.items() if of == at},
        )
        for at, case in enumerate(found)
    ]


def traced(one: Traced) -> dict[str, Any]:
    """Figures and aims of a trace."""
    total, figures, aims = one.prompt_tokens, dict[str, float](), dict[str, Any]()
    figures[f"{one.trace}_oracle_saved_share"] = round(one.oracles.unbounded / total, 4)
    figures[f"{one.trace}_pooled_oracle_saved_share"] = round(one.oracles.pooled / total, 4)
    for share in SHARES:
        at = f"{one.trace}_at_{round(100 * share)}_percent"
        mine, other = (one.points[share, system] for system in ("adaptive", "least_load"))
        figures[f"{at}_per_s"] = round(mine.rate, 3)
        for system, point in (("adaptive", mine), ("least_load", other)):
            figures |= {f"{at}_{system}_{name}": value for name, value in _figures(point, total).items()}
        aims |= _aims(at, mine.saved_tokens / one.oracles.pooled, mine.ttft_mean_s / other.ttft_mean_s, mine.imbalance)
    return {"figures": figures, "aims": aims, "notes": []}


def live(runs: Sequence[Run]) -> dict[str, Any]:
    """Figures and aims of chats on real engines, all rounds together."""
    figures: dict[str, float] = {}
    for system in ("adaptive", "least_load"):
        mine = [run for run in runs if run.system == system]
        ttft = [one.ttft_s for run in mine for one in run.requests]
        later = [one.ttft_s for run in mine for one in run.requests if one.turn]
        figures |= {
            f"live_{system}_hits_of_oracle": round(sum(run.hit for run in mine) / sum(run.oracle for run in mine), 4),
            f"live_{system}_ttft_mean_s": round(sum(ttft) / len(ttft), 4),
            f"live_{system}_later_turns_ttft_mean_s": round(sum(later) / len(later), 4),
            f"live_{system}_imbalance": round(max(run.imbalance for run in mine), 3),
        }
    aims = _aims(
        "live",
        figures["live_adaptive_hits_of_oracle"],
        figures["live_adaptive_ttft_mean_s"] / figures["live_least_load_ttft_mean_s"],
        figures["live_adaptive_imbalance"],
    )
    return {"figures": figures, "aims": aims, "notes": [f"live: {len(runs[0].requests)} requests a run"]}


def _figures(point: Point, prompt_tokens: int) -> dict[str, float]:
    return {
        "saved_share": round(point.saved_tokens / prompt_tokens, 4),
        "ttft_mean_s": round(point.ttft_mean_s, 3),
        "ttft_p50_s": round(point.ttft_p50_s, 3),
        "ttft_p99_s": round(point.ttft_p99_s, 2),
        "tpot_mean_s": round(point.tpot_mean_s, 4),
        "attainment": round(point.attainment, 4),
        "longest_gap_p90_s": round(point.longest_gap_p90_s, 3),
        "longest_gap_max_s": round(point.longest_gap_max_s, 3),
        "imbalance": round(point.imbalance, 3),
    }


def _aims(at: str, hits: float, ttft: float, imbalance: float) -> dict[str, Any]:
    """Those of point 4 of the issue."""
    return {
        f"{at}_hits_of_oracle": {"want": f">= {HITS}", "got": round(hits, 3), "met": hits >= HITS},
        f"{at}_ttft_over_least_load": {"want": f"<= {TTFT}", "got": round(ttft, 3), "met": ttft <= TTFT},
        f"{at}_imbalance": {"want": f"<= {BALANCE}", "got": round(imbalance, 3), "met": imbalance <= BALANCE},
    }


def _add(result: dict[str, Any], more: Mapping[str, Any]) -> None:
    result["figures"] |= more["figures"]
    result["aims"] |= more["aims"]
    result["notes"] += more["notes"]
