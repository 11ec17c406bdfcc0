"""How loud a process's log is."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from shared.runtime import logs
from shared.runtime.logs import KINDS, QUIET_S, Kind, Limiter, LogTail, Quiet, QuietHandler, keeping_levels


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


# A trouble is one line, and then one in half a minute with the number left out. On a clock that the test turns
AWAY = Kind("store", logging.ERROR, "database failed")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Log:
    """The whole chain as a process has it, into memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.stream = Clock(), io.StringIO()
        monkeypatch.setattr(logs, "Quiet", lambda: Quiet(Limiter(self.clock)))
        monkeypatch.setattr(logs, "QuietHandler", lambda quiet, _: QuietHandler(quiet, self.stream))
        logs.configure_logs("test")
        self.ours, self.others = structlog.get_logger("a.module"), logging.getLogger("a.library")

    def take(self) -> list[dict[str, Any]]:
        """Lines since the last call."""
        text = self.stream.getvalue()
        self.stream.seek(0)
        self.stream.truncate()
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield Log(monkeypatch)
    root.handlers[:] = before
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_the_first_of_a_kind_then_one_in_a_while_with_the_number_left_out() -> None:
    clock = Clock()
    limiter = Limiter(clock)
    assert limiter.take(AWAY) == 0
    for _ in range(199):
        clock.now += 0.1
        assert limiter.take(AWAY) is None
    clock.now = 1000.0 + QUIET_S
    assert limiter.take(AWAY) == 199
    assert limiter.take(AWAY) is None


def test_what_was_left_out_is_told_once_though_nothing_more_comes() -> None:
    clock = Clock()
    limiter = Limiter(clock)
    other = AWAY._replace(about=("table=requests",))
    for kind in (AWAY, AWAY, AWAY, other):
        limiter.take(kind)
    assert limiter.due() == []
    clock.now += QUIET_S
    assert limiter.due() == [(AWAY, 2)]
    assert limiter.due() == []
    assert limiter.take(AWAY) == 0


def test_as_many_kinds_as_somebody_makes_up_take_bounded_memory() -> None:
    limiter = Limiter(Clock())
    for number in range(3 * KINDS):
        assert limiter.take(Kind("x", logging.ERROR, f"{number}")) == 0
    assert len(limiter._kinds) == KINDS


def test_ten_a_second_for_twenty_seconds_is_one_line_each(log: Log) -> None:
    for number in range(200):
        log.ours.error("database failed", step="write", error=f"attempt {number}")
        log.ours.error("database failed", step="migration", error="another kind")
        log.others.warning("import of %s failed: %s", f"job-{number}", "a reason")
        log.clock.now += 0.1
    told = [(line["event"], line.get("step"), line["level"]) for line in log.take()]
    assert told == [
        ("database failed", "write", "error"),
        ("database failed", "migration", "error"),
        ("import of job-0 failed: a reason", None, "warning"),
    ]
    log.clock.now += 20.0
    log.ours.error("database failed", step="write", error="again")
    lines = log.take()
    again = [line for line in lines if line["event"] == "database failed"]
    assert [(line["error"], line["left_out"]) for line in again] == [("again", 199)]
    rest = {line["line"]: line["left_out"] for line in lines if "line" in line}
    assert rest == {"database failed step=migration": 199, "import of %s failed: %s": 199}


def test_each_instance_and_each_state_is_a_trouble_of_its_own(log: Log) -> None:
    for _ in range(3):
        for name in ("p0", "d0"):
            for state in ("unresponsive", "dead"):
                log.ours.warning("instance changed", instance_id=name, state=state)
    assert len(log.take()) == 4


def test_lines_about_jobs_are_limited_and_other_news_are_not(log: Log) -> None:
    for number in range(5):
        log.ours.info("attempt failed", job_id=f"job-{number}")
        log.ours.info("policies followed", revision=number)
    told = [line["event"] for line in log.take()]
    assert told.count("attempt failed") == 1
    assert told.count("policies followed") == 5


def test_unlike_crashes_are_unlike_kinds(log: Log) -> None:
    for error in (ValueError("a"), ValueError("b"), KeyError("c")):
        log.ours.error("job crashed", job_id="j", exc_info=error)
        try:
            raise error
        except Exception:
            log.others.exception("it crashed")
    lines = log.take()
    assert len(lines) == 4
    assert sum("KeyError" in line["exception"] for line in lines) == 2


def test_texts_that_are_filled_in_before_are_one_kind_by_how_they_begin(log: Log) -> None:
    for number in range(3):
        logging.getLogger("asyncio").error(f"Task exception was never retrieved\nfuture: <Task {number}>")
    assert len(log.take()) == 1


def test_a_trace_is_named_in_the_lines_of_its_task(log: Log) -> None:
    logs.in_logs("4bf92f3577b34da6a3ce929d0e0e4736")
    log.ours.warning("job failed", job_id="j")
    assert [line["trace_id"] for line in log.take()] == ["4bf92f3577b34da6a3ce929d0e0e4736"]
