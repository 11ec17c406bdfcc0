"""Benefit of length predictions in the simulator: decode instances that are short of memory, four arms, several
policies.

The arms differ in what is known of lengths: nothing, their distribution, a classifier's prediction, the truth. Goodput
is searched for each arm; JCT and preemptions are compared at one rate, the goodput without predictions.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import median

import numpy as np

from benchmarks.comparison import goodput
from benchmarks.papers.testbed import SHAREGPT, sharegpt
from benchmarks.scenarios import TARGET, learned, lengths, trace_of
from services.launcher.model_source import PROJECT
from shared.domain.job import Slo
from shared.sim.cluster import simulate
from shared.sim.metrics import attainment, summary
from shared.sim.outcomes import SimResult
from shared.sim.prediction import Prediction
from shared.sim.spec import InstanceSpec, RunSpec, with_words
from shared.sim.workload import Lengths, Workload
from tools.simulate.deployment import load_deployment
from tools.simulate.sim_file import load_prediction
from tools.simulate.workloads import WorkloadOptions, at_rate, make_workload

# The four arms differ in the classifier's confusion alone; buckets and prior are the same. What one arm gains over
# another is then its classifier's knowledge of single requests.

NONE, MAJORITY, TRAINED, ORACLE = ARMS = ("none", "majority", "trained", "oracle")
SHIPPED = PROJECT / "models" / "demo-lengths" / "prediction.yaml"
PAPER = Prediction(width_tokens=200, buckets=10, accuracy=0.749)  # TetriInfer 5.2.3: OPT-125M, granularity 200
Arms = Mapping[str, Prediction | None]


@dataclass(frozen=True, slots=True)
class Trained:
    """How often a classifier is right, and where that figure comes from."""

    prediction: Prediction
    source: str


def trained(file: Path | None = None) -> Trained:
    """Of that evaluation, else of the one that ships with the demo's checkpoint, else TetriInfer's.

    Raises InvalidRequest for a file that is no evaluation.
    """
    found = file if file is not None else SHIPPED if SHIPPED.is_file() else None
    if found is None:
        return Trained(PAPER, "stand-in: TetriInfer's 74.9 % at 200 tokens, no checkpoint of ours")
    known = load_prediction(found)
    return Trained(
        Prediction(known.width_tokens, known.buckets, known.accuracy, known.confusion, known.prior),
        f"evaluation {found}",
    )


def arms(known: Prediction, output_tokens: Lengths) -> Arms:
    """All four, for answers of these lengths, whose spread every arm with a predictor knows."""
    width = width_for(known, output_tokens)
    fitted = replace(known, width_tokens=width)
    prior = prior_of(fitted, output_tokens)
    fitted = replace(fitted, prior=prior)
    commonest = int(np.argmax(prior))
    always = tuple(float(at == commonest) for at in range(fitted.buckets))
    return {
        NONE: None,
        MAJORITY: replace(fitted, confusion=(always,) * fitted.buckets),
        TRAINED: fitted,
        ORACLE: replace(fitted, confusion=None, accuracy=1.0),
    }


def width_for(known: Prediction, output_tokens: Lengths) -> int:
    """Its buckets, stretched as these answers are longer than those that it was evaluated on.

    A classifier of short answers would see all long ones in its last bucket; what carries over from one model to
    another is how well it separates shorter from longer ones. Without a prior the evaluation's answers are unknown.
    """
    if known.prior is None:
        return known.width_tokens
    shares = np.asarray(known.prior) / sum(known.prior)
    mean = float(shares @ ((np.arange(known.buckets) + 0.5) * known.width_tokens))
    return max(1, round(known.width_tokens * float(output_tokens.mean()) / mean))


def prior_of(known: Prediction, output_tokens: Lengths) -> tuple[float, ...]:
    """The share of each bucket."""
    counts = np.bincount(known.buckets_of(output_tokens), minlength=known.buckets)
    return tuple((counts / counts.sum()).tolist())


def accuracy(known: Prediction) -> float:
    """The share of answers whose bucket is predicted, by the prior."""
    confusion, rows = known.confusion, known.buckets
    prior = known.prior or (1.0 / rows,) * rows
    right = [row[at] for at, row in enumerate(confusion)] if confusion is not None else [known.accuracy] * rows
    return float(sum(share * hit for share, hit in zip(prior, right, strict=True)) / sum(prior))


DEFAULT = "default"
POLICIES = {
    DEFAULT: "adaptive",
    "tetri": "least_load+full+power_of_two+reserve_dynamic",
    "tetri_mean": "least_load+full+power_of_two:end=mean+reserve_dynamic:end=mean",
    "tetri_p90": "least_load+full+power_of_two:end=p90+reserve_dynamic:end=p90",
}
SLO = Slo(ttft_s=2.0, tpot_s=0.03)
MAX_TOKENS = 2048  # max_tokens of all requests
REQUESTS, STEP = 800, 1.03
FROM_PER_S = {"sharegpt": 26.0, "azure": 12.0}  # where searches set out
KINDS = tuple(FROM_PER_S)
SEEDS = (1, 2, 3)
_LIKE_SHAREGPT = f"prompt=160,prompt_cv=0.9,output=410,output_cv=0.9,longest={MAX_TOKENS}"


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of a kind under some policies; `seed` draws the requests, and what is predicted of them."""

    kind: str
    policy: str
    seed: int

    @property
    def name(self) -> str:
        return f"sim_{self.kind}_{self.policy}"


@dataclass(frozen=True, slots=True)
class Seen:
    """One arm. goodput: requests a second; the rest at the rate `at`. preemptions: per thousand requests."""

    goodput: float
    at: float
    jct_mean_s: float
    jct_p99_s: float
    preemptions: float
    attainment: float
    itl_p99_s: float  # of all gaps between tokens
    longest_gap_p90_s: float  # of the requests' longest gaps
    longest_gap_max_s: float


@dataclass(frozen=True, slots=True)
class _Work:
    case: Case
    known: Trained
    data: Path | None
    requests: int


def measured(
    known: Trained, data: Path | None, seeds: Iterable[int], processes: int, requests: int = REQUESTS
) -> dict[Case, dict[str, Seen]]:
    work = [
        _Work(Case(kind, name, seed), known, data, requests) for kind in KINDS for name in POLICIES for seed in seeds
    ]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        return {one.case: seen for one, seen in zip(work, pool.map(_case, work, chunksize=1), strict=True)}


def _case(work: _Work) -> dict[str, Seen]:
    drawn = requests_of(work.case.kind, work.requests, work.case.seed, work.data)
    of_arm = arms(work.known.prediction, drawn.output_tokens)
    return compared(work.case, drawn, of_arm)


def compared(case: Case, drawn: Workload, of_arm: Arms) -> dict[str, Seen]:
    """All arms with the same requests, the same draws and the same policies."""

    def run(arm: str, rate: float) -> SimResult:
        spec = with_words(_run(of_arm[arm], case.seed), POLICIES[case.policy])
        return simulate(_timed(drawn, rate, case.seed), _instances(), spec)

    def found(arm: str, near: float) -> float:
        return goodput(lambda rate: attainment(run(arm, rate).outcomes, SLO).every >= TARGET, near, STEP)

    base = found(NONE, FROM_PER_S[case.kind])
    at = base or FROM_PER_S[case.kind]
    best = {arm: base if arm == NONE else found(arm, at) for arm in ARMS}
    return {arm: _seen(best[arm], at, run(arm, at)) for arm in ARMS}


def _seen(best: float, at: float, result: SimResult) -> Seen:
    figures = summary(result, SLO)
    each = 1000.0 * figures["preemptions"] / figures["requests"]
    gaps = (figures[name] for name in ("itl_p99_s", "longest_gap_p90_s", "longest_gap_max_s"))
    return Seen(best, at, figures["jct_mean_s"], figures["jct_p99_s"], each, figures["attainment"], *gaps)


def _run(prediction: Prediction | None, seed: int) -> RunSpec:
    return replace(load_deployment(_FILE).run, slo=SLO, prediction=prediction, max_tokens=MAX_TOKENS, seed=seed)


_FILE = Path(__file__).with_name("clusters") / "lengths.yaml"


@cache
def _instances() -> tuple[InstanceSpec, ...]:
    rng = Random(1)
    return tuple(learned(one, rng) for one in load_deployment(_FILE).instances)


def _timed(drawn: Workload, rate: float, seed: int) -> Workload:
    return at_rate(drawn, WorkloadOptions(drawn.name, seed=seed, arrivals="poisson"), rate)


def requests_of(kind: str, count: int, seed: int, data: Path | None) -> Workload:
    """So many of that kind, all at once: of the public tables in `data` where they are there, else made like them."""
    if kind == "azure":
        spare = count + count // 5 + 50  # some are too long
        return lengths("conversation", spare, 2 * MAX_TOKENS, seed, data).head(count)
    if data is not None and (data / SHAREGPT).is_file():
        return sharegpt(data, count, seed)
    return make_workload(WorkloadOptions(_LIKE_SHAREGPT, requests=count, seed=seed))


def figures_of(found: Mapping[Case, Mapping[str, Seen]]) -> dict[str, float]:
    """Medians over the seeds of each arm, and what it gains over none: medians of the ratios of each seed."""
    figures: dict[str, float] = {}
    for name, runs in _by_name(found):
        for arm in ARMS:
            for field, unit in _FIELDS.items():
                figures[f"{name}_{arm}_{unit}"] = round(median(getattr(one[arm], field) for one in runs), 4)
        figures[f"{name}_rate_per_s"] = round(median(one[NONE].at for one in runs), 3)
        for arm in ARMS[1:]:
            figures[f"{name}_{arm}_goodput_over_none"] = round(gain(runs, arm, "goodput"), 4)
            figures[f"{name}_{arm}_jct_mean_over_none"] = round(gain(runs, arm, "jct_mean_s"), 4)
    return figures


_FIELDS = {
    "goodput": "goodput_per_s",
    "jct_mean_s": "jct_mean_s",
    "jct_p99_s": "jct_p99_s",
    "preemptions": "preemptions_per_1000",
    "attainment": "attainment",
    "itl_p99_s": "itl_p99_s",
    "longest_gap_p90_s": "longest_gap_p90_s",
    "longest_gap_max_s": "longest_gap_max_s",
}


def gain(runs: Iterable[Mapping[str, Seen]], arm: str, field: str) -> float:
    """The median over the seeds of the figure divided by the one without predictions; NaN if that is 0."""
    pairs = [(getattr(one[arm], field), getattr(one[NONE], field)) for one in runs]
    return median(mine / plain if plain else float("nan") for mine, plain in pairs)


def _by_name(found: Mapping[Case, Mapping[str, Seen]]) -> Iterator[tuple[str, list[Mapping[str, Seen]]]]:
    for name in dict.fromkeys(case.name for case in found):
        yield name, [seen for case, seen in found.items() if case.name == name]


def notes_of(known: Trained, data: Path | None, requests: int = REQUESTS) -> list[str]:
    """Where lengths come from, and how good each arm is at them."""
    notes = []
    for kind in KINDS:
        of_arm = arms(known.prediction, requests_of(kind, requests, SEEDS[0], data).output_tokens)
        accuracies = [f"{arm} {accuracy(one):.3f}" for arm, one in of_arm.items() if one is not None]
        some = next(one for one in of_arm.values() if one is not None)
        notes.append(
            f"sim {kind}: right in {', '.join(accuracies)}; {some.buckets} buckets of {some.width_tokens} tokens"
        )
    there = {"sharegpt": data is not None and (data / SHAREGPT).is_file(), "azure": trace_of("conversation", data)}
    notes += [
        f"sim {kind}: no table in {data}; lengths are made like its" for kind, found in there.items() if not found
    ]
    return notes
