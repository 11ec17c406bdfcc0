"""The table that gateway processes share: real processes, and a file that is not what it should be."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.admission import Admissions
from gateway.auth import ApiKey, KeyRates
from gateway.settings import GatewaySettings
from gateway.table import Counts, Kind, ServedTokens, SharedTable, make_table, shared_table
from shared.errors import Busy, InvalidRequest

ROOT = Path(__file__).parents[2]


class Process:
    """A process of the table."""

    def __init__(self, path: Path, number: int, max_jobs: int = 10) -> None:
        command = [sys.executable, "-m", "tests.gateway.process_of_table", str(path), str(number), str(max_jobs)]
        pipe = subprocess.PIPE
        self.running = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)

    def tell(self, command: str, argument: object = 0) -> None:
        assert self.running.stdin is not None
        self.running.stdin.write(f"{command} {argument}\n")
        self.running.stdin.flush()

    def said(self) -> Any:
        assert self.running.stdout is not None
        return json.loads(self.running.stdout.readline())

    def ask(self, command: str, argument: object = 0) -> Any:
        self.tell(command, argument)
        return self.said()

    def kill(self) -> None:
        self.running.send_signal(signal.SIGKILL)
        self.running.communicate()


@contextmanager
def processes(path: Path, *numbers: int, max_jobs: int = 10) -> Iterator[list[Process]]:
    """Those of these numbers, started."""
    started = [Process(path, number, max_jobs) for number in numbers]
    try:
        for each in started:
            assert each.said() == {"ready": True}
        yield started
    finally:
        for each in started:
            each.kill()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "gateways.table"
    make_table(path, 2, 2)
    return path


def test_a_bound_holds_for_all_processes_together_and_a_killed_one_leaves_nothing(path: Path) -> None:
    with processes(path, 0, 1) as (zero, one):
        for number in range(5):  # the share of a caller is half of ten
            assert (zero, one)[number % 2].ask("admit", "a")["jobs"] == number + 1
        refused = one.ask("admit", "a")
        assert refused["error"].startswith("5 jobs of 'a' are waiting")
        assert refused["retry_after_s"] == 60.0
        assert zero.ask("admit", "b")["jobs"] == 6
        assert zero.ask("tokens", 900)["tokens"] == 900
        assert (
            one.ask("tokens", 200)["error"] == "900 prompt tokens are waiting and this job adds 200; the limit is 1000"
        )
        zero.kill()
        with processes(path, 0) as (successor,):
            assert successor.ask("admit", "b") == {"jobs": 3, "tokens": 0}
            assert one.ask("admit", "a") == {"jobs": 4, "tokens": 0}


def test_no_more_are_let_in_than_may_be_however_many_ask_at_once(path: Path) -> None:
    """Of two that ask for the last place at once both may be refused; so it may be one fewer."""
    with processes(path, 0, 1, max_jobs=2000) as both:
        for each in both:
            each.tell("many", 1000)
        assert 999 <= sum(each.said()["let_in"] for each in both) <= 1000
        for each in both:
            each.tell("rush", 500)
        assert sum(each.said()["let_in"] for each in both) == 40


def test_a_process_that_dies_in_the_midst_of_a_change_holds_nobody_up(path: Path) -> None:
    with processes(path, 0, 1) as (zero, one):
        assert zero.ask("lock") == {"locked": True}
        held = one.ask("take")
        assert held["error"] == "another gateway process does not respond; try again"
        assert held["retry_after_s"] == 1.0
        zero.kill()
        assert one.ask("take") == {"jobs": 0, "tokens": 0}


def test_a_number_is_one_process_alone(path: Path) -> None:
    with processes(path, 0):
        other = Process(path, 0)
        assert other.said()["error"] == f"shared_table: {path}: another process is number 0 already"
        other.kill()


def test_jobs_of_either_kind_are_counted_apart_and_what_leaves_everywhere_is_one_rate(path: Path) -> None:
    table, other = SharedTable(path, 0), SharedTable(path, 1)
    counts = [Counts(each, Kind.OTHERS) for each in (table, other)]
    yields = Counts(table, Kind.DELAYED)
    counts[0].add_jobs("a", 2)
    counts[1].add_jobs("a", 3)
    yields.add_jobs("a", 1)
    assert [each.jobs for each in (*counts, yields)] == [5, 5, 1]
    assert [each.own_jobs for each in (*counts, yields)] == [2, 3, 1]
    assert counts[0].jobs_of("a") == 5
    counts[0].add_tokens("a", 20)
    counts[1].add_tokens("a", 30)
    yields.add_tokens("a", 7)
    assert [(each.tokens, each.tokens_of("a")) for each in (*counts, yields)] == [(50, 50), (50, 50), (7, 7)]
    counts[0].job_left()
    alone = counts[1].left_per_s()
    counts[1].job_left()
    assert alone > 0
    assert counts[0].left_per_s() == pytest.approx(2 * alone, rel=0.1)
    assert yields.left_per_s() == 0.0
    table.close()
    assert (counts[1].jobs, counts[1].jobs_of("a"), counts[1].tokens_of("a")) == (3, 3, 30)
    other.close()


def test_what_each_process_has_served_a_caller_the_others_know_until_it_ends(path: Path) -> None:
    tables = [SharedTable(path, number) for number in (0, 1)]
    first, second = (ServedTokens(table) for table in tables)
    first.note("a", 3.0)
    first.note("a", 4.5)
    second.note("b", 1.0)
    assert [second.elsewhere(name) for name in "ab"] == [7.5, 0.0]
    assert [first.elsewhere(name) for name in "ab"] == [0.0, 1.0]
    tables[0].close()
    assert second.elsewhere("a") == 0.0
    tables[1].close()


def test_what_one_process_took_of_a_keys_rate_the_other_has_not(path: Path) -> None:
    key = ApiKey("a", "", requests_per_s=0.5, burst=2)
    tables = [SharedTable(path, number) for number in (0, 1)]
    rates = [KeyRates(table) for table in tables]
    rates[0].check(key)
    rates[1].check(key)
    with pytest.raises(Busy, match=r"'a' is over its limit of 0\.5 requests/s") as refused:
        rates[0].check(key)
    assert refused.value.retry_after_s == pytest.approx(2.0, abs=0.1)
    rates[0].check(ApiKey("free", ""))
    for table in tables:
        table.close()


def test_admissions_without_keys_count_everybody_as_one(path: Path) -> None:
    settings = GatewaySettings(schedulers=("s",), model="m", max_queued_jobs=2)
    tables = [SharedTable(path, number) for number in (0, 1)]
    first, second = (Admissions(settings, (), table) for table in tables)
    with first.for_class("default").admit(""), second.for_class("default").admit(""), pytest.raises(Busy):
        first.for_class("default").admit("")
    assert (first.jobs, second.own_jobs) == (0, 0)
    for table in tables:
        table.close()


def test_more_callers_than_there_is_room_for_are_an_error_that_says_so(path: Path) -> None:
    table = SharedTable(path, 0)
    assert len({table.row(str(number)) for number in range(68)}) == 68
    assert table.row("7") == SharedTable(path, 1).row("7")
    with pytest.raises(InvalidRequest, match="all 68 rows of callers are taken"):
        table.row("one more")
    table.close()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory; `polyphase up` makes it at its start"),
        (b"", "it is damaged, or no table"),
        (b"x" * 4096, "it is damaged, or no table"),
        (lambda good: good[:-8], "it is damaged: its size is not the one that its head states"),
        (lambda good: good[:8] + b"\x09" + good[9:], "it has version 9"),
    ],
)
def test_a_table_that_is_none_is_named(path: Path, content: Any, said: str) -> None:
    good = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content(good) if callable(content) else content)
    with pytest.raises(InvalidRequest, match=f"^shared_table: {path}: {said}"):
        SharedTable(path, 0)


def test_a_table_for_other_numbers_is_refused(path: Path) -> None:
    with pytest.raises(InvalidRequest, match="it is for 2 processes, and this is number 2 from 0"):
        SharedTable(path, 2)
    settings = GatewaySettings(schedulers=("s",), model="m", processes=3, process=1, own_port=1, shared_table=path)
    with pytest.raises(InvalidRequest, match="it is for 2 processes, not 3"), shared_table(settings):
        pass
    with pytest.raises(InvalidRequest, match="cannot be made: Not a directory"):
        make_table(path / "none" / "such", 2, 0)


def test_only_its_owner_may_read_it(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == [path.name]
