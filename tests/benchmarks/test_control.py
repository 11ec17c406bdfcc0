"""`polyphase bench control` with real processes and a few instances: that it measures, not how well it turns out."""

import pytest

from benchmarks import control
from benchmarks.control import AIMS, _quantile_ms, run_control_bench


@pytest.mark.slow
def test_it_measures_monitor_and_scheduler_and_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SETTLE_S", 1.0)
    result = run_control_bench((2, 4), 2.0)  # CPU time has a grain of 10 ms
    for size in (2, 4):
        seen = result["figures"][str(size)]
        assert seen["heartbeats_per_s"] > 5 * size  # each load changes ten times a second
        assert seen["heartbeats_per_s"] > seen["idle_heartbeats_per_s"] > size
        assert seen["broadcast_bytes_per_s"] > 100
        assert 0 < seen["monitor_cores"] < 2
        assert 0 < seen["place_p50_ms"] <= seen["place_p99_ms"]
        assert seen["known_again_s"] >= seen["known_again_start_s"] > 0
    assert set(result["aims"]) == {f"{name} at 4" for name in AIMS}
    assert result["figures"]["growth_2_to_4"]["broadcast_bytes_per_s"] > 1


def test_a_quantile_is_the_bound_of_its_bucket() -> None:
    counts = {0.001: 90.0, 0.005: 99.0, 0.02: 100.0, float("inf"): 100.0}
    assert _quantile_ms(counts, 0.5) == 1.0
    assert _quantile_ms(counts, 0.99) == 5.0
    assert _quantile_ms(counts, 0.995) == 20.0
