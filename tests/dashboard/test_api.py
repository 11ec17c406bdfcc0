"""Reads that all sessions share."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from dashboard.api import Api, Read
from dashboard.dashboard_settings import DashboardSettings
from shared.errors import Unavailable

WAIT_S = 10.0


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    monkeypatch.setattr("dashboard.api.LATE_S", WAIT_S)
    made = Api(DashboardSettings(read_timeout_s=5.0))
    yield made
    made.close()


class Counter:
    """A service that answers how often it was called, while `go` is set."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.calls = 0
        self.broken = False
        self.go = threading.Event()
        self.go.set()

    async def answer(self) -> int:
        self.calls += 1
        await asyncio.to_thread(self.go.wait, WAIT_S)
        if self.broken:
            raise Unavailable("away")
        return self.calls

    def start(self, name: str = "it", fresh_s: float = 60.0) -> "Future[Read[int]]":
        return self._api.shared_read("monitor", name, self.answer, fresh_s)

    def read(self, name: str = "it", fresh_s: float = 60.0) -> Read[int]:
        return self.start(name, fresh_s).result(WAIT_S)


def test_readers_of_the_same_name_share_a_read(api: Api) -> None:
    counter = Counter(api)
    counter.go.clear()
    futures = [counter.start() for _ in range(20)]
    counter.go.set()
    assert {future.result(WAIT_S).value for future in futures} == {1}
    assert counter.read().value == 1
    assert counter.read("other").value == 2


def test_reads_that_are_too_old_or_forgotten_are_repeated(api: Api) -> None:
    counter = Counter(api)
    assert counter.read().value == 1
    assert counter.read(fresh_s=0.0).value == 2
    api.forget()
    assert counter.read().value == 3
    counter.go.clear()
    before = counter.start("other")
    api.forget()
    after = counter.start("other")
    counter.go.set()
    assert before is not after, "a read that began before a change does not show it"


def test_a_failed_read_keeps_the_last_value_and_is_repeated_soon(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(api)
    known = counter.read()
    counter.broken = True
    api.forget()
    monkeypatch.setattr("dashboard.api.RETRY_S", 0.0)
    for _ in range(2):
        stale = counter.read()
        assert (stale.value, stale.error, stale.read_s) == (1, "away", known.read_s)
    counter.broken = False
    assert counter.read().error == ""


def test_a_late_answer_leaves_the_last_value_and_is_there_for_the_next_reader(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = Counter(api)
    known = counter.read()
    counter.go.clear()
    monkeypatch.setattr("dashboard.api.LATE_S", 0.0)
    late = counter.read(fresh_s=0.0)
    assert (late.value, late.late, late.read_s, late.error) == (1, True, known.read_s, "")
    assert counter.read(fresh_s=0.0).late
    assert counter.calls == 2, "the answer on its way is not asked for again"
    answer = api._entries["it"].answer
    counter.go.set()
    assert answer.result(WAIT_S).value == 2
    assert counter.read() == answer.result()


def test_an_old_value_and_one_before_a_change_are_not_shown_as_late(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(api)
    counter.read()
    monkeypatch.setattr("dashboard.api.LATE_S", 0.0)
    monkeypatch.setattr("dashboard.api.LATE_VALUE_S", 0.0)
    assert counter.read(fresh_s=0.0).value == 2
    monkeypatch.setattr("dashboard.api.LATE_VALUE_S", 60.0)
    api.forget()
    assert counter.read().value == 3
