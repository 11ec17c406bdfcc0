"""The commands: help, arguments and errors."""

import io
import json
import platform
import re
import sqlite3
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

import benchmarks.cli
from services.launcher import cli, cli_common, operate, state_file
from services.launcher.cli import migrate_url
from services.launcher.spec import Plan
from shared.errors import InvalidRequest, NotFound, Unavailable
from shared.runtime.keys import checked
from shared.wire.api import Operation
from tests.ports import free_port

RUN = CliRunner()
TOKEN = "a-secret-of-the-cluster"
DONE = {
    "operation_id": "7f3a",
    "instance_id": "p-0",
    "generation": 1,
    "from_role": "prefill",
    "to_role": "decode",
    "who": "ann",
    "started_s": 1.0,
    "drain_s": 1.0,
    "flip_s": 0.001,
    "result": "succeeded",
}
SAID = {"flip": "p-0 is now decode", "drain": "p-0 is drained", "resume": "p-0 gets work", "forget": "p-0 is forgotten"}


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
        ["top"],
        ["logs"],
        ["explain"],
        ["events"],
        ["requests"],
        ["operation"],
        ["policies"],
        ["proposals"],
        ["simulate"],
        ["keys"],
        ["keys", "add"],
        ["bench"],
        ["render"],
        ["render", "kubernetes"],
        ["migrate"],
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
        ("model: models/hole", "2: model: there is no folder"),
        ("model: models/demo\ngateway: {host: 0.0.0.0}", "3: gateway.host: listening on 0.0.0.0 needs API keys"),
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
    assert f"{file}:{said}" in capsys.readouterr().err
    assert not data.exists()


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    result = RUN.invoke(cli.app, ["keys", "add", "ann", "--file", str(file), "--rate", "2"])
    assert result.exit_code == 0
    assert result.stdout.startswith("pp-")
    assert "ann" in file.read_text()
    assert "curve_secret" in RUN.invoke(cli.app, ["keys", "curve"]).stdout
    made = yaml.safe_load(RUN.invoke(cli.app, ["keys", "token"]).stdout)["cluster_token"]
    assert checked(made, "the file") == made


@pytest.mark.parametrize(("met", "code"), [(True, 0), (False, 1)])
def test_a_bench_exits_0_iff_its_aims_are_met(monkeypatch: pytest.MonkeyPatch, met: bool, code: int) -> None:
    answer = {"figures": {"a_ms": 1.0}, "aims": {"a": {"want": 1, "got": 1, "met": met}}}
    monkeypatch.setattr(benchmarks.cli, "find_bench", lambda name: lambda: answer)
    result = RUN.invoke(cli.app, ["bench", "kv", "--json"])
    assert result.exit_code == code
    assert json.loads(result.stdout.splitlines()[-1])["ok"] is met


def test_predictor_takes_train_and_evaluate_only() -> None:
    assert RUN.invoke(cli.app, ["predictor", "dream"]).exit_code == 2


@pytest.mark.parametrize("what", ["flip", "drain", "resume", "forget"])
def test_operations_go_to_the_monitor(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    asked: list[tuple[object, ...]] = []

    async def act(what: str, instance: str, url: str, token: str, *, timeout_s: float, force: bool) -> Operation | None:
        asked.append((what, instance, url, token, force))
        return None if what == "forget" else msgspec.convert({**DONE, "kind": what}, Operation)

    monkeypatch.setattr(operate, "act", act)
    monkeypatch.setenv("POLYPHASE_CLUSTER_TOKEN", TOKEN)
    words = [what, "p-0", "--monitor", "http://m", *(["--force"] if what in ("flip", "drain") else [])]
    result = RUN.invoke(cli.app, words)
    assert result.exit_code == 0
    assert asked == [(what, "p-0", "http://m", TOKEN, what in ("flip", "drain"))]
    assert SAID[what] in result.stdout
    answer = json.loads(RUN.invoke(cli.app, [*words, "--json"]).stdout)
    assert answer["result"] == ("forgotten" if what == "forget" else "succeeded")
    assert answer.get("flip_s") == (None if what == "forget" else 0.001)


def test_without_a_suite_an_operation_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="polyphase up"):
        operate.monitor_url(tmp_path, "")


def test_a_file_of_simulated_runs_is_not_taken_for_a_live_bench() -> None:
    result = RUN.invoke(cli.app, ["bench", "policies", "--live", "--results", "runs.json"])
    assert result.exit_code == 2
    assert "repeats" in result.output  # a word of the reason, whatever the terminal makes of the rest


def test_version() -> None:
    result = RUN.invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    ours, engine, python = re.fullmatch(r"polyphase (\S+) \(vLLM (.+), Python (\S+)\)\n", result.output).groups()  # type: ignore[union-attr]
    assert ours == metadata.version("polyphase")
    assert python == platform.python_version()
    assert engine[0].isdigit() or engine == "not installed"


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "services.launcher.cli", "--version"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert said.startswith("polyphase ")


@pytest.mark.parametrize(
    ("words", "offered", "not_offered"),
    [
        ("flip p", {"p-0", "p-1"}, {"d-0"}),
        ("logs m", {"monitor"}, {"d-0"}),
        ("policies s", {"sjf"}, {"fcfs"}),
        ("policies dispatch=r", {"dispatch=random"}, {"random"}),
        ("up --cluster em", {"emulated-mixed"}, {"laptop"}),
        ("ex", {"explain"}, {"events"}),
    ],
)
def test_a_shell_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, offered: set[str], not_offered: set[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".polyphase" / "logs").mkdir(parents=True)
    (tmp_path / ".polyphase" / "logs" / "monitor.log").touch()
    plan = Plan(
        model="m",
        processes=(),
        instance_ids=("p-0", "p-1", "d-0"),
        api_url="http://a",
        monitor_url="http://m",
        scheduler_urls=(),
        predictor_url="",
        dashboard_url="",
        runs_control=True,
    )
    state_file.write(tmp_path / ".polyphase", state_file.describe(plan, ()))
    asked = {
        "_POLYPHASE_COMPLETE": "complete_bash",
        "COMP_WORDS": f"polyphase {words}",
        "COMP_CWORD": str(len(words.split())),
    }
    found = set(RUN.invoke(cli.app, [], prog_name="polyphase", env=asked).stdout.split())
    assert offered <= found
    assert not found & not_offered


def test_completion_without_a_suite_is_empty_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = {"_POLYPHASE_COMPLETE": "complete_bash", "COMP_WORDS": "polyphase flip p", "COMP_CWORD": "2"}
    result = RUN.invoke(cli.app, [], prog_name="polyphase", env=asked)
    assert result.stdout.strip() == ""


MET = {"want": "<= 2", "got": 1, "met": True}
MISSED = {"want": "<= 2", "got": 3, "met": False}


@pytest.mark.parametrize(("aims", "ok"), [({}, True), ({"a": MET}, True), ({"a": MET, "b": MISSED}, False)])
def test_ok_iff_every_aim_is_met(
    aims: dict[str, dict[str, object]], ok: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    text = io.StringIO()
    result = {"figures": {"x_ms": 1.5}, "aims": aims}
    assert cli_common.report(Console(file=text), result, as_json=True) is ok
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"ok": ok, "figures": {"x_ms": 1.5}, "aims": aims}
    assert "x_ms" in text.getvalue()


@pytest.mark.parametrize("name", sorted(benchmarks.cli.BENCHES))
def test_every_bench_is_there(name: str) -> None:
    assert callable(benchmarks.cli.find_bench(name))


def tables(file: Path) -> set[str]:
    with sqlite3.connect(file) as connection:
        return {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}


def test_the_command_makes_the_newest_schema(tmp_path: Path) -> None:
    file = tmp_path / "new.db"
    for _ in range(2):
        done = CliRunner().invoke(cli.app, ["migrate"], env={"POLYPHASE_DATABASE_URL": f"sqlite:///{file}"})
        assert done.exit_code == 0, done.output
    assert {"requests", "alembic_version"} <= tables(file)


async def test_a_database_that_does_not_come_up_is_named() -> None:
    began = time.monotonic()
    with pytest.raises(Unavailable, match="the database does not answer"):
        await migrate_url(f"postgresql://nobody@127.0.0.1:{free_port()}/none", 0.6)
    assert time.monotonic() - began >= 0.6


async def test_what_is_no_database_is_not_waited_for() -> None:
    with pytest.raises(InvalidRequest, match="database URL"):
        await migrate_url("mysql://x/y", 60.0)
