"""The cause of a process's end, out of the logs that processes leave."""

import json
from pathlib import Path

import pytest

from services.launcher import child_process

TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    main()\n'


def line(**entry: str) -> str:
    return json.dumps(entry)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (f"{TRACE}shared.errors.InvalidRequest: listening on 0.0.0.0 needs API keys\n", "needs API keys"),
        (f"{TRACE}KeyError: 'a'\n\nDuring handling:\n\n{TRACE}ValueError: b\n", "ValueError: b"),
        (f"{TRACE}OSError: no such repository\nnanobind: leaked 3!\n - leaked function\n", "no such repository"),
        # What uvicorn logs of a lifespan that failed, and what it says then.
        (line(event=f"{TRACE}OSError: no\n", level="error") + "\n" + line(event="Exit", level="error"), "OSError: no"),
        (line(event="the engine died", level="critical", exception=f"{TRACE}RuntimeError: gone"), "RuntimeError: gone"),
        (line(event="refused", level="error", reason="another model") + "\nbye\n", "refused: another model"),
        ("Fatal Python error: Segmentation fault\n\nThread 1 (most recent call first):\n  File x\n", "Segmentation"),
        ("no such model\n\n", "no such model"),
        ("", "its log is empty"),
        ("{not json\n[1]\nlast\n", "last"),
    ],
)
def test_cause(tmp_path: Path, text: str, cause: str) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    assert cause in child_process.cause_of(log)


def test_an_earlier_runs_fault_is_not_this_ones(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert child_process.log_size(log) == 0
    log.write_text(f"{TRACE}ValueError: yesterday\n")
    since = child_process.log_size(log)
    with log.open("a") as more:
        more.write("port 1 is taken\n")
    assert child_process.cause_of(log, since) == "port 1 is taken"


def test_a_complaint_of_a_running_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert child_process.last_error(log) == ""
    log.write_text(line(event="the cluster refuses this instance", level="error", reason="other weights") + "\nmore\n")
    assert child_process.last_error(log) == "the cluster refuses this instance: other weights"
