"""`polyphase bench truth`: predicted TTFT and TPOT of each placement beside what came, while the load rises fourfold
and falls again: on emulated instances and in a simulation of the same cluster file, and on two unlike real engines.

The same requests are sent at the same times in each round. What their times differ by from round to round is the spread
that no prediction can know. The simulation shows the errors without the noise of this machine.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks import mixed
from benchmarks.cluster_files import ClusterDict, emulated, write_cluster
from benchmarks.measuring import port_of
from benchmarks.quotas import QuotaSession, measured_under_quotas
from benchmarks.results import Result, at_most, merged, result, run_parts
from benchmarks.suite import measured
from services.launcher.suite import until
from services.launcher.up import RunningSuite
from shared.policy.truth import FEWEST_TOKENS
from shared.sim.cluster import simulate
from shared.sim.workload import Workload
from shared.wire.api.scheduler import StoredRequest
from shared.wire.clients.scheduler import SchedulerAdmin
from tools.client import COMPLETIONS, completion_body, stream_completion
from tools.simulate.deployment import load_deployment

ROUNDS = 5
SEED, PAGE, STORED_S = 3, 1_000, 60.0
PAUSE_S = 60.0  # between two rounds of a simulation: the answers of the last one have ended
JITTER_S = 0.03  # by which a simulated request comes later in one round than in another, as live: about a step
AIM_MEDIAN, AIM_SPREADS, AIM_P90 = 0.05, 1.2, 0.2
NOTE = (
    "errors are |predicted - observed| over observed, of whole TTFT and of TPOT (answers of at least "
    f"{FEWEST_TOKENS} tokens), without the first round, in which the cluster learns; spread: of a request, the median "
    "deviation from its median over the rounds, over that median; of all requests the median. Aim of the median: the "
    f"larger of {AIM_MEDIAN:.0%} and {AIM_SPREADS:g} spreads."
)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of each round. phases: requests a second, and seconds. prompt, answer: of log-normal lengths."""

    phases: tuple[tuple[float, float], ...]
    prompt: tuple[float, float]
    answer: tuple[float, float]
    most_prompt: int
    most_answer: int


EMULATED = Load(((2.0, 20.0), (8.0, 20.0), (2.0, 12.0)), (6.3, 0.7), (3.9, 0.7), 1_500, 400)
REAL = Load(((0.3, 40.0), (1.2, 30.0), (0.3, 40.0)), (4.8, 0.6), (3.0, 0.6), 800, 60)


def run_truth_bench(parts: Sequence[str] = (), rounds: int = ROUNDS, *, simulated: bool = False) -> Result:
    """parts: of `pair`, `fleet` and `mixed`; by default the two emulated ones. simulated: nothing runs live.

    Raises Unavailable for `mixed` where this machine allows no CPU quotas.
    """
    clusters = {"pair": _pair(), "fleet": _fleet()}
    runs = {name: partial(_run, name, cluster, rounds, simulated) for name, cluster in clusters.items()}
    return run_parts({**runs, "mixed": partial(_run_mixed, rounds)}, parts or tuple(clusters))


def _pair() -> ClusterDict:
    instances = [
        {"id": f"{role}-{name}", "role": role, "accelerator": accelerator, "kv_cache_bytes": gib << 30}
        for role in ("prefill", "decode")
        for name, accelerator, gib in (("a100", "A100-SXM-80", 56), ("a10", "A10", 6))
    ]
    return _cluster("truth pair", instances)


def _fleet() -> ClusterDict:
    kinds = (("A100-SXM-80", 56), ("A10", 6), ("L40S", 28), ("H100-SXM", 56))
    instances = [
        {"id": f"i{n:02}", "role": ("prefill", "decode")[n % 2], "accelerator": name, "kv_cache_bytes": gib << 30}
        for n in range(32)
        for name, gib in (kinds[n // 2 % len(kinds)],)
    ]
    return _cluster("truth fleet", instances)


def _cluster(name: str, instances: Sequence[Mapping[str, object]]) -> ClusterDict:
    defaults = {"emulated_link_gbps": 10.0, "chunk_size": 512, "max_seqs": 64}
    return emulated(name, instances, defaults, gateway={"max_queued_jobs": 4096})


def _run(name: str, cluster: ClusterDict, rounds: int, simulated: bool) -> Result:
    planned = shots(EMULATED)
    found = judged(f"{name}_simulated", EMULATED, planned, simulated_times(cluster, planned, rounds))
    if simulated:
        return found
    rows = asyncio.run(measured(cluster, partial(_measure, planned=planned, rounds=rounds)))
    return merged(found, judged(name, EMULATED, planned, rows))


def _run_mixed(rounds: int) -> Result:
    planned = shots(REAL)

    async def work(on: QuotaSession) -> Measured:
        await on.warm_up()
        found = await _measure(on.running, planned, rounds)
        on.check()
        return found

    rows = asyncio.run(measured_under_quotas(mixed.SHAPE, mixed.CORES, mixed.cluster_of, work, SEED))
    return judged("mixed", REAL, planned, rows)


@dataclass(frozen=True, slots=True)
class Shot:
    """One request of a round; at_s: after its start."""

    number: int
    phase: int
    at_s: float
    prompt: list[int]
    answer: int


def shots(load: Load) -> list[Shot]:
    """The requests of each round."""
    rng, found, at_s, began_s = Random(SEED), list[Shot](), 0.0, 0.0
    for phase, (rate, seconds) in enumerate(load.phases):
        while at_s < began_s + seconds:
            prompt = max(16, min(load.most_prompt, int(rng.lognormvariate(*load.prompt))))
            answer = max(2, min(load.most_answer, int(rng.lognormvariate(*load.answer))))
            tokens = [rng.randrange(300, 900) for _ in range(prompt)]
            found.append(Shot(len(found), phase, at_s, tokens, answer))
            at_s += rng.expovariate(rate)
        began_s += seconds
        at_s = max(at_s, began_s)
    return found


class Times(NamedTuple):
    """Of a request. None: no prediction was made, or the answer is too short for a time per token."""

    predicted_ttft_s: float | None
    ttft_s: float
    predicted_tpot_s: float | None
    tpot_s: float | None


Measured = dict[tuple[int, int], Times]  # by round and number of the request


def simulated_times(cluster: ClusterDict, planned: Sequence[Shot], rounds: int) -> Measured:
    """The same rounds, one after another, simulated. As live, a request does not come at the same moment of a step in
    each round.
    """
    with tempfile.TemporaryDirectory(prefix="polyphase-truth-") as folder:
        deployment = load_deployment(write_cluster(Path(folder), cluster))
    lasts_s = planned[-1].at_s + PAUSE_S
    rng = Random(SEED)
    sent = sorted(
        (number * lasts_s + shot.at_s + rng.uniform(0.0, JITTER_S), number, shot.number)
        for number in range(rounds)
        for shot in planned
    )
    prompts, answers = zip(
        *((len(planned[number].prompt), planned[number].answer) for _, _, number in sent), strict=True
    )
    workload = Workload("truth", np.array([at_s for at_s, _, _ in sent]), np.array(prompts), np.array(answers))
    rows = simulate(workload, deployment.instances, deployment.run).outcomes
    found: Measured = {}
    for row in np.flatnonzero(rows.completed).tolist():
        _, of_round, number = sent[row]
        judged_tpot = int(rows.output_tokens[row]) >= FEWEST_TOKENS
        predicted_ttft_s, predicted_tpot_s = float(rows.predicted_ttft_s[row]), float(rows.predicted_tpot_s[row])
        found[of_round, number] = Times(
            None if isnan(predicted_ttft_s) else predicted_ttft_s,
            float(rows.ttft_s[row]),
            None if isnan(predicted_tpot_s) else predicted_tpot_s,
            float(rows.tpot_s[row]) if judged_tpot else None,
        )
    return found


async def _measure(running: RunningSuite, planned: Sequence[Shot], rounds: int) -> Measured:
    port, since_s = port_of(running), time.time()
    for number in range(rounds):
        began_mono = time.monotonic()
        tasks = []
        for shot in planned:
            await asyncio.sleep(max(0.0, began_mono + shot.at_s - time.monotonic()))
            body = completion_body(shot.prompt, shot.answer, request_id=f"truth.{number}.{shot.number}.")
            tasks.append(asyncio.create_task(stream_completion("127.0.0.1", port, body, path=COMPLETIONS)))
        await asyncio.gather(*tasks)
    found: Measured = {}

    async def stored() -> bool:
        for row in await _rows(running, since_s):
            if (key := _key_of(row.job_id)) is not None and row.ttft_s is not None:
                found[key] = times_of(row)
        return len(found) == rounds * len(planned)

    await until(stored, STORED_S, "rows of all requests")
    return found


def times_of(row: StoredRequest) -> Times:
    assert row.ttft_s is not None
    tpot_s = row.tpot_s if row.output_tokens >= FEWEST_TOKENS else None
    return Times(row.predicted_ttft_s, row.ttft_s, row.predicted_tpot_s, tpot_s)


async def _rows(running: RunningSuite, since_s: float) -> list[StoredRequest]:
    found: list[StoredRequest] = []
    async with SchedulerAdmin(running.suite.state.scheduler_urls[0]) as scheduler:
        while True:
            page = await scheduler.search(since=since_s, phase="completed", limit=PAGE, offset=len(found))
            found += page.rows
            if not page.more:
                return found


def _key_of(job_id: str) -> tuple[int, int] | None:
    _, name, rest = job_id.partition("truth.")
    words = rest.split(".")
    return (int(words[0]), int(words[1])) if name and len(words) > 2 else None


def judged(name: str, load: Load, planned: Sequence[Shot], times: Measured) -> Result:
    """Figures and aims of one cluster."""
    pairs = {
        "ttft": {key: (each.predicted_ttft_s, each.ttft_s) for key, each in times.items()},
        "tpot": {key: (each.predicted_tpot_s, each.tpot_s) for key, each in times.items() if each.tpot_s is not None},
    }
    phase_of = {shot.number: shot.phase for shot in planned}
    figures: dict[str, float] = {f"{name}_requests": len(times)}
    aims = {}
    for what, by_key in pairs.items():
        known = {key: (said, seen) for key, (said, seen) in by_key.items() if said is not None and seen}
        errors = {key: said / seen - 1.0 for key, (said, seen) in known.items() if key[0] > 0}
        sizes = sorted(map(abs, errors.values()))
        if not sizes:
            aims[f"{name}_{what}_median"] = at_most(AIM_MEDIAN, None)
            continue
        spread = _spread((key[1], seen) for key, (_, seen) in known.items() if key[0] > 0)
        p90 = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
        figures |= {
            f"{name}_{what}_bias": round(median(errors.values()), 3),
            f"{name}_{what}_median": round(median(sizes), 3),
            f"{name}_{what}_p90": round(p90, 3),
            f"{name}_{what}_spread": round(spread, 3),
        }
        for phase in range(len(load.phases)):
            part = [abs(error) for key, error in errors.items() if phase_of[key[1]] == phase]
            figures[f"{name}_{what}_median_phase_{phase + 1}"] = round(median(part), 3) if part else 0.0
        aims[f"{name}_{what}_median"] = at_most(max(AIM_MEDIAN, AIM_SPREADS * spread), median(sizes))
        aims[f"{name}_{what}_p90"] = at_most(AIM_P90, p90)
    return result(figures, aims, [NOTE])


def _spread(observed: Iterable[tuple[int, float]]) -> float:
    """See `NOTE`; of (request, time)."""
    by_request: dict[int, list[float]] = {}
    for number, seconds in observed:
        by_request.setdefault(number, []).append(seconds)
    found = []
    for times in by_request.values():
        middle = median(times)
        found.append(median(abs(each - middle) for each in times) / middle)
    return median(found) if found else 0.0
