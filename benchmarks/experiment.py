"""The same requests under several arms, simulated or on a running suite of this machine, and their figures.

A live run gives a `SimResult` as a simulated one does, with what the clients saw, so that both have the same figures.
Emulated clusters may be `factor` times as slow as their accelerators, so that this machine can stream all tokens;
arrivals and targets are then as many times as long, and figures are divided by the factor.
"""

import asyncio
import gc
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from math import inf, isfinite, nan
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple, TypeVar

import httpx
import numpy as np
from numpy.typing import NDArray

from benchmarks import suite
from benchmarks.results import Aim, Result, aim, in_turns, result
from benchmarks.scenarios import with_learned_rates
from services.launcher.cluster_file import Cluster
from services.launcher.suite import Suite
from services.launcher.up import RunningSuite
from shared.domain.instance import InstanceInfo
from shared.domain.job import Slo
from shared.domain.route import PolicySpec
from shared.errors import Unavailable
from shared.policy.registry import from_words
from shared.sim.cluster import simulate
from shared.sim.metrics import summary
from shared.sim.outcomes import Gaps, Outcomes, SimResult, Status
from shared.sim.spec import with_words
from shared.sim.workload import Workload
from tools.calibrate.host_watch import HostWatch, TimerWatch
from tools.calibrate.target import Shot, Target, Traffic
from tools.client import Refused, StreamFailed, StreamResult, completion_body, stream_completion
from tools.simulate.deployment import Deployment, load_deployment

WHO = "polyphase bench"
TRIES = 3
CLEAR_DIFFERENCE = 0.15  # live differences between arms of less than this share have no winner
AIM_PERCENT = 15.0  # by which simulated means may be off
Value = TypeVar("Value")
Answer = StreamResult | Exception
Body = Callable[[int, Shot], dict[str, Any]]  # of the request with that number


# Running suites.


@dataclass(frozen=True, slots=True)
class Arm:
    """Policies in words, as `polyphase simulate` takes them, and their name in figures."""

    label: str
    words: str

    @property
    def specs(self) -> dict[str, PolicySpec | None]:
        """By kind, for a running suite."""
        return {kind: spec for part in self.words.split("+") for kind, spec in from_words(part).items()}


@dataclass(frozen=True, slots=True)
class LiveRun:
    """One workload on a running suite. failures: errors of requests. began_s: Unix time of the start.

    late_s: the longest delay of a timer of the clients. foreign_cores: cores that foreign processes used meanwhile.
    """

    result: SimResult
    failures: Sequence[str]
    began_s: float
    late_s: float
    foreign_cores: float


@dataclass(frozen=True, slots=True)
class Session:
    """A running suite with a client."""

    running: RunningSuite
    target: Target
    traffic: Traffic

    @property
    def suite(self) -> Suite:
        return self.running.suite

    async def send(
        self,
        workload: Workload,
        arm: Arm | None = None,
        *,
        slo: Slo | None = None,
        body: Body | None = None,
        ends_s: float = inf,
        may_fail: bool = False,
    ) -> LiveRun:
        """Send all requests at their times under the arm's policies, which are then undone.

        slo: targets of requests without a class. ends_s: after which clients give up. Raises Unavailable when a request
        fails, unless requests `may_fail`.
        """
        shots = shots_of(workload)
        async with self._under(arm), HostWatch(self.target.launcher_pid) as host, TimerWatch() as timers:
            began_s = time.time()
            answers = await self._stream(shots, body or random_prompt, ends_s)
        failures = [repr(answer) for answer in answers if isinstance(answer, Exception)]
        if failures and not may_fail:
            raise Unavailable(f"{len(failures)} of {len(shots)} requests failed, the first with: {failures[0]}")
        await self.suite.wait_idle(120.0)
        seen = observed(workload, answers, slo or Slo())
        return LiveRun(seen, failures, began_s, timers.late_s, host.mean_cores)

    async def warm_up(self) -> None:
        """Open connections and load code."""
        await self.traffic.closed((Shot(64, 4),) * 8, 2)
        await self.suite.wait_idle()

    async def use(self, specs: Mapping[str, PolicySpec | None]) -> None:
        """Change policies once no request is left."""
        await self.suite.wait_idle()
        await self.suite.set_policies(specs, WHO)

    async def instances(self) -> list[InstanceInfo]:
        """As the monitor knows them, with the rates that they have learned."""
        return [entry.info for entry in (await self.suite.instances()).values()]

    async def metrics(self, *names: str) -> dict[str, list[float]]:
        """By instance the sum of each metric's series. Raises Unavailable where one is missing."""
        async with httpx.AsyncClient(timeout=10, trust_env=False) as http:
            pages = {info.instance_id: (await http.get(f"{info.http}/metrics")).text for info in await self.instances()}
        return {instance: [suite.metric(page, name) for name in names] for instance, page in pages.items()}

    async def _stream(self, shots: Sequence[Shot], body: Body, ends_s: float) -> list[Answer]:
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def stream(number: int, shot: Shot) -> Answer:
            await asyncio.sleep(began + shot.at_s - loop.time())
            content = body(number, shot) | {"model": self.target.model}
            try:
                async with asyncio.timeout_at(began + ends_s):
                    return await stream_completion(*self.target.api_address, content, self.target.api_key, shot.slo)
            except (StreamFailed, OSError) as error:  # a TimeoutError is an OSError
                return error

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stream(number, shot)) for number, shot in enumerate(shots)]
        return [task.result() for task in tasks]

    @asynccontextmanager
    async def _under(self, arm: Arm | None) -> AsyncIterator[None]:
        if arm is None:
            yield
            return
        await self.suite.set_policies(arm.specs, WHO)
        try:
            yield
        finally:
            await self.suite.set_policies(dict.fromkeys(arm.specs), WHO)


def random_prompt(number: int, shot: Shot) -> dict[str, Any]:
    prompt = Random(number).choices(range(300, 1200), k=shot.prompt_tokens)  # ids that the demo model knows
    return completion_body(prompt, shot.output_tokens, cache_salt=secrets.token_hex(8))


async def measured(
    cluster: Cluster | Mapping[str, Any] | Path,
    work: Callable[[Session], Coroutine[Any, Any, Value]],
    folder: Path | None = None,
    seed: int = 1,
) -> Value:
    """The result of `work` on a suite of that cluster. Raises as `benchmarks.suite.started` does, and Unavailable."""

    async def with_client(running: RunningSuite) -> Value:
        target = Target.local(running.suite)
        return await work(Session(running, target, await Traffic.to(target, seed)))

    return await suite.measured(cluster, with_client, folder)


def shots_of(workload: Workload) -> list[Shot]:
    mix = workload.mix
    classes = [""] * len(workload) if mix is None else [mix.classes[at].name for at in mix.class_of]
    rows = zip(workload.prompt_tokens, workload.output_tokens, workload.arrival_s, classes, strict=True)
    return [Shot(int(prompt), int(output), float(at), slo) for prompt, output, at, slo in rows]


def observed(workload: Workload, answers: Sequence[Answer], slo: Slo) -> SimResult:
    """A live run in the form of a simulated one. slo: of requests without a class."""
    out, gaps, mix = Outcomes.empty(workload), Gaps(), workload.mix
    for at, seen in enumerate(answers):
        if isinstance(seen, Exception):
            out.status[at] = Status.REFUSED if isinstance(seen, Refused) else Status.UNFINISHED
            continue
        itl_s = (slo if mix is None else mix.classes[mix.class_of[at]]).itl_s
        out.status[at] = Status.COMPLETED
        out.first_token_s[at] = out.arrival_s[at] + seen.ttft_s
        out.last_token_s[at] = out.arrival_s[at] + seen.last_s
        out.longest_gap_s[at] = max(seen.gaps_s, default=nan)
        out.gaps_over[at] = sum(gap_s > itl_s for gap_s in seen.gaps_s)
        for gap_s in seen.gaps_s:
            gaps.add(gap_s)
    ends_s = out.last_token_s[out.completed]
    duration_s = float(ends_s.max() - out.arrival_s[0]) if len(ends_s) else 0.0
    return SimResult(workload.name, "live", out, (), gaps, duration_s, 0)


async def quietest(measure: Callable[[], Awaitable[Value]], noise: Callable[[Value], float], max_noise: float) -> Value:
    """A measurement that was not disturbed by more than that; after TRIES, the least disturbed one."""
    tries: list[Value] = []
    while len(tries) < TRIES and (not tries or noise(tries[-1]) > max_noise):
        tries.append(await measure())
    return min(tries, key=noise)


# Experiments.


def twin(file: Path, seed: int = 1) -> Deployment:
    """The cluster file for the simulator. Instances publish rates learned from steps without noise, as live ones do.

    The costs that policies derive from learned rates are not quite those of the catalogue.
    """
    deployment = load_deployment(file)
    return replace(deployment, instances=with_learned_rates(deployment.instances, seed, noise=0.0, start_off=1.0))


def slower(workload: Workload, factor: float) -> Workload:
    """The same requests `factor` times as far apart, with targets as many times as long."""
    mix = workload.mix
    if mix is not None:
        workload = replace(workload, mix=replace(mix, classes=tuple(each.slower(factor) for each in mix.classes)))
    return workload.with_arrivals(factor * workload.arrival_s)


def part_of(seen: SimResult, requests: NDArray[np.bool_]) -> SimResult:
    """The outcomes of these requests alone. The figures of instances and of gaps remain those of the whole run."""
    columns = {column.name: getattr(seen.outcomes, column.name)[requests] for column in fields(Outcomes)}
    return replace(seen, outcomes=Outcomes(**columns))


class Pair(NamedTuple):
    """One arm with the same requests, live and simulated."""

    live: LiveRun
    simulated: SimResult

    @property
    def sides(self) -> dict[str, SimResult]:
        return {"live": self.live.result, "simulated": self.simulated}


@dataclass(frozen=True, slots=True)
class Experiment:
    """Arms on one cluster file, each with the requests of every seed.

    workload: the requests of a seed at the accelerators' speed. slo: at that speed. max_late_s: a live run in which
    timers of the clients were later is repeated.
    """

    name: str
    file: Path
    workload: Callable[[int], Workload]
    arms: tuple[Arm, ...]
    slo: Slo
    factor: float = 1.0
    seeds: Sequence[int] = (1,)
    max_late_s: float = inf

    def simulated(self, deployment: Deployment, arm: Arm, seed: int) -> SimResult:
        run = with_words(replace(deployment.run, seed=seed), arm.words)
        return simulate(slower(self.workload(seed), self.factor), deployment.instances, run)

    def run(self) -> list[dict[Arm, Pair]]:
        """By seed, every arm on one suite and in the simulator. Raises as `measured` does."""
        return asyncio.run(measured(self.file, self._run))

    async def _run(self, on: Session) -> list[dict[Arm, Pair]]:
        gc.collect()
        gc.freeze()  # a walk of all that is loaded would stop the clients for as long as a pause lasts
        deployment, slo = twin(self.file), self.slo.slower(self.factor)

        async def compare(number: int, arm: Arm) -> Pair:
            workload = slower(self.workload(self.seeds[number]), self.factor)
            live = await quietest(partial(on.send, workload, arm, slo=slo), lambda run: run.late_s, self.max_late_s)
            return Pair(live, await asyncio.to_thread(self.simulated, deployment, arm, self.seeds[number]))

        return await in_turns(self.arms, len(self.seeds), compare)


# Figures.

Row = dict[str, Any]  # by column; seconds, and shares in 0..1; None where no request has the figure
COLUMNS = ("ttft_p50_s", "ttft_p90_s", "jct_p50_s", "jct_p90_s", "itl_p99_s", "longest_gap_p90_s", "longest_gap_max_s")


def row_of(seen: SimResult, slo: Slo, factor: float = 1.0) -> Row:
    """Attainment and latencies of a run that was `factor` times as slow. slo: at the accelerators' speed."""
    figures = summary(seen, slo.slower(factor))
    known = {name: round(value, 4) if isfinite(value := figures[name] / factor) else None for name in COLUMNS}
    return {"attainment": round(figures["attainment"], 4), **known}


def median_of(rows: Sequence[Row]) -> Row:
    """By column, of the rows that have the figure."""
    numbers = {name: [row[name] for row in rows if row[name] is not None] for name in rows[0]}
    return {name: round(median(values), 4) if values else None for name, values in numbers.items()}


def side_by_side(
    rounds: Sequence[Mapping[Arm, Pair]], row: Callable[[SimResult, int], Row]
) -> dict[str, dict[str, Row]]:
    """By arm, the medians over the rounds, live and simulated. row: of a run, and the number of its round."""
    return {
        arm.label: {
            side: median_of([row(by_arm[arm].sides[side], number) for number, by_arm in enumerate(rounds)])
            for side in pair.sides
        }
        for arm, pair in rounds[0].items()
    }


def table_of(scenario: str, arms: Mapping[str, Mapping[str, Row]]) -> list[Row]:
    """The rows of `side_by_side` as those of a table."""
    return [
        {"scenario": scenario, "policy": arm, "run": side, **row}
        for arm, sides in arms.items()
        for side, row in sides.items()
    ]


class Means(NamedTuple):
    """Means over all requests, seconds."""

    ttft: float
    tpot: float
    jct: float

    @classmethod
    def from_result(cls, seen: SimResult, factor: float = 1.0) -> "Means":
        """Of a run that was `factor` times as slow."""
        figures = summary(seen, Slo())
        return cls(*(figures[f"{name}_mean_s"] / factor for name in cls._fields))


def judged(name: str, rounds: Sequence[Mapping[Arm, Sequence[Means]]]) -> Result:
    """Medians over rounds of live and simulated means and of the simulator's errors, and which arm is better.

    rounds: by arm the live and the simulated means. The first arm is compared with the others. Where live means clearly
    differ, an aim is that the same arm is the better one in the simulator.
    """
    figures: dict[str, float] = {}
    aims: dict[str, Aim] = {}
    winners: dict[str, Aim] = {}
    first = next(iter(rounds[0]))
    for arm, (at, metric) in product(rounds[0], enumerate(Means._fields)):
        pairs = [(live[at], simulated[at]) for live, simulated in (one[arm] for one in rounds)]
        off = median(100.0 * (predicted / seen - 1.0) for seen, predicted in pairs)
        key = f"{name}_{arm.label}_{metric}"
        figures[f"{key}_live_ms"] = 1e3 * median(seen for seen, _ in pairs)
        figures[f"{key}_simulated_ms"] = 1e3 * median(predicted for _, predicted in pairs)
        figures[f"{key}_off_percent"] = off
        aims[f"{key}_off_percent"] = aim(f"within {AIM_PERCENT:g}", round(off, 2), abs(off) <= AIM_PERCENT)
        if arm is first:
            continue
        live, simulated = (median(one[arm][side][at] / one[first][side][at] for one in rounds) for side in (0, 1))
        key = f"{name}_{metric}_{arm.label}_over_{first.label}"
        figures |= {f"{key}_live": live, f"{key}_simulated": simulated}
        if abs(live - 1.0) >= CLEAR_DIFFERENCE:
            want, got = (first.label if ratio > 1.0 else arm.label for ratio in (live, simulated))
            winners[f"{name}_{first.label}_or_{arm.label}_by_{metric}"] = aim(want, got, want == got)
    differ = aim("in a mean at least", f"in {len(winners)}", bool(winners))
    return result(figures, aims | winners | {f"{name}_the_policies_differ": differ})
