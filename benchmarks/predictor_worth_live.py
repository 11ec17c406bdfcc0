"""Benefit of length predictions on live services: gateway, scheduler and workers with their default settings, on
emulated instances that are short of memory, with the arms of `predictor_worth_sim` as predictor."""

import asyncio
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import yaml

from benchmarks.comparison import goodput
from benchmarks.experiment import twin
from benchmarks.predictor_worth_sim import ARMS, DEFAULT, NONE, POLICIES, SLO, Arms, Trained, arms, requests_of
from benchmarks.results import rotated
from benchmarks.scenarios import TARGET
from benchmarks.suite import BARE, metric, started
from services.launcher import cluster_keys, ports
from services.launcher.cluster_file import load_cluster
from services.launcher.up import RunningSuite
from services.worker.engines.emulated_scheduler import token_at
from shared.domain.job import LengthPrediction
from shared.domain.policies import KINDS
from shared.domain.route import PolicySpec
from shared.errors import Busy
from shared.policy.registry import from_words
from shared.runtime.keys import read_pair
from shared.sim.cluster import simulate
from shared.sim.metrics import attainment, summary
from shared.sim.outcomes import SimResult
from shared.sim.prediction import Prediction
from shared.sim.spec import with_words
from shared.sim.workload import Lengths, Workload
from shared.wire.clients.monitor import MonitorClient
from shared.wire.messages import PREDICT, PredictRequest
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Curve, Sockets
from tools.calibrate.host_watch import HostWatch
from tools.calibrate.target import Target
from tools.client import StreamFailed, StreamResult, completion_body, stream_completion
from tools.simulate.workloads import WorkloadOptions, at_rate

# The first tokens of a prompt are its number, from which the stand-in predictor knows the answer's length. Clients
# allow MAX_TOKENS; a stop token ends each answer earlier.

SHORTER, SLOWER = 5, 4.0  # lengths and speeds, so that two cores carry all tokens, and a run holds many answers
MAX_TOKENS = 512
LEAST_PROMPT = 8
_FIRST, _DIGIT = 300, 900  # of the tokens that number a prompt
_MIB = 1 << 20
# As slow as the instances.
LIVE_SLO = SLO.slower(SLOWER)
CLUSTER: dict[str, Any] = {
    **BARE,
    "name": "bench predictor (emulated)",
    "max_model_len": 1024,
    "instance_defaults": {
        "engine": "emulated",
        "emulated_model": "Llama-3-8B",
        "emulated_slowdown": SLOWER,
        "emulated_link_gbps": 100.0,
        "accelerator": "A100-SXM-80",
        "chunk_size": 512,
        "max_seqs": 64,
    },
    "instances": [
        {"id": "prefill", "role": "prefill", "kv_cache_bytes": 4096 * _MIB},
        {"id": "decode", "count": 3, "role": "decode", "kv_cache_bytes": 224 * _MIB},
    ],
}


def cluster_into(folder: Path) -> Path:
    """The cluster file, to be started and to be simulated."""
    slo = {"default": LIVE_SLO.targets}
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump({**CLUSTER, "gateway": {"slo": slo}}))
    return file


def pointing_to(address: str) -> dict[str, str]:
    """The environment of a gateway that uses the predictor at this address."""
    return {"POLYPHASE_GATEWAY_PREDICTORS": f'["{address}"]'}


def short_requests(count: int, seed: int, data: Path | None) -> Workload:
    """ShareGPT's lengths, a fifth of them."""
    whole = requests_of("sharegpt", count, seed, data)
    prompts = np.maximum(LEAST_PROMPT, whole.prompt_tokens // SHORTER)
    return Workload(whole.name, whole.arrival_s, prompts, np.maximum(1, whole.output_tokens // SHORTER))


class StandIn:
    """Predicts what the predictor of `arm` would; without one it predicts nothing."""

    def __init__(self, of_arm: Arms, output_tokens: Lengths, seed: int) -> None:
        self.arm = NONE
        self._of_arm = of_arm
        self._said = {arm: one.predict(output_tokens, seed) for arm, one in of_arm.items() if one is not None}

    def answer(self, prompt_token_ids: Sequence[int]) -> LengthPrediction:
        """Raises Busy, as an overloaded predictor does, without a prediction."""
        predictor, number = self._of_arm[self.arm], number_of(prompt_token_ids)
        if predictor is None or not 0 <= number < len(self._said[self.arm]):
            raise Busy("no prediction")
        return predictor.as_prediction(int(self._said[self.arm][number]))

    @asynccontextmanager
    async def serving(self, address: str, curve: Curve | None = None) -> AsyncIterator[None]:
        """Answer gateways there that have these keys."""

        async def predict(request: PredictRequest, _: ServerCall) -> LengthPrediction:
            return self.answer(request.prompt_token_ids)

        sockets = Sockets(curve)
        try:
            async with RpcServer(sockets, address, {PREDICT: predict}):
                yield
        finally:
            sockets.close()


def prompt_of(number: int, tokens: int) -> list[int]:
    """A prompt whose first tokens are its number."""
    rest = [_FIRST + (number * 31 + at * 7) % _DIGIT for at in range(tokens - 2)]
    return [_FIRST + number // _DIGIT, _FIRST + number % _DIGIT, *rest]


def number_of(prompt_token_ids: Sequence[int]) -> int:
    """The number in a prompt; -1 for a prompt without one."""
    if len(prompt_token_ids) < LEAST_PROMPT:
        return -1
    high, low = (token - _FIRST for token in prompt_token_ids[:2])
    return high * _DIGIT + low if 0 <= low < _DIGIT and high >= 0 else -1


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it; None where it failed."""

    output_tokens: int
    seen: StreamResult | None

    @property
    def met(self) -> bool:
        seen, slo = self.seen, LIVE_SLO
        return (
            seen is not None
            and seen.ttft_s <= slo.ttft_s
            and seen.last_s - seen.ttft_s <= slo.tpot_s * (self.output_tokens - 1)
            and seen.gaps_met(slo.itl_s)
        )


async def send(target: Target, workload: Workload) -> list[Answer]:
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def one(number: int) -> Answer:
        await asyncio.sleep(began + float(workload.arrival_s[number]) - loop.time())
        output = int(workload.output_tokens[number])
        body = _body(number, int(workload.prompt_tokens[number]), output)
        try:
            return Answer(output, await stream_completion(*target.api_address, body, target.api_key))
        except (StreamFailed, OSError):
            return Answer(output, None)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(number)) for number in range(len(workload))]
    return [task.result() for task in tasks]


def _body(number: int, prompt: int, output: int) -> dict[str, Any]:
    """The answer's last token, which stops it, occurs nowhere before: answers are too short for a repetition."""
    stop = [token_at(prompt + output - 1)]
    return completion_body(prompt_of(number, prompt), MAX_TOKENS, stop_token_ids=stop, cache_salt=secrets.token_hex(8))


async def preemptions(target: Target) -> float:
    """The total so far of all instances."""
    async with MonitorClient(target.monitor_url) as monitor:
        urls = [entry["info"]["http"] for entry in await monitor.instances()]
    async with httpx.AsyncClient(timeout=10, trust_env=False) as http:
        pages = [(await http.get(f"{url}/metrics")).text for url in urls]
    return sum(metric(page, "vllm:num_preemptions_total") for page in pages)


UNDER = (DEFAULT, "tetri_mean")
LASTS_S, WARM_S = 60.0, 10.0  # of arrivals; before the first run, so that rates are learned
FROM_PER_S, STEP, DRAWN = 12.0, 1.03, 2000
DRAINS_S = 120.0
SEED = 11
WHO = "polyphase bench predictor"


@dataclass(frozen=True, slots=True)
class Run:
    """One arm under one policy. preemptions: per thousand requests; simulated_jct_s: the mean of the same in virtual

    time; foreign_cores: what processes that are not ours used meanwhile.
    """

    attainment: float
    within_slo_per_s: float
    jct_mean_s: float
    jct_p99_s: float
    preemptions: float
    failed: int
    simulated_jct_s: float
    foreign_cores: float


Runs = dict[tuple[str, str], list[Run]]  # policy, arm → rounds


def measured(
    known: Trained, data: Path | None, rounds: int, lasts_s: float, under: Sequence[str] = UNDER
) -> tuple[dict[str, float], list[str]]:
    drawn = short_requests(DRAWN, SEED, data)
    known_short = replace(known.prediction, width_tokens=max(1, known.prediction.width_tokens // SHORTER))
    of_arm = arms(known_short, drawn.output_tokens)
    with tempfile.TemporaryDirectory(prefix="polyphase-worth-") as name:
        file = cluster_into(Path(name))
        rate = goodput(lambda rate: _attained(file, drawn, rate), FROM_PER_S, STEP)
        workload = timed(drawn, rate, lasts_s)
        plan = _Plan(file, workload, of_arm, rounds, tuple(under))
        found = asyncio.run(_served(plan, Path(name) / "state"))
    note = (
        f"worth, live: {len(workload)} requests a run, {rounds} rounds, medians over them; lengths a {SHORTER}th of "
        f"ShareGPT's, instances {SLOWER:g} times as slow; one suite, arms in turn"
    )
    return {"live_rate_per_s": round(rate, 3), **figures_of(found)}, [note]


@dataclass(frozen=True, slots=True)
class _Plan:
    file: Path
    workload: Workload
    of_arm: Arms
    rounds: int
    under: tuple[str, ...]


def _attained(file: Path, drawn: Workload, rate: float) -> bool:
    result = simulated(file, timed(drawn, rate, LASTS_S), None, DEFAULT)
    return attainment(result.outcomes, LIVE_SLO).every >= TARGET


def timed(drawn: Workload, rate: float, lasts_s: float) -> Workload:
    options = WorkloadOptions(drawn.name, seed=SEED, arrivals="poisson")
    return at_rate(drawn.head(min(len(drawn), max(10, round(rate * lasts_s)))), options, rate)


def simulated(file: Path, workload: Workload, prediction: Prediction | None, policy: str) -> SimResult:
    """The same in virtual time."""
    deployment = twin(file, SEED)
    run = replace(deployment.run, slo=LIVE_SLO, prediction=prediction, max_tokens=MAX_TOKENS, seed=SEED)
    return simulate(workload, deployment.instances, with_words(run, POLICIES[policy]))


async def _served(plan: _Plan, folder: Path) -> Runs:
    cluster = load_cluster(plan.file)
    address = f"tcp://127.0.0.1:{ports.free_range(size=1)}"
    gateway = cluster.gateway.model_copy(update={"env": {**cluster.gateway.env, **pointing_to(address)}})
    stand_in = StandIn(plan.of_arm, plan.workload.output_tokens, SEED)
    cluster_keys.keep_curve_key(cluster, folder)
    keys = Curve(*read_pair(cluster_keys.curve_key_file(folder)))
    changed = cluster.model_copy(update={"gateway": gateway})
    async with stand_in.serving(address, keys), started(changed, folder) as running:
        return await running.supervisor.during(_all(plan, running, stand_in))


async def _all(plan: _Plan, running: RunningSuite, stand_in: StandIn) -> Runs:
    """Every arm under each policy, a round after the other; which arm begins changes."""
    target = Target.local(running.suite)
    found: Runs = {(policy, arm): [] for policy in plan.under for arm in ARMS}
    await send(target, timed(plan.workload, plan.workload.rate, WARM_S))
    for number in range(plan.rounds):
        for policy in plan.under:
            await running.suite.set_policies(policies_of(policy), WHO)
            for arm in rotated(ARMS, number):
                await running.suite.wait_idle(DRAINS_S)
                stand_in.arm = arm
                found[policy, arm].append(await _one(plan, target, policy, arm))
                print(f"{policy}, {arm}: {found[policy, arm][-1]}", file=sys.stderr)
    return found


async def _one(plan: _Plan, target: Target, policy: str, arm: str) -> Run:
    before = await preemptions(target)
    async with HostWatch(target.launcher_pid) as watch:
        answers = await send(target, plan.workload)
    lost = await preemptions(target) - before
    run = await asyncio.to_thread(simulated, plan.file, plan.workload, plan.of_arm[arm], policy)
    return run_of(answers, plan.workload, lost, summary(run, LIVE_SLO)["jct_mean_s"], watch.mean_cores)


def run_of(answers: Sequence[Answer], workload: Workload, lost: float, simulated_s: float, foreign: float) -> Run:
    share = sum(one.met for one in answers) / len(answers)
    took = [one.seen.last_s for one in answers if one.seen is not None]
    mean, p99 = (float(np.mean(took)), float(np.percentile(took, 99))) if took else (float("nan"),) * 2
    each = 1000.0 * lost / len(answers)
    return Run(share, share * workload.rate, mean, p99, each, len(answers) - len(took), simulated_s, foreign)


def policies_of(policy: str) -> dict[str, PolicySpec | None]:
    """A change of policies to those in words; what they leave out is as the cluster file has it."""
    specs = {kind: spec for part in POLICIES[policy].split("+") for kind, spec in from_words(part).items()}
    return {kind: specs.get(kind) for kind in KINDS}


def figures_of(found: Mapping[tuple[str, str], Sequence[Run]]) -> dict[str, float]:
    """Medians over the rounds, and of each arm's JCT over that without predictions in the same round."""
    figures: dict[str, float] = {}
    for (policy, arm), runs in found.items():
        name = f"live_{policy}_{arm}"
        for field in Run.__dataclass_fields__:
            figures[f"{name}_{_UNITS.get(field, field)}"] = round(median(getattr(one, field) for one in runs), 4)
        if arm != NONE:
            pairs = zip(runs, found[policy, NONE], strict=True)
            figures[f"{name}_jct_mean_over_none"] = round(median(a.jct_mean_s / b.jct_mean_s for a, b in pairs), 4)
    return figures


_UNITS = {"preemptions": "preemptions_per_1000", "simulated_jct_s": "simulated_jct_mean_s"}
