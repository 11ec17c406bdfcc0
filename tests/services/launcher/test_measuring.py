"""Commands that measure: the JSON line and the exit code say the same."""

import io
import json

import pytest
from rich.console import Console

from services.launcher import cli_common

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


@pytest.mark.parametrize("name", sorted(cli_common.BENCHES))
def test_every_bench_is_there(name: str) -> None:
    assert callable(cli_common.find_bench(name))
