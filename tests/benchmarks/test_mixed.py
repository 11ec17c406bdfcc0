"""`bench mixed`: its systems, its loads, what it makes of its runs, and the pair in the simulator."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
import pytest

from benchmarks import mixed
from benchmarks.mixed import Run, report
from benchmarks.mixed_pair import (
    ADAPTIVE,
    BALANCED,
    DATA_PARALLEL,
    FAST,
    HIGH_LOW,
    LOW_HIGH,
    SLOW,
    SYSTEMS,
    FormSteps,
    Load,
    Means,
    Seen,
    Twin,
    burst,
    cluster_of,
    conversations,
    drawn,
    lasting,
    learned,
    replay,
)
from services.launcher.cluster_file import Cluster
from shared.cost.rates_file import ControlPlane
from shared.cost.step import Batch
from shared.domain.instance import Compatibility, InstanceInfo, KvGeometry, Role
from shared.domain.rates import Rates, StepForm, StepRates
from shared.errors import Unavailable
from shared.sim.measured import LiveInstance
from shared.sim.workload import Workload
from shared.wire.messages import StepRecord
from tools.calibrate.target import Sample, Shot

SPEEDS = {FAST: 2.8, SLOW: 1.0}
STEPS = StepRates(
    StepForm(0.035, 7e-4, 1e-7), StepForm(0.035, 0.0, 0.0, 2.5e-3, 3e-6), StepForm(0.06, 7e-4, 1e-7, 2.5e-3, 5e-6)
)
NOTHING = Path("nowhere")


@pytest.fixture(scope="module")
def lengths() -> Workload:
    return conversations(NOTHING)


def test_the_cluster_and_the_policies_of_every_system_are_valid() -> None:
    assert Cluster.model_validate(cluster_of(Path("model"))).instance_ids == (FAST, SLOW)
    for system in SYSTEMS:
        assert set(system.roles) == {FAST, SLOW}
        specs = system.specs(SPEEDS)
        assert set(specs) == {"placement", "split", "dispatch"}
        assert system.policies(SPEEDS).placement.name == specs["placement"].name


def test_data_parallel_goes_by_speed() -> None:
    routes = DATA_PARALLEL.specs(SPEEDS)["placement"].parameters["routes"]
    assert routes == [["", FAST, 2.8], ["", SLOW, 1.0]]


def test_conversations_are_scaled_and_the_trace_is_taken_where_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "traces" / "azure2023"
    folder.mkdir(parents=True)
    rows = (
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        *(f"2023-11-16 18:15:{at},{n},40" for at, n in ((10, 40), (11, 41), (12, 600), (13, 2400))),
    )
    (folder / "AzureLLMInferenceTrace_conv.csv").write_text("\n".join(rows) + "\n")
    found = conversations(tmp_path)
    assert found.prompt_tokens.tolist() == [16, 200]
    assert found.output_tokens.tolist() == [10, 10]
    made = conversations(NOTHING)
    assert 250 < made.prompt_tokens.mean() < 400
    assert made.prompt_tokens.max() < 800


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
    seen = Seen.of(samples)
    assert seen.requests_per_s == pytest.approx(2 / 3.0)
    assert (seen.ttft_mean_s, seen.jct_mean_s, seen.tpot_mean_s) == (1.5, 2.5, 1.0)
    assert (seen.tbt_p50_s, seen.tbt_p99_s) == pytest.approx((1.0, 1.49))


def load(label: str, share: float = 0.5) -> Load:
    return Load(label, share, Workload("w", np.zeros(2), np.full(2, 100), np.full(2, 10)))


def seen(**more: float) -> Seen:
    return replace(Seen(1.0, 0.5, 0.4, 2.0, 0.05, 0.4, 0.1, 10.0, 0.5, 0.6), **more)


def bursts(adaptive: float, balanced: float = 2.0) -> list[Run]:
    rates = ((DATA_PARALLEL, 1.8), (LOW_HIGH, 1.0), (HIGH_LOW, 0.8), (BALANCED, balanced), (ADAPTIVE, adaptive))
    return [Run(system, load("burst", 0.0), seen(requests_per_s=rate), {FAST: 1.0}, 0.0) for system, rate in rates]


def test_aims_of_throughput() -> None:
    aims = report(bursts(2.0), {})["aims"]
    assert [
        aims[f"throughput_over_{name}"]["met"] for name in ("data_parallel", "better_disaggregation", "balanced")
    ] == [True] * 3
    assert aims["throughput_over_better_disaggregation"]["got"] == 2.0
    assert not report(bursts(1.85), {})["aims"]["throughput_over_data_parallel"]["met"]
    assert not report(bursts(1.79), {})["aims"]["throughput_over_better_disaggregation"]["met"]
    assert not report(bursts(2.0, balanced=2.2), {})["aims"]["throughput_over_balanced"]["met"]


def at_rate(adaptive: Seen) -> list[Run]:
    found = ((DATA_PARALLEL, seen()), (BALANCED, seen(tbt_p99_s=0.2, jct_mean_s=7.0)), (ADAPTIVE, adaptive))
    return [Run(system, load("at_50_percent"), one, {FAST: 1.0}, 0.0) for system, one in found]


def test_aims_at_a_rate() -> None:
    good = seen(tbt_p99_s=0.19, jct_mean_s=6.9, ttft_p99_s=2.0)
    names = [f"at_50_percent_{what}_over_data_parallel" for what in ("tbt_p99", "jct_mean", "ttft_p99")]
    aims = report(at_rate(good), {})["aims"]
    assert all(aims[name]["met"] for name in names)
    assert aims["at_50_percent_tbt_p99_over_balanced"]["met"]
    for worse, name in zip(({"tbt_p99_s": 0.21}, {"jct_mean_s": 7.1}, {"ttft_p99_s": 2.1}), names, strict=True):
        assert not report(at_rate(replace(good, **worse)), {})["aims"][name]["met"]
    assert not report(at_rate(replace(good, jct_mean_s=7.3)), {})["aims"]["at_50_percent_jct_mean_over_balanced"]["met"]


def test_what_was_not_measured_misses_its_aim() -> None:
    aims = report([run for run in bursts(2.0) if run.system is not BALANCED], {})["aims"]
    assert aims["throughput_over_balanced"] == {"want": ">= 0.9709", "got": "not measured", "met": False}


def test_medians_over_rounds() -> None:
    disturbed = bursts(0.2)
    figures = report([*bursts(2.0), *disturbed, *bursts(2.1)], {})["figures"]
    assert figures["burst_adaptive_requests_per_s"] == 2.0
    assert figures["burst_adaptive_fast_throttled_share"] == 1.0


def test_the_simulator_beside_the_engines() -> None:
    live = bursts(2.0)
    said = {("burst", run.system.label): Means(run.seen.requests_per_s * 1.1, 0.5, 0.1, 10.0) for run in live}
    result = report(live, said)
    assert result["aims"]["simulated_requests_per_s_off_percent"] == {"want": "<= 15", "got": 10.0, "met": True}
    assert result["aims"]["simulated_pairs_in_wrong_order"]["met"]
    assert result["figures"]["burst_adaptive_requests_per_s_off_percent"] == pytest.approx(10.0)
    said["burst", "low_high"] = Means(2.1, 0.5, 0.1, 10.0)
    aims = report(live, said)["aims"]
    assert (
        aims["simulated_pairs_in_wrong_order"]["got"] == "burst: data_parallel and low_high"
        or not aims["simulated_pairs_in_wrong_order"]["met"]
    )
    assert not aims["simulated_requests_per_s_off_percent"]["met"]


def test_at_a_rate_throughput_says_nothing() -> None:
    said = {("at_50_percent", "adaptive"): Means(9.0, 0.5, 0.1, 10.0)}
    aims = report(at_rate(seen()), said)["aims"]
    assert "simulated_requests_per_s_off_percent" not in aims
    assert aims["simulated_jct_mean_s_off_percent"]["met"]


def test_systems_that_hardly_differ_have_no_order() -> None:
    live = bursts(2.0)
    said = {("burst", run.system.label): Means(2.0, 0.5, 0.1, 10.0) for run in live}
    said["burst", "balanced"] = Means(1.9, 0.5, 0.1, 10.0)  # the same as adaptive, live
    assert "adaptive and balanced" not in str(report(live, said)["aims"]["simulated_pairs_in_wrong_order"]["got"])
    assert mixed.TOLD_APART < 0.2


def instance(name: str, factor: float) -> LiveInstance:
    forms = (replace_form(form, factor) for form in (STEPS.prefill, STEPS.decode, STEPS.mixed))
    info = InstanceInfo(
        instance_id=name,
        generation=1,
        model="m",
        compatibility=Compatibility("f", "vllm", "1", 1, KvGeometry(10, 5, 64)),
        accelerator="cpu",
        dtype="float32",
        tensor_parallel=1,
        block_size=32,
        total_blocks=1300,
        max_model_len=2048,
        chunk_size=256,
        rpc="",
        http="",
        kv_endpoints=(),
        max_seqs=32,
        rates=Rates(step=StepRates(*forms)),
    )
    return LiveInstance(info, Role.DECODE, "here", 1, 32)


def replace_form(form: StepForm, factor: float) -> StepForm:
    return FormSteps(StepRates(form, form, form)).share(factor).rates.prefill


def twin() -> Twin:
    instances = (instance(FAST, 1.0), instance(SLOW, 2.8))
    return Twin(instances, learned(instances, {}), ControlPlane(0.01, 0.005, 0.002, 0.01, 3e8), SPEEDS)


def test_step_times_are_those_that_were_recorded_else_those_that_were_told() -> None:
    batches = [Batch((), count, 300 * count * k) for count in (1, 2, 4, 8) for k in (1, 2, 3, 4)]
    times = FormSteps(STEPS)
    records: list[StepRecord] = []
    now = 0.0
    for batch in batches:
        now += 2.0 * times.step_time_s(batch)
        records.append(
            StepRecord(
                number=len(records),
                cpu_s=0.0,
                ended_s=now,
                seconds=2.0 * times.step_time_s(batch) - 0.005,  # and a moment until the next
                prefill=batch.prefill,
                decode_count=batch.decode_count,
                decode_context_tokens=batch.decode_context_tokens,
            )
        )
    assert [seconds for _, seconds in lasting(records)][1:] == pytest.approx(
        [2.0 * times.step_time_s(batch) for batch in batches][1:]
    )
    found = learned((instance(FAST, 1.0),), {FAST: records})[FAST]
    assert found.decode_s(4, 1200) == pytest.approx(2.0 * STEPS.decode_s(4, 1200), rel=0.02)
    assert found.prefill == STEPS.prefill
    with pytest.raises(Unavailable, match="fast publishes no step times"):
        learned((replace(instance(FAST, 1.0), info=silent()),), {})


def silent() -> InstanceInfo:
    return msgspec.structs.replace(instance(FAST, 1.0).info, rates=Rates())


def test_decode_segments_are_the_steps() -> None:
    times = FormSteps(STEPS)
    ((steps, first, last),) = times.decode_segments(4, 1000, 10)
    assert (steps, first) == (10, times.decode_time_s(4, 1000))
    assert last == pytest.approx(times.decode_time_s(4, 1000 + 9 * 4))
    assert times.share(0.5).decode_time_s(4, 1000) == pytest.approx(first / 2)


def test_adaptive_is_not_behind_and_uses_both_in_the_simulated_pair(lengths: Workload) -> None:
    """As on the engines: everything at once, and as much as data-parallel can serve."""
    pair = twin()
    compared = (DATA_PARALLEL, LOW_HIGH, HIGH_LOW, BALANCED, ADAPTIVE)
    several = [burst(lengths, 60, seed) for seed in range(1, 5)]
    served = {one.label: fmean(pair.run(one, each, lengths).requests_per_s for each in several) for one in compared}
    assert served["adaptive"] > 1.05 * served["data_parallel"]
    assert served["adaptive"] > 0.95 * served["balanced"]
    assert served["adaptive"] > 1.3 * max(served["low_high"], served["high_low"])
    steady = replay(lengths, 0.9, 1.6, 90.0, 3)
    jct = {one.label: pair.run(one, steady, lengths).jct_mean_s for one in compared}
    assert jct["adaptive"] < 0.85 * jct["data_parallel"]
    assert jct["adaptive"] < 1.03 * jct["balanced"]


def test_requests_go_in_the_simulator_where_their_turn_sent_them_on_the_engines() -> None:
    few = Load("at", 0.5, Workload("x", np.arange(6) * 60.0, np.full(6, 300), np.full(6, 20)))
    ttft_s = {
        way: twin().run(DATA_PARALLEL, few, few.workload, [FAST] * fast + [SLOW] * (6 - fast)).ttft_mean_s
        for way, fast in (("fast", 6), ("half", 3), ("slow", 0))
    }
    assert ttft_s["slow"] > 1.5 * ttft_s["fast"]
    assert ttft_s["half"] == pytest.approx((ttft_s["fast"] + ttft_s["slow"]) / 2.0)


def test_a_pipeline_is_simulated(lengths: Workload) -> None:
    means = twin().pipeline(burst(lengths, 20, 3), lengths)
    alone = twin().run(HIGH_LOW, burst(lengths, 20, 3), lengths)
    assert 0.2 * alone.requests_per_s < means.requests_per_s < 5.0 * alone.requests_per_s
