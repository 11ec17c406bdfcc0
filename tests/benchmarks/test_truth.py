from statistics import median
from typing import Any

import pytest

from benchmarks import truth
from shared.domain.job import Phase
from shared.wire.api.scheduler import StoredRequest


def row(number: int, of_round: int, **changes: Any) -> StoredRequest:
    fields: dict[str, Any] = {
        "phase": Phase.COMPLETED,
        "job_id": f"cmpl-truth.{of_round}.{number}.-0-abc",
        "gateway_id": "g",
        "arrived_s": 0.0,
        "prompt_tokens": 100,
        "output_tokens": 20,
        "prefill_instance": "p",
        "decode_instance": "d",
        "split": 100,
        "slo": "default",
        "outcome": "length",
        "ttft_s": 0.1,
        "tpot_s": 0.02,
        "slo_met": True,
        "caller": "",
        "longest_gap_s": None,
        "gaps": 0,
        "gaps_over": 0,
        "predicted_ttft_s": 0.1,
        "predicted_tpot_s": 0.02,
        "scheduler_id": "s",
        "final": True,
        "updated_s": 1.0,
    }
    return StoredRequest(**{**fields, **changes})


def test_errors_spread_and_aims() -> None:
    planned = truth.shots(truth.EMULATED)
    assert [shot.number for shot in planned] == list(range(len(planned)))
    assert {shot.phase for shot in planned} == {0, 1, 2}
    times = {}
    for of_round, ttft_s in enumerate((9.0, 0.1, 0.08, 0.1)):  # the first round does not count
        for shot in planned:
            made = row(shot.number, of_round, ttft_s=ttft_s)
            key = truth._key_of(made.job_id)
            assert key == (of_round, shot.number)
            times[key] = truth.times_of(made)
    found = truth.judged("pair", truth.EMULATED, planned, times)
    figures = found["figures"]
    assert figures["pair_ttft_median"] == figures["pair_ttft_spread"] == 0.0
    assert figures["pair_ttft_p90"] == 0.25
    assert found["aims"]["pair_ttft_median"]["met"]
    assert not found["aims"]["pair_ttft_p90"]["met"]


def test_unpredicted_requests_miss_the_aim() -> None:
    planned = truth.shots(truth.EMULATED)
    times = {(1, shot.number): truth.times_of(row(shot.number, 1, predicted_ttft_s=None)) for shot in planned}
    found = truth.judged("pair", truth.EMULATED, planned, times)
    assert not found["aims"]["pair_ttft_median"]["met"]


def test_the_simulation_predicts_every_request_of_a_round() -> None:
    planned = truth.shots(truth.EMULATED)
    times = truth.simulated_times(truth._pair(), planned, 2)
    assert set(times) == {(of_round, shot.number) for of_round in range(2) for shot in planned}
    for (_, number), each in times.items():
        assert each.predicted_ttft_s is not None
        assert each.predicted_ttft_s > 0.0
        assert (each.tpot_s is None) == (planned[number].answer < truth.FEWEST_TOKENS)
    errors = [abs((each.predicted_ttft_s or 0.0) / each.ttft_s - 1.0) for each in times.values()]
    assert median(errors) < 0.3


@pytest.mark.parametrize("job_id", ["cmpl-1", "truth.", "cmpl-truth.1"])
def test_other_jobs_are_no_requests_of_the_bench(job_id: str) -> None:
    assert truth._key_of(job_id) is None
