"""`bench mixed`: its systems, its loads, its aims, and the pair in the simulator."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
import pytest

from benchmarks.experiment import Means
from benchmarks.mixed import (
    ADAPTIVE,
    BALANCED,
    BURST,
    DATA_PARALLEL,
    FAST,
    HIGH_LOW,
    LOW_HIGH,
    SLOW,
    SYSTEMS,
    FormSteps,
    Twin,
    conversations,
    drawn,
    over_others,
    recorded_rates,
    replay,
    with_pauses,
)
from benchmarks.results import Figures
from shared.cost.rates_file import ControlPlane
from shared.cost.step import Batch
from shared.domain.instance import Compatibility, KvGeometry, Role
from shared.domain.rates import Rates, StepForm, StepRates
from shared.errors import Unavailable
from shared.sim.measured import LiveInstance
from shared.sim.workload import Workload
from shared.wire.messages import StepRecord
from tests.services.fake_worker import make_info

SPEEDS = {FAST: 2.8, SLOW: 1.0}
STEPS = StepRates(
    StepForm(0.035, 7e-4, 1e-7), StepForm(0.035, 0.0, 0.0, 2.5e-3, 3e-6), StepForm(0.06, 7e-4, 1e-7, 2.5e-3, 5e-6)
)


@pytest.fixture(scope="module")
def lengths() -> Workload:
    return conversations(Path("nowhere"))


def test_the_policies_of_every_system_are_valid() -> None:
    for label, system in SYSTEMS.items():
        assert system.arm(label, SPEEDS).specs.keys() == {"placement", "split", "dispatch"}
    routes = SYSTEMS[DATA_PARALLEL].arm(DATA_PARALLEL, SPEEDS).specs["placement"]
    assert routes is not None
    assert routes.parameters["routes"] == [["", FAST, 2.8], ["", SLOW, 1.0]]


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


AT_50 = "at_50_percent"
RATES = {DATA_PARALLEL: 1.8, LOW_HIGH: 1.0, HIGH_LOW: 0.8, BALANCED: 2.0, ADAPTIVE: 2.0}
AT_RATE = {"ttft_p99_s": 2.0, "itl_p99_s": 0.4, "jct_mean_s": 10.0}
GOOD = {"ttft_p99_s": 2.0, "itl_p99_s": 0.19, "jct_mean_s": 6.9}


def bursts(*left_out: str, **rates: float) -> list[dict[str, Figures]]:
    found = {name: {"requests_per_s": rate} for name, rate in (RATES | rates).items() if name not in left_out}
    return [found] * 3


def at_rate(**adaptive: float) -> list[dict[str, Figures]]:
    return [{DATA_PARALLEL: AT_RATE, BALANCED: GOOD | {"itl_p99_s": 0.2, "jct_mean_s": 7.0}, ADAPTIVE: GOOD | adaptive}]


@pytest.mark.parametrize(
    ("load", "rounds", "missed"),
    [
        (AT_50, at_rate(), set()),
        (BURST, bursts(), set()),
        (BURST, bursts(adaptive=1.85, balanced=1.85), {"throughput_over_data_parallel"}),
        (BURST, bursts(adaptive=1.79, balanced=1.79),
            {"throughput_over_data_parallel", "throughput_over_better_disaggregation"}),
        (BURST, bursts(balanced=2.2), {"throughput_over_balanced"}),
        (BURST, bursts(BALANCED), {"throughput_over_balanced"}),  # not measured
        (AT_50, at_rate(itl_p99_s=0.21), {"itl_p99_over_data_parallel", "itl_p99_over_balanced"}),
        (AT_50, at_rate(jct_mean_s=7.1), {"jct_mean_over_data_parallel"}),
        (AT_50, at_rate(ttft_p99_s=2.1), {"ttft_p99_over_data_parallel", "ttft_p99_over_balanced"}),
    ],
)  # fmt: skip
def test_aims(load: str, rounds: Sequence[dict[str, Figures]], missed: set[str]) -> None:
    aims = over_others(load, rounds)["aims"]
    assert {name.removeprefix(f"{AT_50}_") for name, aim in aims.items() if not aim["met"]} == missed


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
    several = [drawn(lengths, 60, seed) for seed in range(1, 5)]
    served = {
        name: fmean(60 / twin.run(name, each, lengths).outcomes.jct_s.max() for each in several) for name in compared
    }
    assert served["adaptive"] > 1.05 * served["data_parallel"]
    assert served["adaptive"] > 0.95 * served["balanced"]
    assert served["adaptive"] > 1.3 * max(served["low_high"], served["high_low"])
    steady = replay(lengths, 1.6, 90.0, 3)
    jct = {name: Means.from_result(twin.run(name, steady, lengths)).jct for name in compared}
    assert jct["adaptive"] < 0.85 * jct["data_parallel"]
    assert jct["adaptive"] < 1.03 * jct["balanced"]


def test_requests_go_in_the_simulator_where_their_turn_sent_them_on_the_engines(twin: Twin) -> None:
    few = Workload("x", np.arange(6) * 60.0, np.full(6, 300), np.full(6, 20))
    fast, half, slow = (
        Means.from_result(twin.run(DATA_PARALLEL, few, few, [FAST] * count + [SLOW] * (6 - count))).ttft
        for count in (6, 3, 0)
    )
    assert slow > 1.5 * fast
    assert half == pytest.approx((fast + slow) / 2.0)
