"""`polyphase bench overload`: interactive and batch requests at twice the capacity, with and without overload control.

Capacity is the rate at which 90 % of interactive requests alone meet their targets, over a minute. Batch requests may
get the throughput of batch requests alone, less what interactive requests used. The simulator runs first, with what a
live cluster knows; then emulated instances behind a real gateway.
"""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from benchmarks.comparison import goodput
from benchmarks.experiment import Session, measured
from benchmarks.results import Aim, Result, at_least, merged, result
from benchmarks.scenarios import SLO, TARGET, Scenario, instances, run_of
from benchmarks.suite import BARE
from shared.domain.job import Slo, WhenFull, default_itl_s
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult, Status
from shared.sim.spec import with_words
from shared.sim.workload import Times, Workload, of_class, together
from tools.client import Refused, StreamFailed, StreamResult, completion_body, stream_completion


def tokens_per_s(
    prompt_tokens: ArrayLike,
    output_tokens: ArrayLike,
    first_s: ArrayLike,
    last_s: ArrayLike,
    from_s: float,
    to_s: float,
) -> float:
    """Tokens a second from `from_s` to `to_s` of requests, shape [n] each.

    A prompt's tokens count when the first token of its answer comes, those of the answer evenly from then to the last.
    Counting whole requests when they end would be off by all that is under way at both ends.
    """
    prompts, outputs, first, last = (
        np.asarray(values, np.float64) for values in (prompt_tokens, output_tokens, first_s, last_s)
    )
    inside = (first >= from_s) & (first < to_s)
    took = np.maximum(last - first, 1e-9)
    share = np.clip(np.minimum(last, to_s) - np.maximum(first, from_s), 0.0, None) / took
    return float((prompts[inside].sum() + (outputs * share).sum()) / (to_s - from_s))


_GIB = 1 << 30
TTFT_S, TPOT_S = 3.0, 0.15
_TARGETS: dict[str, Any] = {"ttft_s": TTFT_S, "tpot_s": TPOT_S}
_LONG: dict[str, Any] = {"ttft_s": 600.0, "tpot_s": 2.0}
_INSTANCE: dict[str, Any] = {"accelerator": "A10", "kv_cache_bytes": 6 * _GIB}
CLUSTER: dict[str, Any] = {
    **BARE,
    "name": "bench overload (emulated)",
    "gateway": {
        "slo": {
            "default": {**_TARGETS, "when_full": "reject"},
            "batch": {**_LONG, "weight": 0.1, "when_full": "delay"},
            "plain": {**_TARGETS, "when_full": "never"},
            "plain-batch": {**_LONG, "when_full": "never"},
        }
    },
    "instance_defaults": {"engine": "emulated", "emulated_link_gbps": 10.0, "chunk_size": 512, "max_seqs": 32},
    "instances": [
        {"id": "prefill", "count": 1, "role": "prefill", **_INSTANCE},
        {"id": "decode", "count": 2, "role": "decode", **_INSTANCE},
    ],
}
PROMPT, OUTPUT = (400, 1600), (20, 100)  # tokens, uniform
LIVE_LASTS_S, LIVE_FROM_S, LIVE_ENDS_S = (
    75.0,
    15.0,
    15.0,
)  # of arrivals; what is counted begins; so long answers may go on
OFFERED_PER_S = 14.0  # of batch work alone: more than the cluster can do
LIVE_INTERACTIVE = 0.5
SEED = 5


@dataclass(slots=True)
class _Shot:
    """A request and what became of it; times from the start of the run."""

    slo: str
    at_s: float
    prompt_tokens: int
    output_tokens: int
    seen: StreamResult | None = None
    refused: bool = False

    @property
    def met(self) -> bool:
        seen = self.seen
        return (
            seen is not None
            and seen.ttft_s <= TTFT_S
            and seen.last_s - seen.ttft_s <= TPOT_S * (self.output_tokens - 1)
            and seen.gaps_met(default_itl_s(TPOT_S))
        )


async def _live(on: Session) -> Result:
    alone = await _measure(on, {"batch": OFFERED_PER_S})
    await on.suite.wait_idle()
    each = fmean(one.prompt_tokens + one.output_tokens for one in alone)
    capacity = _tokens_per_s(alone, "batch") / each
    rates = (LIVE_INTERACTIVE * capacity, (2.0 - LIVE_INTERACTIVE) * capacity)
    figures = {"live_capacity_per_s": capacity}
    for label, names in (("controlled", ("default", "batch")), ("plain", ("plain", "plain-batch"))):
        shots = await _measure(on, dict(zip(names, rates, strict=True)))
        await on.suite.wait_idle(120.0)
        figures |= _figures(f"live_{label}", shots, names, _tokens_per_s(alone, "batch"))
    got = (figures[f"live_controlled_{name}"] for name in ("interactive_attainment", "batch_share_of_left"))
    return result(figures, aims_of("live", *got), ["live: emulated A10s, 1 prefill + 2 decode, one gateway"])


async def _measure(on: Session, rates: dict[str, float]) -> list[_Shot]:
    """So many requests a second of each class; clients that wait when LIVE_ENDS_S are over give up."""
    rng = Random(SEED)
    shots = []
    for slo, rate in rates.items():
        at_s = rng.expovariate(rate)
        while at_s < LIVE_LASTS_S:
            shots.append(_Shot(slo, at_s, rng.randint(*PROMPT), rng.randint(*OUTPUT)))
            at_s += rng.expovariate(rate)
    loop = asyncio.get_running_loop()
    began = loop.time()
    tasks = [asyncio.create_task(_send(on, shot, began, loop)) for shot in shots]
    await asyncio.wait(tasks, timeout=LIVE_LASTS_S + LIVE_ENDS_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return shots


async def _send(on: Session, shot: _Shot, began: float, loop: asyncio.AbstractEventLoop) -> None:
    await asyncio.sleep(began + shot.at_s - loop.time())
    rng = Random(f"{shot.at_s}")
    prompt = [rng.randrange(300, 1200) for _ in range(shot.prompt_tokens)]
    body = completion_body(prompt, shot.output_tokens, cache_salt=secrets.token_hex(8))
    try:
        shot.seen = await stream_completion(*on.target.api_address, body, on.target.api_key, shot.slo)
    except Refused:
        shot.refused = True
    except (StreamFailed, OSError):
        pass  # counts as missed


def _figures(label: str, shots: Sequence[_Shot], names: tuple[str, str], alone: float) -> dict[str, float]:
    interactive = [shot for shot in shots if shot.slo == names[0] and shot.at_s >= LIVE_FROM_S]
    longest = [max(shot.seen.gaps_s) for shot in interactive if shot.seen is not None and shot.seen.gaps_s]
    used, batch = (_tokens_per_s(shots, name) for name in names)
    return {
        f"{label}_interactive_attainment": round(fmean(shot.met for shot in interactive), 4),
        f"{label}_interactive_longest_gap_p90_s": round(float(np.percentile(longest, 90)), 4) if longest else 0.0,
        f"{label}_interactive_refused": round(fmean(shot.refused for shot in interactive), 4),
        f"{label}_batch_share_of_left": round(batch / max(1e-9, alone - used), 4),
        f"{label}_throughput_of_alone": round((batch + used) / alone, 4),
    }


def _tokens_per_s(shots: Sequence[_Shot], slo: str) -> float:
    done = [(shot, shot.seen) for shot in shots if shot.slo == slo and shot.seen is not None]
    return tokens_per_s(
        [shot.prompt_tokens for shot, _ in done],
        [shot.output_tokens for shot, _ in done],
        [shot.at_s + seen.ttft_s for shot, seen in done],
        [shot.at_s + seen.last_s for shot, seen in done],
        LIVE_FROM_S,
        LIVE_LASTS_S,
    )


SCENARIOS = (Scenario("equal", "conversation"), Scenario("fast_slow", "conversation"), Scenario("equal", "code"))
CONTROLLED = {
    "interactive": Slo("interactive", SLO.ttft_s, SLO.tpot_s, 1.0, WhenFull.REJECT),
    "batch": Slo("batch", 600.0, 1.0, 0.1, WhenFull.DELAY),
}
PLAIN = {name: msgspec.structs.replace(slo, weight=1.0, when_full=WhenFull.NEVER) for name, slo in CONTROLLED.items()}
LASTS_S, FROM_S = 60.0, 20.0  # of arrivals, and where what is counted begins
OVER = 2.0  # times the capacity
INTERACTIVE = 0.5  # of the capacity
FLOOD, POLITE = 2.0, 0.3  # of the capacity: the rates of two keys of one class
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


def run_overload_bench(scenarios: Sequence[Scenario] = SCENARIOS) -> Result:
    return merged(*map(simulated, scenarios), asyncio.run(measured(CLUSTER, _live)))


def simulated(scenario: Scenario) -> Result:
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
    aims[f"{name}_polite_attainment"] = at_least(AIM, figures["controlled_polite_attainment"])
    return result({f"{name}_{key}": round(value, 4) for key, value in figures.items()}, aims)


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


def aims_of(name: str, attainment: float, share: float) -> dict[str, Aim]:
    return {
        f"{name}_interactive_attainment": at_least(AIM, attainment),
        f"{name}_batch_share_of_left": at_least(AIM, share),
    }


def _run(scenario: Scenario, streams: Sequence[Stream], policy: str = "adaptive") -> list[Seen]:
    parts = []
    for at, stream in enumerate(streams):
        requests = replace(scenario, seed=scenario.seed + at).workload(stream.rate, max(50, int(stream.rate * LASTS_S)))
        parts.append(of_class(requests, stream.slo, stream.caller))
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
    """Of the finite values; NaN without any."""
    known = values[np.isfinite(values)]
    return float(np.percentile(known, share)) if len(known) else float("nan")
