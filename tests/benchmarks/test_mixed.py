"""`bench mixed`: its systems, its loads, its report, and the pair in the simulator."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
import pytest

from benchmarks.mixed import (
    ADAPTIVE,
    BALANCED,
    BURST,
    DATA_PARALLEL,
    FAST,
    HIGH_LOW,
    LOW_HIGH,
    SIMULATED,
    SLOW,
    SYSTEMS,
    FormSteps,
    Load,
    Run,
    Twin,
    burst,
    cluster_of,
    conversations,
    drawn,
    observed,
    recorded_rates,
    replay,
    report,
    with_pauses,
)
from services.launcher.cluster_file import Cluster
from shared.cost.rates_file import ControlPlane
from shared.cost.step import Batch
from shared.domain.instance import Compatibility, KvGeometry, Role
from shared.domain.rates import Rates, StepForm, StepRates
from shared.errors import Unavailable
from shared.sim.measured import LiveInstance
from shared.sim.workload import Workload
from shared.wire.messages import StepRecord
from tests.services.fake_worker import make_info
from tools.calibrate.target import Sample, Shot

SPEEDS = {FAST: 2.8, SLOW: 1.0}
STEPS = StepRates(
    StepForm(0.035, 7e-4, 1e-7), StepForm(0.035, 0.0, 0.0, 2.5e-3, 3e-6), StepForm(0.06, 7e-4, 1e-7, 2.5e-3, 5e-6)
)


@pytest.fixture(scope="module")
def lengths() -> Workload:
    return conversations(Path("nowhere"))


def test_the_cluster_and_the_policies_of_every_system_are_valid() -> None:
    assert Cluster.model_validate(cluster_of(Path("model"))).instance_ids == (FAST, SLOW)
    for system in SYSTEMS.values():
        assert system.policies(SPEEDS).placement.name == system.specs(SPEEDS)["placement"].name
    routes = SYSTEMS[DATA_PARALLEL].specs(SPEEDS)["placement"].parameters["routes"]
    assert routes == [["", FAST, 2.8], ["", SLOW, 1.0]]


def test_conversations_are_scaled(tmp_path: Path, lengths: Workload) -> None:
    folder = tmp_path / "traces" / "azure2023"
    folder.mkdir(parents=True)
    rows = [f"2023-11-16 18:15:{at},{tokens},40" for at, tokens in ((10, 40), (11, 41), (12, 600), (13, 2400))]
    text = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n"
    (folder / "AzureLLMInferenceTrace_conv.csv").write_text(text)
    found = conversations(tmp_path)
    assert found.prompt_tokens.tolist() == [16, 200]
    assert found.output_tokens.tolist() == [10, 10]
    assert 250 < lengths.prompt_tokens.mean() < 400
    assert lengths.prompt_tokens.max() < 800


def test_loads(lengths: Workload) -> None:
    assert np.array_equal(drawn(lengths, 30, 1).prompt_tokens, drawn(lengths, 30, 1).prompt_tokens)
    assert not np.array_equal(drawn(lengths, 30, 1).prompt_tokens, drawn(lengths, 30, 2).prompt_tokens)
    at_once, later = burst(lengths, 30, 1), replay(lengths, 0.5, 2.0, 30.0, 1)
    assert {shot.at_s for shot in at_once.shots} == {0.0}
    assert (at_once.share, later.label, len(later.shots)) == (0.0, "at_50_percent", 60)
    assert later.shots[0].at_s == 0.0
    assert 20.0 < later.shots[-1].at_s < 45.0


def test_figures_of_a_replay() -> None:
    samples = [Sample("a", Shot(10, 3), 100.0, 1.0, 3.0, (0.5, 1.5)), Sample("b", Shot(10, 1), 101.0, 2.0, 2.0)]
    found = observed(samples)
    wanted = {"requests_per_s": 2 / 3, "ttft_mean_s": 1.5, "jct_mean_s": 2.5, "tpot_mean_s": 1.0, "tbt_p99_s": 1.49}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


SEEN = dict(zip(SIMULATED, (1.0, 0.5, 0.1, 10.0), strict=True)) | {"ttft_p99_s": 2.0, "tbt_p99_s": 0.4}
AT_50 = "at_50_percent"


def ran(system: str, load: str = BURST, **figures: float) -> Run:
    workload = Workload("w", np.zeros(2), np.full(2, 100), np.full(2, 10))
    return Run(system, Load(load, 0.0 if load == BURST else 0.5, workload), SEEN | figures)


def bursts(adaptive: float = 2.0, balanced: float = 2.0) -> list[Run]:
    rates = {DATA_PARALLEL: 1.8, LOW_HIGH: 1.0, HIGH_LOW: 0.8, BALANCED: balanced, ADAPTIVE: adaptive}
    return [ran(system, requests_per_s=rate) for system, rate in rates.items()]


def at_rate(**adaptive: float) -> list[Run]:
    good = {"tbt_p99_s": 0.19, "jct_mean_s": 6.9, "ttft_p99_s": 2.0}
    balanced = ran(BALANCED, AT_50, tbt_p99_s=0.2, jct_mean_s=7.0)
    return [*bursts(), ran(DATA_PARALLEL, AT_50), balanced, ran(ADAPTIVE, AT_50, **(good | adaptive))]


@pytest.mark.parametrize(
    ("runs", "missed"),
    [
        (at_rate(), set()),
        (bursts(1.85, 1.85), {"throughput_over_data_parallel"}),
        (bursts(1.79, 1.79), {"throughput_over_data_parallel", "throughput_over_better_disaggregation"}),
        (bursts(balanced=2.2), {"throughput_over_balanced"}),
        (at_rate(tbt_p99_s=0.21), {"tbt_p99_over_data_parallel", "tbt_p99_over_balanced"}),
        (at_rate(jct_mean_s=7.1), {"jct_mean_over_data_parallel"}),
        (at_rate(jct_mean_s=7.3), {"jct_mean_over_data_parallel", "jct_mean_over_balanced"}),
        (at_rate(ttft_p99_s=2.1), {"ttft_p99_over_data_parallel", "ttft_p99_over_balanced"}),
        ([run for run in bursts() if run.system != BALANCED], {"throughput_over_balanced"}),  # not measured
    ],
)
def test_aims(runs: list[Run], missed: set[str]) -> None:
    aims = report(runs, {})["aims"]
    assert {name.removeprefix(f"{AT_50}_") for name, aim in aims.items() if not aim["met"]} == missed


def test_medians_over_rounds() -> None:
    figures = report([*bursts(2.0), *bursts(0.2), *bursts(2.1)], {})["figures"]
    assert figures["burst_adaptive_requests_per_s"] == 2.0


def test_the_simulator_beside_the_engines() -> None:
    def simulated(**rates: float) -> dict[str, dict[str, object]]:
        means = {name: SEEN[name] for name in SIMULATED}
        predicted = {run.key: means | {"requests_per_s": run.figures["requests_per_s"] * 1.1} for run in bursts()}
        predicted |= {(BURST, name): means | {"requests_per_s": rate} for name, rate in rates.items()}
        found = report(bursts(), predicted)
        assert found["figures"]["burst_data_parallel_requests_per_s_off_percent"] == pytest.approx(10.0)
        return {name: aim for name, aim in found["aims"].items() if name.startswith("simulated")}

    aims = simulated()
    assert aims["simulated_requests_per_s_off_percent"] == {"want": "<= 15", "got": 10.0, "met": True}
    assert aims["simulated_pairs_in_wrong_order"]["met"]
    aims = simulated(low_high=2.1)
    assert str(aims["simulated_pairs_in_wrong_order"]["got"]).startswith("burst: data_parallel and low_high")
    assert not aims["simulated_requests_per_s_off_percent"]["met"]
    assert simulated(balanced=1.9)["simulated_pairs_in_wrong_order"]["met"]  # live, it is as fast as adaptive


def test_throughput_at_a_rate_is_not_compared() -> None:
    predicted = {(AT_50, ADAPTIVE): dict(zip(SIMULATED, (9.0, 0.5, 0.1, 6.9), strict=True))}
    aims = report(at_rate(), predicted)["aims"]
    assert "simulated_requests_per_s_off_percent" not in aims
    assert aims["simulated_jct_mean_s_off_percent"]["met"]


def instance(name: str, factor: float) -> LiveInstance:
    compatibility = Compatibility("f", "vllm", "1", 1, KvGeometry(10, 5, 64))
    sizes = {"total_blocks": 1300, "chunk_size": 256, "max_seqs": 32, "dtype": "float32"}
    rates = Rates(STEPS.scaled(factor))
    return LiveInstance(
        make_info(name, "", compatibility=compatibility, rates=rates, **sizes), Role.DECODE, "here", 1, 32
    )


@pytest.fixture(scope="module")
def twin() -> Twin:
    instances = (instance(FAST, 1.0), instance(SLOW, 2.8))
    return Twin(instances, recorded_rates(instances, {}), ControlPlane(0.01, 0.005, 0.002, 0.01, 3e8), SPEEDS)


def test_step_times_are_recorded_ones_or_published_ones() -> None:
    batches = [Batch((), count, 300 * count * k) for count in (1, 2, 4, 8) for k in (1, 2, 3, 4)]
    seconds = [2.0 * FormSteps(STEPS).step_time_s(batch) for batch in batches]
    ends = np.cumsum(seconds).tolist()
    records = [  # with a pause until the next step
        StepRecord(number, end_s, took_s - 0.005, 0.0, one.prefill, one.decode_count, one.decode_context_tokens)
        for number, (one, end_s, took_s) in enumerate(zip(batches, ends, seconds, strict=True))
    ]
    assert [took_s for _, took_s in with_pauses(records)][1:] == pytest.approx(seconds[1:])
    one = instance(FAST, 1.0)
    found = recorded_rates((one,), {FAST: records})[FAST]
    assert found.decode_s(4, 1200) == pytest.approx(2.0 * STEPS.decode_s(4, 1200), rel=0.02)
    assert found.prefill == STEPS.prefill
    silent = replace(one, info=msgspec.structs.replace(one.info, rates=Rates()))
    with pytest.raises(Unavailable, match="fast publishes no step times"):
        recorded_rates((silent,), {})


def test_adaptive_is_not_behind_and_uses_both_in_the_simulated_pair(twin: Twin, lengths: Workload) -> None:
    """As on the engines: everything at once, and as much as data-parallel can serve."""
    compared = (DATA_PARALLEL, LOW_HIGH, HIGH_LOW, BALANCED, ADAPTIVE)
    several = [burst(lengths, 60, seed) for seed in range(1, 5)]
    served = {
        name: fmean(twin.run(SYSTEMS[name], each, lengths)["requests_per_s"] for each in several) for name in compared
    }
    assert served["adaptive"] > 1.05 * served["data_parallel"]
    assert served["adaptive"] > 0.95 * served["balanced"]
    assert served["adaptive"] > 1.3 * max(served["low_high"], served["high_low"])
    steady = replay(lengths, 0.9, 1.6, 90.0, 3)
    jct = {name: twin.run(SYSTEMS[name], steady, lengths)["jct_mean_s"] for name in compared}
    assert jct["adaptive"] < 0.85 * jct["data_parallel"]
    assert jct["adaptive"] < 1.03 * jct["balanced"]


def test_requests_go_in_the_simulator_where_their_turn_sent_them_on_the_engines(twin: Twin) -> None:
    few = Load("at", 0.5, Workload("x", np.arange(6) * 60.0, np.full(6, 300), np.full(6, 20)))
    fast, half, slow = (
        twin.run(SYSTEMS[DATA_PARALLEL], few, few.workload, [FAST] * count + [SLOW] * (6 - count))["ttft_mean_s"]
        for count in (6, 3, 0)
    )
    assert slow > 1.5 * fast
    assert half == pytest.approx((fast + slow) / 2.0)
