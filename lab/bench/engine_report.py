"""What `bench engine` makes of its runs: medians of rounds, who was overtaken by how many, whose tokens differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from lab.bench.engine_load import Served
from lab.bench.mixed_report import at_least, at_most
from shared.policy.prefill_order import WINDOW

FCFS, SJF = "fcfs", "sjf"
GREEDY, STATIC, DYNAMIC = "greedy", "reserve_static", "reserve_dynamic"
ALONE = "alone"  # a run of few requests at once, that only says what their tokens are
JCT_SHARE = 1.02  # of greedy's, at most: what counts as no longer
Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One load under one policy, in one round."""

    round: int
    policy: str
    served: Sequence[Served]
    preemptions: int = 0
    predicted: float = 0.0  # share of the requests whose length was predicted in time


def passed(served: Sequence[Served]) -> list[int]:
    """For each request, in the order of sending, by how many that came later its first token was preceded."""
    return [sum(later.first_s < one.first_s for later in served[at + 1 :]) for at, one in enumerate(served)]


def unlike(runs: Sequence[Run]) -> list[str]:
    """Requests whose tokens are not those that they had in the round's first run of the same load."""
    found = []
    first: dict[int, Run] = {}
    for run in runs:
        before = first.setdefault(run.round, run)
        for at, (one, other) in enumerate(zip(before.served, run.served, strict=True)):
            if one.tokens != other.tokens:
                found.append(f"round {run.round}: {before.policy} and {run.policy}, request {at}")
    return found


def report(orders: Sequence[Run], admissions: Sequence[Run]) -> Result:
    """Figures, aims and notes."""
    figures, aims = _of_orders(_by_policy(orders))
    more, wanted = _of_admissions(_by_policy(admissions))
    found = [*unlike(orders), *unlike(admissions)]
    answers = sum(len(run.served) for run in (*orders, *admissions))
    aims |= wanted
    aims["answers_with_other_tokens"] = {"want": 0, "got": "; ".join(found[:5]) or 0, "met": not found}
    return {"figures": figures | more | {"answers_compared": float(answers)}, "aims": aims, "notes": []}


def _by_policy(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run.policy != ALONE:
            found.setdefault(run.policy, []).append(run)
    return found


def _of_orders(runs: Mapping[str, Sequence[Run]]) -> tuple[dict[str, float], Result]:
    figures: dict[str, float] = {}
    for policy, rounds in runs.items():
        tight = [[one for one in run.served if not one.wanted.slo] for run in rounds]
        figures |= {
            f"{policy}_ttft_mean_s": median(fmean(one.ttft_s for one in run.served) for run in rounds),
            f"{policy}_ttft_max_s": median(max(one.ttft_s for one in run.served) for run in rounds),
            f"{policy}_tight_ttft_mean_s": median(fmean(one.ttft_s for one in some) for some in tight),
            f"{policy}_passed_by_at_most": float(max(max(passed(run.served)) for run in rounds)),
        }
    ratio = figures[f"{SJF}_ttft_mean_s"] / figures[f"{FCFS}_ttft_mean_s"]
    figures["sjf_ttft_mean_over_fcfs"] = ratio
    most = max(figures[f"{policy}_passed_by_at_most"] for policy in runs)
    return figures, {
        "sjf_ttft_mean_over_fcfs": {"want": "< 1", "got": round(ratio, 3), "met": ratio < 1.0},
        "passed_by_at_most": at_most(WINDOW, most),
    }


def _of_admissions(runs: Mapping[str, Sequence[Run]]) -> tuple[dict[str, float], Result]:
    figures: dict[str, float] = {}
    for policy, rounds in runs.items():
        figures |= {
            f"{policy}_preemptions": median(run.preemptions for run in rounds),
            f"{policy}_jct_mean_s": median(fmean(one.jct_s for one in run.served) for run in rounds),
            f"{policy}_ttft_under_pressure_mean_s": median(fmean(one.ttft_s for one in run.served) for run in rounds),
            f"{policy}_predicted_share": min(run.predicted for run in rounds),
        }
    for policy in (STATIC, DYNAMIC):
        ratios = [
            fmean(one.jct_s for one in run.served) / fmean(one.jct_s for one in greedy.served)
            for run, greedy in zip(runs[policy], runs[GREEDY], strict=True)
        ]
        figures[f"{policy}_jct_mean_over_greedy"] = median(ratios)
    fewer = figures[f"{GREEDY}_preemptions"] - figures[f"{DYNAMIC}_preemptions"]
    return figures, {
        "greedy_preemptions": at_least(1, figures[f"{GREEDY}_preemptions"]),
        "reserve_dynamic_fewer_preemptions": at_least(1, fewer),
        "reserve_dynamic_jct_mean_over_greedy": at_most(JCT_SHARE, figures[f"{DYNAMIC}_jct_mean_over_greedy"]),
    }
