"""The same requests under several policies, on a running suite and in the simulator.

An experiment is a cluster file, the requests of a seed, and arms: policies in words that both sides understand.
Emulated clusters may be `factor` times as slow as their accelerators, so that this machine can stream all tokens;
arrivals and targets are then as many times as long.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, TypeVar

import yaml

from benchmarks import suite
from benchmarks.scenarios import learned
from benchmarks.suite import BARE, DEMO_MODEL
from services.launcher.cluster_file import Cluster
from services.launcher.suite import Suite
from services.launcher.up import RunningSuite
from shared.domain.job import Slo
from shared.domain.route import PolicySpec
from shared.policy.registry import from_words
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult
from shared.sim.spec import RunSpec, with_words
from shared.sim.workload import Workload
from tools.calibrate.host_watch import HostWatch, TimerWatch
from tools.calibrate.target import Sample, Shot, Target, Traffic
from tools.simulate.deployment import Deployment, load_deployment

WHO = "polyphase bench"
TRIES = 3
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Arm:
    """Policies in words, as `polyphase simulate` takes them, and their name in figures."""

    label: str
    words: str

    @property
    def specs(self) -> dict[str, PolicySpec]:
        """By kind, for a running suite."""
        return {kind: spec for part in self.words.split("+") for kind, spec in from_words(part).items()}

    def under(self, run: RunSpec) -> RunSpec:
        """`run` with these policies, for the simulator."""
        return with_words(run, self.words)


@dataclass(frozen=True, slots=True)
class Means:
    """Means over all requests, seconds."""

    ttft: float
    tpot: float
    jct: float

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> "Means":
        gaps = [gap for sample in samples if (gap := sample.tpot_s) is not None]
        return cls(fmean(s.ttft_s for s in samples), fmean(gaps), fmean(s.jct_s for s in samples))

    @classmethod
    def from_summary(cls, figures: Mapping[str, float]) -> "Means":
        """Of a simulated run's `shared.sim.metrics.summary`."""
        return cls(*(figures[f"{name}_mean_s"] for name in METRICS))

    @classmethod
    def average(cls, several: Sequence["Means"]) -> "Means":
        return cls(*(fmean(getattr(one, name) for one in several) for name in METRICS))


METRICS = tuple(field.name for field in fields(Means))


@dataclass(frozen=True, slots=True)
class Sent:
    """What clients saw of one workload, and what disturbed it.

    late_s: how late timers of the clients were at most. foreign_cores: cores that processes of others used meanwhile.
    """

    samples: Sequence[Sample]
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

    async def send(self, workload: Workload, arm: Arm | None = None) -> Sent:
        """All requests at their times, under the arm's policies, which are then undone. Raises Unavailable."""
        async with self._under(arm), HostWatch(self.target.launcher_pid) as host, TimerWatch() as timers:
            samples = await self.traffic.timed(shots_of(workload))
        await self.suite.wait_idle()
        return Sent(samples, timers.late_s, host.mean_cores)

    async def warm_up(self) -> None:
        """Use connections and code that are not in use yet."""
        await self.traffic.closed((Shot(64, 4),) * 8, 2)
        await self.suite.wait_idle()

    @asynccontextmanager
    async def _under(self, arm: Arm | None) -> AsyncIterator[None]:
        change = arm.specs if arm is not None else {}
        if change:
            await self.suite.set_policies(change, WHO)
        try:
            yield
        finally:
            if change:
                await self.suite.set_policies(dict.fromkeys(change), WHO)


async def measured(
    cluster: Cluster | Mapping[str, Any] | Path,
    work: Callable[[Session], Coroutine[Any, Any, Found]],
    folder: Path | None = None,
    seed: int = 1,
) -> Found:
    """The result of `work` on a suite of that cluster. Raises as `benchmarks.suite.started` does, and Unavailable."""

    async def with_client(running: RunningSuite) -> Found:
        target = Target.local(running.suite)
        return await work(Session(running, target, await Traffic.to(target, seed)))

    return await suite.measured(cluster, with_client, folder)


def shots_of(workload: Workload) -> list[Shot]:
    mix = workload.mix
    classes = [""] * len(workload) if mix is None else [mix.classes[at].name for at in mix.class_of]
    rows = zip(workload.prompt_tokens, workload.output_tokens, workload.arrival_s, classes, strict=True)
    return [Shot(int(prompt), int(output), float(at), slo) for prompt, output, at, slo in rows]


def slower(workload: Workload, factor: float) -> Workload:
    """The same requests `factor` times as far apart, with targets as many times as long."""
    mix = workload.mix
    if mix is not None:
        workload = replace(workload, mix=replace(mix, classes=tuple(each.slower(factor) for each in mix.classes)))
    return workload.with_arrivals(factor * workload.arrival_s)


def emulated_file(folder: Path, name: str, instances: Sequence[Mapping[str, Any]], **sections: Any) -> Path:
    """Write the cluster file of emulated Llama-3-8B instances. sections: replace those that every suite here has."""
    engine = {"engine": "emulated", "emulated_model": "Llama-3-8B", **sections.pop("instance_defaults", {})}
    file = folder / f"{name}.yaml"
    cluster = {**BARE, "name": name, **sections, "instance_defaults": engine, "instances": list(instances)}
    file.write_text(yaml.safe_dump(cluster))
    return file


def model_with_context(folder: Path, tokens: int) -> Path:
    """The demo model in `folder` with a configuration of so much context, which emulated engines never compute."""
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": tokens}))
    return folder


def twin(file: Path, seed: int = 1) -> Deployment:
    """The cluster file for the simulator; instances publish rates that they have learned from steps without noise.

    The costs that policies derive from learned rates are not quite those of the catalogue.
    """
    deployment, rng = load_deployment(file), Random(seed)
    known = tuple(learned(spec, rng, noise=0.0, start_off=1.0) for spec in deployment.instances)
    return replace(deployment, instances=known)


@dataclass(frozen=True, slots=True)
class Pair:
    """One run on the suite and the same in the simulator."""

    arm: Arm
    seed: int
    live: Sent
    simulated: SimResult


@dataclass(frozen=True, slots=True)
class Experiment:
    """Arms on one cluster file, each with the requests of every seed.

    workload: the requests of a seed at the accelerators' speed. slo: at that speed. max_late_s: a live run in which
    timers of the clients were later is repeated, at most `TRIES` times; the quietest run counts.
    """

    name: str
    file: Path
    workload: Callable[[int], Workload]
    arms: tuple[Arm, ...]
    slo: Slo
    factor: float = 1.0
    seeds: Sequence[int] = (1,)
    max_late_s: float = inf

    @property
    def slow_slo(self) -> Slo:
        return self.slo.slower(self.factor)

    def slow_workload(self, seed: int) -> Workload:
        return slower(self.workload(seed), self.factor)

    def simulated(self, deployment: Deployment, arm: Arm, seed: int) -> SimResult:
        run = arm.under(replace(deployment.run, seed=seed))
        return simulate(self.slow_workload(seed), deployment.instances, run)

    async def pairs(self, on: Session) -> AsyncIterator[Pair]:
        """Every arm with every seed, live and simulated."""
        deployment = twin(self.file)
        for arm in self.arms:
            for seed in self.seeds:
                tries: list[Sent] = []
                while len(tries) < TRIES and (not tries or tries[-1].late_s > self.max_late_s):
                    tries.append(await on.send(self.slow_workload(seed), arm))
                live = min(tries, key=lambda sent: sent.late_s)
                yield Pair(arm, seed, live, await asyncio.to_thread(self.simulated, deployment, arm, seed))
