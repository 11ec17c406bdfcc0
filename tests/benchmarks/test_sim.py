"""The simulator's own bench, small."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import sim


def test_the_bench_runs_without_public_traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sim, "STAND_IN_REQUESTS", 400)
    small: dict[str, Any] = {"wall_s": 1.0, "cpu_s": 1.0, "events": 10, "completed": 2, "peak_gib": 0.1}
    monkeypatch.setattr(sim, "_in_own_process", lambda work: small)
    result = sim.run_sim_bench(tmp_path)
    assert "drawn lengths" in result["notes"][0]
    assert result["figures"]["macro_step_difference_relative"] < 1e-9
    assert result["figures"]["trace_requests"] == 400
    assert set(result["aims"]) >= {"macro-steps equal stepping (relative)", "peak memory of that run"}


def test_the_large_run_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "LARGE_REQUESTS", 300)
    monkeypatch.setattr(sim, "LARGE_INSTANCES", 16)
    got = sim.large_run()
    assert got["completed"] == 300
    assert got["peak_gib"] > 0.0


def test_half_of_each_kind_prefills() -> None:
    cluster = sim.mixed_cluster(16)
    assert len({spec.instance_id for spec in cluster}) == 16
    assert sum(spec.role.value == "prefill" for spec in cluster) == 8
    assert len({id(spec.model) for spec in cluster}) == 4  # alike instances share what they remember
