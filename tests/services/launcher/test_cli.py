"""The command line: what is there, and how it fails."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.launcher import cli, measuring, operate
from shared.errors import NotFound

RUN = CliRunner()


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["up"],
        ["demo"],
        ["status"],
        ["flip"],
        ["drain"],
        ["resume"],
        ["forget"],
        ["keys"],
        ["keys", "add"],
        ["bench"],
    ],
)
def test_help(words: list[str]) -> None:
    result = RUN.invoke(cli.app, [*words, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_errors_of_ours_are_one_line_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["polyphase", "status", "--data-dir", str(tmp_path)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "polyphase up" in error


def test_up_refuses_a_bad_file_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("name: x\nmodel: y\ninstances: [{id: p, role: prefill, blok_size: 1}]\n")
    result = RUN.invoke(cli.app, ["up", "--cluster", str(file), "--data-dir", str(tmp_path / "data")])
    assert result.exit_code == 1
    assert "blok_size" in str(result.exception)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: models/hole", "model: there is no folder"),
        ("model: models/demo\ngateway: {host: 0.0.0.0}", "gateway.host: listening on 0.0.0.0 needs API keys"),
    ],
)
def test_up_says_what_would_fail_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    file, data = tmp_path / "c.yaml", tmp_path / "data"
    file.write_text(f"name: x\n{text}\ninstances: [{{id: p, role: prefill}}]\n")
    monkeypatch.setattr(sys, "argv", ["polyphase", "up", "--cluster", str(file), "--data-dir", str(data)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 1
    assert f"{file}: {said}" in capsys.readouterr().err
    assert not data.exists()


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    result = RUN.invoke(cli.app, ["keys", "add", "ann", "--file", str(file), "--rate", "2"])
    assert result.exit_code == 0
    assert result.stdout.startswith("pp-")
    assert "ann" in file.read_text()
    assert "curve_secret" in RUN.invoke(cli.app, ["keys", "curve"]).stdout


@pytest.mark.parametrize(("met", "code"), [(True, 0), (False, 1)])
def test_a_bench_exits_0_iff_its_aims_are_met(monkeypatch: pytest.MonkeyPatch, met: bool, code: int) -> None:
    answer = {"figures": {"a_ms": 1.0}, "aims": {"a": {"want": 1, "got": 1, "met": met}}}
    monkeypatch.setattr(measuring, "find_bench", lambda name: lambda: answer)
    result = RUN.invoke(cli.app, ["bench", "kv", "--json"])
    assert result.exit_code == code
    assert json.loads(result.stdout.splitlines()[-1])["ok"] is met


def test_predictor_takes_train_and_evaluate_only() -> None:
    assert RUN.invoke(cli.app, ["predictor", "dream"]).exit_code == 2


@pytest.mark.parametrize("what", ["flip", "drain", "resume", "forget"])
def test_operations_go_to_the_monitor(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    asked: list[tuple[object, ...]] = []

    async def act(what: str, instance: str, url: str, *, timeout_s: float, force: bool) -> dict[str, object]:
        asked.append((what, instance, url, force))
        return {"instance_id": instance, "flip_s": 0.001}

    monkeypatch.setattr(operate, "act", act)
    words = [what, "p-0", "--monitor", "http://m", *(["--force"] if what in ("flip", "drain") else [])]
    result = RUN.invoke(cli.app, words)
    assert result.exit_code == 0
    assert asked == [(what, "p-0", "http://m", what in ("flip", "drain"))]
    assert f"{what} p-0" in result.stdout
    assert json.loads(RUN.invoke(cli.app, [*words, "--json"]).stdout)["flip_s"] == 0.001


def test_without_a_suite_an_operation_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="polyphase up"):
        operate.monitor_url(tmp_path, "")


def test_a_file_of_simulated_runs_is_not_taken_for_a_live_bench() -> None:
    result = RUN.invoke(cli.app, ["bench", "policies", "--live", "--results", "runs.json"])
    assert result.exit_code == 2
    assert "anew" in result.output  # a word of the reason, whatever the terminal makes of the rest
