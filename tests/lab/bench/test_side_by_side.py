"""Rows of policies side by side, of simulated and of live runs, and the table that is printed of them."""

import io
import json

import pytest
from rich.console import Console

from lab.bench.comparison import COLUMNS, of_result, of_samples
from lab.bench.scenarios import SLO, Scenario
from lab.calibrate.target import Sample, Shot
from services.launcher.cli_common import report


def test_a_simulated_run() -> None:
    result = Scenario("fast_slow", "conversation").result("adaptive", 4.0, 60)
    row = of_result({"policy": "adaptive"}, result, SLO)
    assert list(row) == ["policy", "attainment", *COLUMNS]
    gaps = result.outcomes.longest_gap_s
    assert row["longest_gap_max_s"] == pytest.approx(gaps[gaps > 0.0].max(), abs=1e-4)
    assert row["attainment"] == round(float(result.outcomes.met(SLO).mean()), 4)


def test_a_live_run_counts_a_pause() -> None:
    steady = Sample("a", Shot(10, 5), 0.0, 0.2, 0.6, (0.1, 0.1, 0.1, 0.1))
    paused = Sample("b", Shot(10, 5), 0.0, 0.2, 0.6, (0.02, 0.02, 0.02, 0.34))
    single = Sample("c", Shot(10, 1), 0.0, 0.2, 0.2)
    row = of_samples({"policy": "p"}, [steady, paused, single], SLO)
    assert (steady.met(SLO), paused.met(SLO), single.met(SLO)) == (True, False, True)
    assert row["attainment"] == pytest.approx(2 / 3, abs=1e-4)
    assert (row["ttft_p50_s"], row["jct_p50_s"], row["longest_gap_max_s"]) == (0.2, 0.6, 0.34)
    assert of_samples({}, [single], SLO)["longest_gap_p90_s"] is None


def test_the_table_is_printed_and_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"scenario": "s", "policy": "p", "goodput_per_s": 3.0, "longest_gap_p90_s": 0.25, "ttft_p50_s": None}]
    console = Console(file=io.StringIO(), width=120)
    assert report(console, {"figures": {}, "aims": {}, "tables": {"side by side": rows}}, as_json=True)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "goodput/s" in text
    assert "longest gap p90, s" in text
    assert "–" in text
    assert json.loads(capsys.readouterr().out)["tables"]["side by side"] == rows
