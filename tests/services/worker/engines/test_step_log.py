"""The ring of engine steps: order, paging, what is forgotten."""

import threading

import msgspec
import pytest

from services.worker.engines.base import StepLog
from shared.wire.messages import StepPage


def numbers(page: StepPage) -> list[int]:
    return [step.number for step in page.steps]


def filled(steps: int, kept: int = 8) -> StepLog:
    log = StepLog(kept)
    for number in range(steps):
        log.add(0.001 * (number + 1), 0.0005, ((16, number),), 2, 100)
    return log


def test_steps_are_read_page_by_page_and_survive_the_wire() -> None:
    log = filled(5)
    first = log.page("p0", 7, 0, 3)
    assert (numbers(first), first.next, first.lost) == ([0, 1, 2], 3, 0)
    rest = log.page("p0", 7, first.next, 3)
    assert (numbers(rest), rest.next, rest.lost) == ([3, 4], 5, 0)
    assert numbers(log.page("p0", 7, rest.next, 3)) == []
    assert (rest.steps[0].prefill, rest.steps[0].seconds) == (((16, 3),), 0.004)
    assert (rest.instance_id, rest.generation) == ("p0", 7)
    assert msgspec.json.decode(msgspec.json.encode(rest), type=StepPage) == rest


@pytest.mark.parametrize(
    ("steps", "since", "most", "found", "following", "lost"),
    [
        (6, -1, 2, [4, 5], 6, 0),  # without a number the newest come
        (0, -1, 2, [], 0, 0),
        (20, 5, 100, list(range(12, 20)), 20, 7),  # forgotten steps are counted
        (3, 1000, 10, [], 3, 0),  # a number from before a restart
    ],
)
def test_pages_that_begin_elsewhere(
    steps: int, since: int, most: int, found: list[int], following: int, lost: int
) -> None:
    page = filled(steps).page("p0", 1, since, most)
    assert (numbers(page), page.next, page.lost) == (found, following, lost)


def test_reading_while_another_thread_writes() -> None:
    log, stop = StepLog(4), threading.Event()

    def write() -> None:
        while not stop.is_set():
            log.add(0.001, 0.0, (), 1, 1)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        position = 0
        for _ in range(300):
            page = log.page("p0", 1, position, 100)
            assert numbers(page) == sorted(numbers(page))
            assert len(page.steps) + page.lost == page.next - position
            position = page.next
    finally:
        stop.set()
        writer.join()
