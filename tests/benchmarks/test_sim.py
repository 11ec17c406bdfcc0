"""The simulator's own bench, small."""

from pathlib import Path

import pytest

from benchmarks import sim


def test_the_bench_runs_without_public_traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sim, "SYNTHETIC_REQUESTS", 400)
    monkeypatch.setattr(sim, "LARGE_REQUESTS", 300)
    monkeypatch.setattr(sim, "LARGE_INSTANCES", 16)
    monkeypatch.setattr(sim, "_in_own_process", lambda work: work())
    found = sim.run_sim_bench(tmp_path)
    assert "synthetic requests" in found["notes"][0]
    assert found["figures"]["macro_step_difference_relative"] < 1e-9
    assert (found["figures"]["trace_requests"], found["figures"]["large_completed"]) == (400, 300)
    assert set(found["aims"]) >= {"macro-steps equal stepping (relative)", "peak memory of that run"}


def test_half_of_each_kind_prefills() -> None:
    cluster = sim.mixed_cluster(16)
    assert len({spec.instance_id for spec in cluster}) == 16
    assert sum(spec.role.value == "prefill" for spec in cluster) == 8
    assert len({id(spec.model) for spec in cluster}) == 4  # alike instances share their caches
