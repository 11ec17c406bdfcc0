"""`polyphase calibrate tables` on a small table in Vidur's form."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.launcher.cli import app
from shared.cost.efficiency import EfficiencyTable
from shared.errors import NotFound


def test_a_folder_without_tables(tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["calibrate", "tables", str(tmp_path), "--out", str(tmp_path / "e.yaml")])
    assert isinstance(answer.exception, NotFound)
    assert "no operator tables" in answer.exception.message


@pytest.mark.slow
def test_public_tables_give_an_efficiencies_file(tmp_path: Path) -> None:
    profiles = Path(__file__).resolve().parents[4] / "shared" / "data" / "profiles"
    if not profiles.is_dir():
        pytest.skip("no public profiles beside the repository")
    out = tmp_path / "efficiencies.yaml"
    answer = CliRunner().invoke(app, ["calibrate", "tables", str(profiles), "--out", str(out), "--json"])
    assert answer.exit_code == 0, answer.output
    assert "naive_mape_percent" in answer.output
    assert "A100-SXM-80" in EfficiencyTable.from_file(out).fitted()
