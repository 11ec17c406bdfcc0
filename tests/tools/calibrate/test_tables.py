"""`polyphase calibrate tables` on a small table in Vidur's form."""

import json
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
def test_a_public_table_gives_an_efficiencies_file(tmp_path: Path, profiles: Path) -> None:
    """One table: fitting all of them takes minutes, and how well it does is judged by `bench cost`."""
    tables = tmp_path / "tables"
    (tables / "vidur").mkdir(parents=True)
    (tables / "vidur" / "a100_mlp.csv").symlink_to(profiles / "vidur" / "a100_Llama-2-7b-hf_mlp.csv")
    out = tmp_path / "efficiencies.yaml"
    answer = CliRunner().invoke(app, ["calibrate", "tables", str(tables), "--out", str(out), "--json"])
    assert answer.exit_code == 0, answer.output
    result = json.loads(answer.stdout.splitlines()[-1])
    assert result["ok"], result
    assert any(name.startswith("A100-SXM-80 gemm (vidur)") for name in result["figures"])
    written, shipped = EfficiencyTable.from_file(out), EfficiencyTable.from_file()
    assert written.fitted() == shipped.fitted()  # on top of what there was
    assert written.for_device("A100-SXM-80") != shipped.for_device("A100-SXM-80")
