"""`polyphase bench overload`: interactive and batch requests at twice the capacity, with and without overload control.

Capacity is the rate at which 90 % of interactive requests alone meet their targets, over a minute. Batch requests may
get the throughput of batch requests alone, less what interactive requests used. The simulator runs first, with what a
live cluster knows; then emulated instances behind a real gateway.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.experiment import Session, goodput, measured
from benchmarks.results import Result, at_least, merged, result
from benchmarks.scenarios import SLO, TARGET, Scenario, instances, run_of
from benchmarks.suite import BARE
from shared.domain.job import Slo, WhenFull
from shared.sim.cluster import simulate
from shared.sim.outcomes import Outcomes, Status
from shared.sim.spec import with_words
from shared.sim.workload import Workload, of_class, poisson, together

SCENARIOS = (Scenario("equal", "conversation"), Scenario("fast_slow", "conversation"), Scenario("equal", "code"))
OVER = 2.0  # times the capacity
INTERACTIVE = 0.5  # of the capacity
FLOOD, POLITE = 2.0, 0.3  # of the capacity: the rates of two keys of one class
AIM, AIMS = 0.9, ("interactive_attainment", "batch_share_of_left", "polite_attainment")  # with overload control
Classes = Mapping[str, Slo]


def _classes(slo: Slo, batch: Slo) -> tuple[Classes, Classes]:
    """Interactive and batch requests with these targets: with overload control, and without."""
    controlled = {
        "interactive": msgspec.structs.replace(slo, when_full=WhenFull.REJECT),
        "batch": msgspec.structs.replace(batch, weight=0.1, when_full=WhenFull.DELAY),
    }
    return controlled, {"interactive": slo, "batch": batch}


class Stream(NamedTuple):
    """Requests of one class and key, so many a second."""

    slo: Slo
    rate: float
    caller: str = ""


def run_overload_bench(scenarios: Sequence[Scenario] = SCENARIOS) -> Result:
    return merged(*map(simulated, scenarios), asyncio.run(measured(CLUSTER, _live)))


def figures_of(seen: Outcomes, workload: Workload, at: int, from_s: float, to_s: float) -> dict[str, float]:
    """Of the stream with that number, in the time from `from_s` to `to_s`. Refused requests miss their targets."""
    mix = workload.mix
    assert mix is not None
    mine = mix.class_of == at
    counted = mine & (seen.arrival_s >= from_s) & (seen.arrival_s < to_s)
    longest = seen.longest_gap_s[counted & np.isfinite(seen.longest_gap_s)]
    return {
        "attainment": float(seen.met(mix.classes[at])[counted].mean()),
        "refused": float(np.mean(seen.status[counted] == int(Status.REFUSED))),
        "longest_gap_p90_s": float(np.percentile(longest, 90)) if len(longest) else float("nan"),
        "tokens_per_s": tokens_per_s(seen, mine & seen.completed, from_s, to_s),
    }


def tokens_per_s(seen: Outcomes, rows: NDArray[np.bool_], from_s: float, to_s: float) -> float:
    """Tokens a second of these requests from `from_s` to `to_s`.

    A prompt's tokens count when the first token of its answer comes, those of the answer evenly from then to the last.
    Counting whole requests when they end would be off by all that is under way at both ends.
    """
    first, last = seen.first_token_s[rows], seen.last_token_s[rows]
    inside = (first >= from_s) & (first < to_s)
    share = np.clip(np.minimum(last, to_s) - np.maximum(first, from_s), 0.0, None) / np.maximum(last - first, 1e-9)
    tokens = seen.prompt_tokens[rows][inside].sum() + (seen.output_tokens[rows] * share).sum()
    return float(tokens / (to_s - from_s))


def mixed(label: str, both: Sequence[Mapping[str, float]], alone: float) -> dict[str, float]:
    """Figures of interactive and batch work together. alone: tokens a second of batch work without interactive work."""
    interactive, batch = both
    used, served = interactive["tokens_per_s"], batch["tokens_per_s"]
    return {
        **{f"{label}_interactive_{key}": value for key, value in interactive.items()},
        f"{label}_batch_tokens_per_s": served,
        f"{label}_batch_share_of_left": served / max(1e-9, alone - used),
        f"{label}_throughput_of_alone": (served + used) / alone,
    }


def judged(name: str, figures: Mapping[str, float], *notes: str) -> Result:
    shares = {key: figures.get(f"controlled_{key}") for key in AIMS}
    aims = {f"{name}_{key}": at_least(AIM, got) for key, got in shares.items() if got is not None}
    return result({f"{name}_{key}": round(value, 4) for key, value in figures.items()}, aims, notes)


# Simulated.

LASTS_S, FROM_S = 60.0, 20.0  # of arrivals, and where what is counted begins
CONTROLLED, PLAIN = _classes(Slo("interactive", SLO.ttft_s, SLO.tpot_s), Slo("batch", 600.0, 1.0))


def simulated(scenario: Scenario) -> Result:
    def run(*streams: Stream, policy: str = "adaptive") -> list[dict[str, float]]:
        return _simulated(scenario, streams, policy)

    plain = PLAIN["interactive"]
    capacity = goodput(lambda rate: run(Stream(plain, rate))[0]["attainment"] >= TARGET, 16.0, 1.05)
    rates = {"interactive": INTERACTIVE * capacity, "batch": (OVER - INTERACTIVE) * capacity}
    alone = run(Stream(CONTROLLED["batch"], OVER * capacity))[0]["tokens_per_s"]
    figures = {"capacity_per_s": capacity, "batch_alone_tokens_per_s": alone}
    for label, classes, policy in (
        ("controlled", CONTROLLED, "adaptive"),
        ("budget", CONTROLLED, "adaptive+step_budget=on"),
        ("plain", PLAIN, "adaptive"),
    ):
        both = run(*(Stream(classes[name], rate) for name, rate in rates.items()), policy=policy)
        figures |= mixed(label, both, alone)
    for label, classes in (("controlled", CONTROLLED), ("plain", PLAIN)):
        slo = classes["interactive"]
        keys = [Stream(slo, FLOOD * capacity, "flood"), Stream(slo, POLITE * capacity, "polite")]
        for stream, seen in zip(keys, run(*keys), strict=True):
            for key in ("attainment", "tokens_per_s"):
                figures[f"{label}_{stream.caller}_{key}"] = seen[key]
    return judged(f"sim_{scenario.name}", figures)


def _simulated(scenario: Scenario, streams: Sequence[Stream], policy: str) -> list[dict[str, float]]:
    parts = []
    for at, stream in enumerate(streams):
        requests = replace(scenario, seed=scenario.seed + at).workload(stream.rate, max(50, int(stream.rate * LASTS_S)))
        parts.append(of_class(requests, stream.slo, stream.caller))
    workload = together(parts)
    seen = simulate(workload, instances(scenario.cluster), with_words(run_of(scenario.cluster), policy)).outcomes
    return [figures_of(seen, workload, at, FROM_S, LASTS_S) for at in range(len(streams))]


# Live, on emulated instances. The classes without overload control have names of their own.

LIVE_CONTROLLED, LIVE_PLAIN = _classes(Slo("default", 3.0, 0.15), Slo("batch", 600.0, 2.0))
LIVE_PLAIN = {key: msgspec.structs.replace(slo, name=f"plain-{key}") for key, slo in LIVE_PLAIN.items()}
_INSTANCE: dict[str, object] = {"accelerator": "A10", "kv_cache_bytes": 6 << 30}
CLUSTER: dict[str, object] = {
    **BARE,
    "name": "bench overload (emulated)",
    "gateway": {
        "slo": {
            slo.name: {**slo.targets, "weight": slo.weight, "when_full": slo.when_full.value}
            for classes in (LIVE_CONTROLLED, LIVE_PLAIN)
            for slo in classes.values()
        }
    },
    "instance_defaults": {"engine": "emulated", "emulated_link_gbps": 10.0, "chunk_size": 512, "max_seqs": 32},
    "instances": [
        {"id": "prefill", "count": 1, "role": "prefill", **_INSTANCE},
        {"id": "decode", "count": 2, "role": "decode", **_INSTANCE},
    ],
}
PROMPT, OUTPUT = (400, 1600), (20, 100)  # tokens, uniform
LIVE_LASTS_S, LIVE_FROM_S = 75.0, 15.0  # of arrivals, and where what is counted begins
ENDS_S = 90.0  # after which clients give up
OFFERED_PER_S = 14.0  # of batch work alone: more than the cluster can do
SEED = 5


async def _live(on: Session) -> Result:
    (alone,) = await _sent(on, Stream(LIVE_CONTROLLED["batch"], OFFERED_PER_S))
    capacity = alone["tokens_per_s"] / float(np.mean(PROMPT) + np.mean(OUTPUT))
    rates = {"interactive": INTERACTIVE * capacity, "batch": (OVER - INTERACTIVE) * capacity}
    figures = {"capacity_per_s": capacity}
    for label, classes in (("controlled", LIVE_CONTROLLED), ("plain", LIVE_PLAIN)):
        both = await _sent(on, *(Stream(classes[name], rate) for name, rate in rates.items()))
        figures |= mixed(label, both, alone["tokens_per_s"])
    return judged("live", figures, "live: emulated A10s, 1 prefill + 2 decode, one gateway")


async def _sent(on: Session, *streams: Stream) -> list[dict[str, float]]:
    workload = together([_drawn(stream, SEED + at) for at, stream in enumerate(streams)])
    run = await on.send(workload, ends_s=ENDS_S, may_fail=True)
    return [figures_of(run.result.outcomes, workload, at, LIVE_FROM_S, LIVE_LASTS_S) for at in range(len(streams))]


def _drawn(stream: Stream, seed: int) -> Workload:
    rng, count = np.random.default_rng(seed), round(stream.rate * LIVE_LASTS_S)
    prompts, outputs = (rng.integers(low, high + 1, count) for low, high in (PROMPT, OUTPUT))
    lengths = Workload("overload", np.zeros(count), prompts, outputs)
    return of_class(poisson(lengths, stream.rate, seed), stream.slo, stream.caller)
