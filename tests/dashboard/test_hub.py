"""Reads that all sessions share."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from dashboard.dashboard_settings import DashboardSettings
from dashboard.reads import Hub, Read
from shared.errors import Unavailable

WAIT_S = 10.0


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub(DashboardSettings(), 5.0)
    yield made
    made.close()


class Service:
    """Counts how often it is asked; answers when it is told to."""

    def __init__(self) -> None:
        self.asked = 0
        self.broken = False
        self.go = threading.Event()
        self.go.set()

    async def answer(self) -> int:
        self.asked += 1
        await asyncio.to_thread(self.go.wait, WAIT_S)
        if self.broken:
            raise Unavailable("away")
        return self.asked


def test_a_thing_is_read_once_for_all_who_want_it(hub: Hub) -> None:
    service = Service()
    service.go.clear()
    futures: list[Future[Read[int]]] = [hub.ask("it", service.answer, int, 60.0) for _ in range(20)]
    service.go.set()
    assert {future.result(WAIT_S).value for future in futures} == {1}
    assert hub.ask("it", service.answer, int, 60.0).result(WAIT_S).value == 1
    assert hub.ask("other", service.answer, int, 60.0).result(WAIT_S).value == 2


def test_what_is_too_old_or_forgotten_is_read_anew(hub: Hub) -> None:
    service = Service()
    assert hub.ask("it", service.answer, int, 60.0).result(WAIT_S).value == 1
    assert hub.ask("it", service.answer, int, 0.0).result(WAIT_S).value == 2
    hub.forget()
    assert hub.ask("it", service.answer, int, 60.0).result(WAIT_S).value == 3


def test_what_failed_leaves_what_was_known_and_is_tried_again_soon(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    known = hub.ask("it", service.answer, int, 60.0).result(WAIT_S)
    service.broken = True
    hub.forget()
    monkeypatch.setattr("dashboard.reads.AGAIN_S", 0.0)
    stale = hub.ask("it", service.answer, int, 60.0).result(WAIT_S)
    assert (stale.value, stale.error, stale.read_s) == (1, "away", known.read_s)
    service.broken = False
    assert hub.ask("it", service.answer, int, 60.0).result(WAIT_S).error == ""
