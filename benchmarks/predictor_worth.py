"""`polyphase bench predictor --part worth`: what a prediction of an answer's length is worth.

The same requests with no predictor, one that always predicts the commonest bucket, a trained one and one that is always
right: in the simulator, under the default policies and TetriInfer's, and on emulated instances behind live services.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import predictor_worth_live as live
from benchmarks import predictor_worth_sim as sim
from benchmarks.predictor_worth_sim import TRAINED, trained
from services.launcher import cli_common

NO_WORSE = 0.97  # of the goodput without predictions: the resolution of its search


@dataclass(frozen=True, slots=True)
class WorthOptions:
    """data: the folder of public traces; where they are missing, lengths are made like theirs.

    evaluation: a `prediction.yaml` instead of the shipped checkpoint's. seeds: so many, of the simulated runs. rounds:
    of the live ones. lasts_s: of arrivals, of each live run.
    """

    data: Path | None = Path("../shared/data")
    evaluation: Path | None = None
    seeds: int = 3
    requests: int = sim.REQUESTS
    rounds: int = 2
    lasts_s: float = live.LASTS_S
    processes: int = 2
    simulated: bool = True
    live: bool = True


def run_worth(options: WorthOptions | None = None) -> dict[str, Any]:
    """Figures, aims and notes, as every bench gives them. Raises InvalidRequest for a file that is no evaluation."""
    chosen = options or WorthOptions()
    known = trained(chosen.evaluation)
    result: dict[str, Any] = {"figures": {}, "aims": {}, "notes": [f"worth, trained: {known.source}"]}
    if chosen.simulated:
        seeds = range(1, chosen.seeds + 1)
        found = sim.measured(known, chosen.data, seeds, chosen.processes, chosen.requests)
        result["figures"] |= sim.figures_of(found)
        result["aims"] |= goodput_aims(result["figures"])
        result["notes"] += sim.notes_of(known, chosen.data, chosen.requests)
        result["notes"].append(f"worth, sim: {chosen.requests} requests, {chosen.seeds} seeds; medians over them")
    if chosen.live:
        figures, notes = live.measured(known, chosen.data, chosen.rounds, chosen.lasts_s)
        result["figures"] |= figures
        result["notes"] += notes
    return result


def goodput_aims(figures: dict[str, float]) -> dict[str, Any]:
    """Under the default policies a trained predictor takes no goodput away. What others gain or lose is shown only."""
    aims: dict[str, Any] = {}
    for kind in sim.KINDS:
        name = f"sim_{kind}_{sim.DEFAULT}_{TRAINED}_goodput_over_none"
        aims[name] = {"want": f">= {NO_WORSE}", "got": figures[name], "met": figures[name] >= NO_WORSE}
    return aims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=WorthOptions().data)
    parser.add_argument("--evaluation", type=Path)
    for name in ("seeds", "requests", "rounds", "processes"):
        parser.add_argument(f"--{name}", type=int, default=getattr(WorthOptions(), name))
    parser.add_argument("--lasts-s", type=float, default=live.LASTS_S)
    parser.add_argument("--only", choices=("simulated", "live"))
    arguments: dict[str, Any] = vars(parser.parse_args())
    only = arguments.pop("only")
    arguments |= {half: only in (None, half) for half in ("simulated", "live")}
    cli_common.report(Console(), run_worth(WorthOptions(**arguments)), as_json=True)


if __name__ == "__main__":
    main()
