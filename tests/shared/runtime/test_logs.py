"""How loud a process's log is."""

import json
import logging
import subprocess
import sys

import pytest

from shared.runtime.logs import LogTail, keeping_levels


def test_what_a_library_does_to_the_root_logger_does_not_last() -> None:
    root, handler = logging.getLogger(), logging.NullHandler()
    root.addHandler(handler)
    before = root.level
    with keeping_levels():
        root.setLevel(logging.ERROR)
        handler.setLevel(logging.ERROR)
    assert (root.level, handler.level) == (before, logging.NOTSET)
    root.removeHandler(handler)


_SCRIPT = """
import logging
from shared.runtime.logs import LogTail, configure_logs, get_log
tail = LogTail(kept=2)
configure_logs("worker", "INFO", tail)
get_log("x").info("first")
get_log("x").info("second", number=2)
logging.getLogger("library").warning("third")
print("\\n".join(tail.newest(10)))
"""


def test_the_end_of_the_log_is_kept_as_it_was_written() -> None:
    ran = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
    kept = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [(line["event"], line["service"]) for line in kept] == [("second", "worker"), ("third", "worker")]
    written = [json.loads(line) for line in ran.stderr.splitlines()]
    assert [line["event"] for line in written] == ["first", "second", "third"]


def test_a_line_that_cannot_be_written_is_left_out_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)  # tells of it on stderr
    tail, log = LogTail(), logging.getLogger("careless")
    log.addHandler(tail)
    try:
        log.warning("%d tokens", "many")
        log.warning("%d tokens", 7)
    finally:
        log.removeHandler(tail)
    assert tail.newest(10) == ["7 tokens"]
