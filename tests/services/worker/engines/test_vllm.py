"""The real engine under requests that no front end lets through: each fails alone, and the others keep their pace."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.alone]
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engine_script.py")), str(port)],
        cwd=ROOT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=250,
        check=False,
    )
    result = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert result, run.stdout[-2000:] + run.stderr[-6000:]
    answer: dict[str, Any] = json.loads(result[0].removeprefix("RESULT "))
    return answer


def test_a_request_that_cannot_be_computed_fails_alone_and_says_why(found: dict[str, Any]) -> None:
    ends = found["refusals"]["ends"]
    assert {name: end[0] for name, end in ends.items()} == dict.fromkeys(ends, "refused") | {"grammar": "error"}
    assert ends["too long"][1] == "a prompt of 3995 tokens; it must have 1 to 2047"
    assert "token ids are 0 to 4095" in ends["not a token"][1]
    assert found["refusals"]["steady"] == ["length", 300]


def test_a_dear_grammar_holds_up_nobody_and_its_abort_frees_all(found: dict[str, Any]) -> None:
    grammars = found["grammars"]
    assert grammars["fine"] in ("length", "stop")
    assert grammars["compiling"]
    assert grammars["gap_s"] < 1.0  # the compilation takes many times as long
    assert found["freed"]["free"] == found["freed"]["total"]
    assert found["freed"]["waiting"] == 0


def test_an_engine_that_waits_for_a_grammar_does_not_spin(found: dict[str, Any]) -> None:
    assert 0 <= found["grammars"]["turns_a_second"] < 1500


def test_a_full_staging_pool_does_not_hold_up_the_engine(found: dict[str, Any]) -> None:
    staging = found["staging"]
    assert staging["refused"] > 20
    assert staging["held"] > 0
    assert staging["refusals_s"] < 0.01 * staging["refused"]
