"""What `bench learning` makes of its runs: how far learned rates are off, and what a slowed instance still got."""

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from lab.bench.learning_rates import BATCHES, Compared, median_error
from lab.bench.learning_shares import Episode, Placed, share, windows
from lab.bench.mixed_report import at_most

OFF_PERCENT = 15.0
LEFT = 0.5  # of its share before
BEFORE_S, SOON_S, BY_S, UNTIL_S = -10.0, 6.0, 10.0, 20.0  # after the slowdown
Result = dict[str, Any]


def report(compared: Sequence[Compared], work: Sequence[Placed], episodes: Sequence[Episode]) -> Result:
    """Figures, aims and notes."""
    figures, aims = _of_rates(compared)
    more, wanted = _of_shares(work, episodes)
    notes = ["in proportion to their speeds the halved one of three would keep 0.6 of its share"]
    return {"figures": figures | more, "aims": aims | wanted, "notes": notes}


def _of_rates(compared: Sequence[Compared]) -> tuple[dict[str, float], Result]:
    figures: dict[str, float] = {}
    for one in compared:
        name = f"{one.instance_id}_{one.kind}"
        figures |= {
            f"{name}_steps": float(one.steps),
            f"{name}_off_mean_percent": 100.0 * one.mean_error,
            f"{name}_bias_percent": 100.0 * fmean(one.off),
            f"{name}_measured_steps_off_median_percent": 100.0 * median(abs(off) for off in one.measured_off),
        }
    figures["off_median_percent"] = 100.0 * median_error(compared)
    aims = {"off_median_percent": at_most(OFF_PERCENT, figures["off_median_percent"])}
    for kind in BATCHES:
        of_kind = [abs(off) for one in compared if one.kind == kind for off in one.off]
        got = 100.0 * fmean(of_kind) if of_kind else None
        aims[f"{kind}_off_mean_percent"] = at_most(OFF_PERCENT, got)
    return figures, aims


def _of_shares(work: Sequence[Placed], episodes: Sequence[Episode]) -> tuple[dict[str, float], Result]:
    before = share(work, episodes, BEFORE_S, 0.0)
    figures = {
        f"halved_share_from_{begins_s:g}_s": got
        for begins_s, got in windows(work, episodes, BEFORE_S, UNTIL_S)
        if got is not None
    }
    if before is not None:
        figures["share_before"] = before
    aims: Result = {}
    for name, begins_s, ends_s in (("within_10_s", SOON_S, BY_S), ("from_10_to_20_s", BY_S, UNTIL_S)):
        after = share(work, episodes, begins_s, ends_s)
        ratio = after / before if after is not None and before else None
        if ratio is not None:
            figures[f"share_left_{name}"] = ratio
        aims[f"share_left_{name}"] = at_most(LEFT, ratio)
    return figures, aims
