"""`polyphase bench overload`: interactive and batch work together at twice the capacity, with and without control.

Capacity is goodput: the rate at which 90 % of interactive requests alone keep their targets, over a minute. What batch
work may get is the throughput of batch work alone, as much as there is of it, less what interactive work used. First in
the simulator, with what is known live, then on emulated instances behind a real gateway (`overload_live`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from lab.bench import overload_live
from lab.bench.policies_search import goodput
from lab.bench.scenarios import SLO, TARGET, Scenario, instances, run_of
from lab.bench.throughput import tokens_per_s
from shared.domain.job import Slo, WhenFull
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult, Status
from shared.sim.spec import with_words
from shared.sim.workload import Times, Workload, of_class, together

SCENARIOS = (Scenario("equal", "conversation"), Scenario("fast_slow", "conversation"), Scenario("equal", "code"))
CONTROLLED = {
    "interactive": Slo("interactive", SLO.ttft_s, SLO.tpot_s, 1.0, WhenFull.REJECT),
    "batch": Slo("batch", 600.0, 1.0, 0.1, WhenFull.DELAY),
}
PLAIN = {name: msgspec.structs.replace(slo, weight=1.0, when_full=WhenFull.NEVER) for name, slo in CONTROLLED.items()}
LASTS_S, FROM_S = 60.0, 20.0  # of arrivals, and where what is counted begins
OVER = 2.0  # times the capacity
INTERACTIVE = 0.5  # of the capacity
FLOOD, POLITE = 2.0, 0.3  # of the capacity: what two keys of one class ask for
FIXED = "least_load+balanced+power_of_two"
AIM = 0.9


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests of one class and key, so many a second."""

    slo: Slo
    rate: float
    caller: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """One stream, of the time that is counted. attainment: of all that were sent, refused ones among them; kept: of
    those that were let in and are done; tokens_per_s: of prompts whose answers began then, and of answers.
    """

    attainment: float
    kept: float
    refused: float  # share
    tokens_per_s: float
    longest_gap_p90_s: float = float("nan")  # of the requests' longest gaps


def run_overload_bench(scenarios: Sequence[Scenario] = SCENARIOS) -> dict[str, Any]:
    """Figures, aims and notes, as every bench gives them."""
    result: dict[str, Any] = {"figures": {}, "aims": {}, "notes": []}
    for scenario in scenarios:
        _add(result, simulated(scenario))
    _add(result, overload_live.run())
    return result


def simulated(scenario: Scenario) -> dict[str, Any]:
    """One scenario in virtual time."""
    plain = PLAIN["interactive"]
    capacity = goodput(lambda rate: _run(scenario, [Stream(plain, rate)])[0].attainment >= TARGET, 16.0, 1.05)
    rates = {"interactive": INTERACTIVE * capacity, "batch": (OVER - INTERACTIVE) * capacity}
    alone = _run(scenario, [Stream(CONTROLLED["batch"], OVER * capacity)])[0].tokens_per_s
    figures = {"capacity_per_s": capacity, "batch_alone_tokens_per_s": alone}
    for label, classes, policy in (
        ("controlled", CONTROLLED, "adaptive"),
        ("budget", CONTROLLED, "adaptive+step_budget=on"),
        ("plain", PLAIN, "adaptive"),
        ("fixed", PLAIN, FIXED),
    ):
        interactive, batch = _run(scenario, [Stream(classes[name], rate) for name, rate in rates.items()], policy)
        figures |= mixed(label, interactive, batch, alone)
    for label, classes in (("controlled", CONTROLLED), ("plain", PLAIN)):
        slo = classes["interactive"]
        only = _run(scenario, [Stream(slo, OVER * capacity)])[0]
        figures[f"{label}_interactive_only_kept"] = only.kept
        figures[f"{label}_interactive_only_goodput_share"] = only.attainment * OVER
        keys = [Stream(slo, FLOOD * capacity, "flood"), Stream(slo, POLITE * capacity, "polite")]
        for stream, seen in zip(keys, _run(scenario, keys), strict=True):
            figures[f"{label}_{stream.caller}_attainment"] = seen.attainment
            figures[f"{label}_{stream.caller}_tokens_per_s"] = seen.tokens_per_s
    name = f"sim_{scenario.name}"
    aims = aims_of(name, figures["controlled_interactive_attainment"], figures["controlled_batch_share_of_left"])
    got = figures["controlled_polite_attainment"]
    aims[f"{name}_polite_attainment"] = {"want": f">= {AIM}", "got": round(got, 3), "met": got >= AIM}
    figures = {f"{name}_{key}": round(value, 4) for key, value in figures.items()}
    return {"figures": figures, "aims": aims, "notes": []}


def mixed(label: str, interactive: Seen, batch: Seen, alone: float) -> dict[str, float]:
    """Figures of both classes together; `alone`: tokens a second of batch work without the other."""
    left = max(1e-9, alone - interactive.tokens_per_s)
    return {
        f"{label}_interactive_attainment": interactive.attainment,
        f"{label}_interactive_refused": interactive.refused,
        f"{label}_interactive_longest_gap_p90_s": interactive.longest_gap_p90_s,
        f"{label}_interactive_tokens_per_s": interactive.tokens_per_s,
        f"{label}_batch_tokens_per_s": batch.tokens_per_s,
        f"{label}_batch_share_of_left": batch.tokens_per_s / left,
        f"{label}_throughput_of_alone": (batch.tokens_per_s + interactive.tokens_per_s) / alone,
    }


def aims_of(name: str, attainment: float, share: float) -> dict[str, Any]:
    """Both aims of point 7 of the issue."""
    return {
        f"{name}_{what}": {"want": f">= {AIM}", "got": round(got, 3), "met": got >= AIM}
        for what, got in (("interactive_attainment", attainment), ("batch_share_of_left", share))
    }


def _run(scenario: Scenario, streams: Sequence[Stream], policy: str = "adaptive") -> list[Seen]:
    parts = []
    for at, stream in enumerate(streams):
        asked = replace(scenario, seed=scenario.seed + at).workload(stream.rate, max(50, int(stream.rate * LASTS_S)))
        parts.append(of_class(asked, stream.slo, stream.caller))
    workload = together(parts)
    result = simulate(workload, instances(scenario.cluster), with_words(run_of(scenario.cluster), policy))
    return [_seen(result, workload, at, stream.slo) for at, stream in enumerate(streams)]


def _seen(result: SimResult, workload: Workload, at: int, slo: Slo) -> Seen:
    rows, mix = result.outcomes, workload.mix
    assert mix is not None
    mine = mix.class_of == at
    counted = mine & (rows.arrival_s >= FROM_S) & (rows.arrival_s < LASTS_S)
    met = rows.met(slo)
    done = mine & rows.completed
    tokens = tokens_per_s(
        rows.prompt_tokens[done],
        rows.output_tokens[done],
        rows.first_token_s[done],
        rows.last_token_s[done],
        FROM_S,
        LASTS_S,
    )
    let_in = counted & rows.completed
    return Seen(
        float(met[counted].mean()),
        float(met[let_in].mean()) if let_in.any() else float("nan"),
        float(np.mean(rows.status[counted] == int(Status.REFUSED))),
        tokens,
        percentile(rows.longest_gap_s[counted], 90),
    )


def percentile(values: Times, share: float) -> float:
    """Of those that are known; NaN without any."""
    known = values[np.isfinite(values)]
    return float(np.percentile(known, share)) if len(known) else float("nan")


def _add(result: dict[str, Any], more: Mapping[str, Any]) -> None:
    result["figures"] |= more["figures"]
    result["aims"] |= more["aims"]
    result["notes"] += more["notes"]
