"""`polyphase bench predictor --part worth`: what a prediction of an answer's length is worth.

The same requests with no predictor, one that always predicts the commonest bucket, a trained one and one that is always
right, on decode instances that are short of memory: in the simulator, under the default policies and TetriInfer's, and
on emulated instances behind live services.
"""

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks.cluster_files import emulated, write_cluster
from benchmarks.experiment import Arm, Session, measured, twin
from benchmarks.goodput import goodput
from benchmarks.papers.testbed import SHAREGPT, sharegpt
from benchmarks.results import Figures, Result, arm_medians, at_least, in_turns, merged, progress, result
from benchmarks.scenarios import TARGET, instances, lengths, shipped
from services.launcher import cluster_keys, ports
from services.launcher.cluster_file import load_cluster
from services.launcher.model_source import PROJECT
from services.worker.engines.emulated_tokens import token_at
from shared.domain.job import LengthPrediction, Slo
from shared.errors import Busy
from shared.runtime.keys import read_pair
from shared.sim.cluster import simulate
from shared.sim.metrics import attainment, summary
from shared.sim.outcomes import SimResult
from shared.sim.prediction import Prediction
from shared.sim.spec import with_words
from shared.sim.workload import Lengths, Workload
from shared.wire.messages import PREDICT, PredictRequest
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Curve, Sockets
from tools.calibrate.target import Shot
from tools.client import completion_body
from tools.simulate.sim_file import load_prediction
from tools.simulate.workloads import WorkloadOptions, at_rate, make_workload

NONE, MAJORITY, TRAINED, ORACLE = ARMS = ("none", "majority", "trained", "oracle")
DEFAULT = "default"
POLICIES = {
    DEFAULT: "adaptive",
    "tetri": "least_load+full+power_of_two+reserve_dynamic",
    "tetri_mean": "least_load+full+power_of_two:end=mean+reserve_dynamic:end=mean",
    "tetri_p90": "least_load+full+power_of_two:end=p90+reserve_dynamic:end=p90",
}
DATA = Path("../shared/data")  # where it has no public traces, lengths are made like theirs
EVALUATION = PROJECT / "models" / "demo-lengths" / "prediction.yaml"
NO_WORSE = 0.97  # of the goodput without predictions: the resolution of its search
STEP = 1.03
Predictors = Mapping[str, Prediction | None]  # by arm


def run_worth() -> Result:
    return merged(simulated(trained(), DATA), live(trained(), DATA))


# The arms differ in the classifier's confusion alone; buckets and prior are the same. What one arm gains over another
# is then its classifier's knowledge of single requests.


def trained() -> Prediction:
    """As often right as the demo's classifier in its shipped evaluation."""
    known = load_prediction(EVALUATION)
    return Prediction(known.width_tokens, known.buckets, known.accuracy, known.confusion, known.prior)


def predictors(known: Prediction, output_tokens: Lengths) -> Predictors:
    """All four, for answers of these lengths, whose spread every arm with a predictor knows."""
    fitted = replace(known, width_tokens=_width_for(known, output_tokens))
    counts = np.bincount(fitted.buckets_of(output_tokens), minlength=fitted.buckets)
    fitted = replace(fitted, prior=tuple((counts / counts.sum()).tolist()))
    always = tuple(float(at == int(np.argmax(counts))) for at in range(fitted.buckets))
    return {
        NONE: None,
        MAJORITY: replace(fitted, confusion=(always,) * fitted.buckets),
        TRAINED: fitted,
        ORACLE: replace(fitted, confusion=None, accuracy=1.0),
    }


def _width_for(known: Prediction, output_tokens: Lengths) -> int:
    """The width of its buckets, stretched as these answers are longer than those that it was evaluated on.

    A classifier of short answers would see all long ones in its last bucket; what carries over from one model to
    another is how well it separates shorter from longer ones. Without a prior the evaluation's answers are unknown.
    """
    if known.prior is None:
        return known.width_tokens
    shares = np.asarray(known.prior) / sum(known.prior)
    mean = float(shares @ ((np.arange(known.buckets) + 0.5) * known.width_tokens))
    return max(1, round(known.width_tokens * float(output_tokens.mean()) / mean))


# Simulated: goodput is searched for each arm; JCT and preemptions are compared at one rate, the goodput without
# predictions.

SLO = Slo(ttft_s=2.0, tpot_s=0.03)
MAX_TOKENS = 2048  # max_tokens of all requests
FROM_PER_S = {"sharegpt": 26.0, "azure": 12.0}  # where searches set out
KINDS = tuple(FROM_PER_S)
LATENCIES = ("jct_mean_s", "jct_p99_s", "attainment", "itl_p99_s", "longest_gap_p90_s", "longest_gap_max_s")


class Case(NamedTuple):
    """Requests of a kind under some policies; `seed` draws the requests, and what is predicted of them."""

    kind: str
    policy: str
    seed: int
    known: Prediction
    data: Path | None
    requests: int


def simulated(
    known: Prediction, data: Path | None, seeds: Sequence[int] = (1, 2, 3), processes: int = 2, requests: int = 800
) -> Result:
    """Aims: under the default policies a trained predictor takes no goodput away."""
    cases = [Case(kind, name, seed, known, data, requests) for kind, name in product(KINDS, POLICIES) for seed in seeds]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        found = list(zip(cases, pool.map(compared, cases, chunksize=1), strict=True))
    figures: dict[str, float] = {}
    for kind, policy in product(KINDS, POLICIES):
        name, mine = f"sim_{kind}_{policy}", [seen for case, seen in found if case[:2] == (kind, policy)]
        figures |= arm_medians(name, [arms for arms, _ in mine], ("goodput_per_s", "jct_mean_s"))
        figures[f"{name}_rate_per_s"] = round(median(rate for _, rate in mine), 3)
    names = [f"sim_{kind}_{DEFAULT}_{TRAINED}_goodput_over_none" for kind in KINDS]
    note = (
        f"worth, sim: {requests} requests, {len(seeds)} seeds, medians over them; lengths: of tables in {data}, or made"
    )
    return result(figures, {name: at_least(NO_WORSE, figures[name], 4) for name in names}, [note])


def compared(case: Case) -> tuple[dict[str, Figures], float]:
    """Figures of all arms with the same requests, draws and policies, and the rate at which they are compared."""
    drawn = requests_of(case.kind, case.requests, case.seed, case.data)
    known, file = predictors(case.known, drawn.output_tokens), shipped("lengths")
    options = WorkloadOptions(drawn.name, seed=case.seed, arrivals="poisson")

    def run(arm: str, rate: float) -> SimResult:
        spec = replace(file.run, slo=SLO, prediction=known[arm], max_tokens=MAX_TOKENS, seed=case.seed)
        spec = with_words(spec, POLICIES[case.policy])
        return simulate(at_rate(drawn, options, rate), instances("lengths"), spec)

    def served(arm: str, near: float) -> float:
        return goodput(lambda rate: attainment(run(arm, rate).outcomes, SLO).every >= TARGET, near, STEP)

    base = served(NONE, FROM_PER_S[case.kind])
    at = base or FROM_PER_S[case.kind]
    found: dict[str, Figures] = {}
    for arm in ARMS:
        figures = summary(run(arm, at), SLO)
        found[arm] = {
            "goodput_per_s": base if arm == NONE else served(arm, at),
            "preemptions_per_1000": 1000.0 * figures["preemptions"] / figures["requests"],
            **{name: figures[name] for name in LATENCIES},
        }
    return found, at


def requests_of(kind: str, count: int, seed: int, data: Path | None) -> Workload:
    """`count` of that kind, all at once: of the public tables in `data`, or made like them where those are missing."""
    if kind == "azure":
        spare = count + count // 5 + 50  # some are too long
        return lengths("conversation", spare, 2 * MAX_TOKENS, seed, data).head(count)
    if data is not None and (data / SHAREGPT).is_file():
        return sharegpt(data, count, seed)
    words = f"prompt=160,prompt_cv=0.9,output=410,output_cv=0.9,longest={MAX_TOKENS}"
    return make_workload(WorkloadOptions(words, requests=count, seed=seed))


# Live. The first tokens of a prompt are its number, from which a stand-in for the predictor knows the answer's length.
# Clients allow LIVE_MAX_TOKENS; a stop token ends each answer earlier.

SHORTER, SLOWER = 5, 4.0  # lengths and speeds, so that two cores carry all tokens, and a run holds many answers
LIVE_MAX_TOKENS = 512
LIVE_SLO = SLO.slower(SLOWER)
UNDER = (DEFAULT, "tetri_mean")
ROUNDS, LASTS_S, WARM_S = 2, 60.0, 10.0  # of arrivals; before the first run, so that rates are learned
PREEMPTIONS = "vllm:num_preemptions_total"
LIVE_FROM_PER_S, DRAWN = 12.0, 2000
MIN_PROMPT = 8
SEED = 11
_FIRST, _DIGIT = 300, 900  # of the tokens that number a prompt


class StandIn:
    """Predicts what the predictor of `arm` would; nothing if it is None."""

    def __init__(self, known: Predictors, output_tokens: Lengths, seed: int) -> None:
        self.arm = NONE
        self._known = known
        self._buckets = {arm: one.predict(output_tokens, seed) for arm, one in known.items() if one is not None}

    def answer(self, prompt_token_ids: Sequence[int]) -> LengthPrediction:
        """Raises Busy, as an overloaded predictor does, without a prediction."""
        predictor, number = self._known[self.arm], number_of(prompt_token_ids)
        if predictor is None or not 0 <= number < len(self._buckets[self.arm]):
            raise Busy("no prediction")
        return predictor.as_prediction(int(self._buckets[self.arm][number]))

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
    rest = [_FIRST + (number * 31 + at * 7) % _DIGIT for at in range(tokens - 2)]
    return [_FIRST + number // _DIGIT, _FIRST + number % _DIGIT, *rest]


def number_of(prompt_token_ids: Sequence[int]) -> int:
    """-1 for a prompt without a number."""
    if len(prompt_token_ids) < MIN_PROMPT:
        return -1
    high, low = (token - _FIRST for token in prompt_token_ids[:2])
    return high * _DIGIT + low if 0 <= low < _DIGIT and high >= 0 else -1


def _body(number: int, shot: Shot) -> dict[str, object]:
    """The answer's last token, which stops it, occurs nowhere before: answers are too short for a repetition."""
    stop = [token_at(shot.prompt_tokens + shot.output_tokens - 1)]
    prompt, salt = prompt_of(number, shot.prompt_tokens), secrets.token_hex(8)
    return completion_body(prompt, LIVE_MAX_TOKENS, stop_token_ids=stop, cache_salt=salt)


def live(known: Prediction, data: Path | None) -> Result:
    """Every arm under each policy on one suite, in turns, beside a simulation of the same."""
    drawn = short_requests(DRAWN, SEED, data)
    short = replace(known, width_tokens=max(1, known.width_tokens // SHORTER))
    found = predictors(short, drawn.output_tokens)
    with tempfile.TemporaryDirectory(prefix="polyphase-worth-") as name:
        file = cluster_into(Path(name))

        def served(rate: float) -> bool:
            seen = _simulated_live(file, _timed(drawn, rate, LASTS_S), None, DEFAULT)
            return attainment(seen.outcomes, LIVE_SLO).every >= TARGET

        rate = goodput(served, LIVE_FROM_PER_S, STEP)
        workload = _timed(drawn, rate, LASTS_S)
        rounds = asyncio.run(_served(file, workload, found, Path(name) / "state"))
    figures = {"live_rate_per_s": round(rate, 3)}
    for policy in UNDER:
        by_arm = [{arm: one[policy, arm] for arm in ARMS} for one in rounds]
        figures |= arm_medians(f"live_{policy}", by_arm, ("jct_mean_s",))
    note = (
        f"worth, live: {len(workload)} requests a run, {ROUNDS} rounds, medians over them; lengths a {SHORTER}th of "
        f"ShareGPT's, instances {SLOWER:g} times as slow; one suite, arms in turn"
    )
    return result(figures, notes=[note])


def short_requests(count: int, seed: int, data: Path | None) -> Workload:
    """ShareGPT's lengths, a fifth of them."""
    whole = requests_of("sharegpt", count, seed, data)
    prompts = np.maximum(MIN_PROMPT, whole.prompt_tokens // SHORTER)
    return Workload(whole.name, whole.arrival_s, prompts, np.maximum(1, whole.output_tokens // SHORTER))


def cluster_into(folder: Path) -> Path:
    cluster = emulated(
        "predictor (emulated)",
        [
            {"id": "prefill", "role": "prefill", "kv_cache_bytes": 4096 << 20},
            {"id": "decode", "count": 3, "role": "decode", "kv_cache_bytes": 224 << 20},
        ],
        {"emulated_slowdown": SLOWER, "emulated_link_gbps": 100.0, "chunk_size": 512, "max_seqs": 64},
        max_model_len=1024,
        gateway={"slo": {"default": LIVE_SLO.targets}},
    )
    return write_cluster(folder, cluster)


def _timed(drawn: Workload, rate: float, lasts_s: float) -> Workload:
    options = WorkloadOptions(drawn.name, seed=SEED, arrivals="poisson")
    return at_rate(drawn.head(min(len(drawn), max(10, round(rate * lasts_s)))), options, rate)


def _simulated_live(file: Path, workload: Workload, prediction: Prediction | None, policy: str) -> SimResult:
    deployment = twin(file, SEED)
    run = replace(deployment.run, slo=LIVE_SLO, prediction=prediction, max_tokens=LIVE_MAX_TOKENS, seed=SEED)
    return simulate(workload, deployment.instances, with_words(run, POLICIES[policy]))


async def _served(
    file: Path, workload: Workload, known: Predictors, folder: Path
) -> list[dict[tuple[str, str], Figures]]:
    """By round, policy and arm."""
    cluster, address = load_cluster(file), f"tcp://127.0.0.1:{ports.free_range(size=1)}"
    environment = {**cluster.gateway.env, "POLYPHASE_GATEWAY_PREDICTORS": f'["{address}"]'}
    changed = cluster.model_copy(update={"gateway": cluster.gateway.model_copy(update={"env": environment})})
    cluster_keys.keep_curve_key(cluster, folder)
    keys = Curve(*read_pair(cluster_keys.curve_key_file(folder)))
    stand_in = StandIn(known, workload.output_tokens, SEED)

    async def run(on: Session, number: int, policy_and_arm: tuple[str, str]) -> Figures:
        policy, stand_in.arm = policy_and_arm
        before = await on.metrics(PREEMPTIONS)
        sent = await on.send(workload, Arm(policy, POLICIES[policy]), slo=LIVE_SLO, body=_body, may_fail=True)
        preemptions = sum(count - before[name][0] for name, (count,) in (await on.metrics(PREEMPTIONS)).items())
        seen = summary(sent.result, LIVE_SLO)
        expected = await asyncio.to_thread(_simulated_live, file, workload, known[stand_in.arm], policy)
        figures = {
            "attainment": seen["attainment"],
            "within_slo_per_s": seen["attainment"] * workload.rate,
            "jct_mean_s": seen["jct_mean_s"],
            "jct_p99_s": seen["jct_p99_s"],
            "preemptions_per_1000": 1000.0 * preemptions / len(workload),
            "failed": seen["requests"] - seen["completed"],
            "simulated_jct_mean_s": summary(expected, LIVE_SLO)["jct_mean_s"],
            "foreign_cores": sent.foreign_cores,
        }
        progress(f"round {number}, {policy}, {stand_in.arm}: {figures}")
        return figures

    async def all_rounds(on: Session) -> list[dict[tuple[str, str], Figures]]:
        await on.send(_timed(workload, workload.rate, WARM_S), body=_body, may_fail=True)
        return await in_turns(list(product(UNDER, ARMS)), ROUNDS, partial(run, on))

    async with stand_in.serving(address, keys):
        return await measured(changed, all_rounds, folder)
