"""The ring of engine steps: order, paging, what is forgotten."""

import threading

import msgspec

from services.worker.engines.base import StepLog
from shared.wire.messages import StepPage


def numbers(page: StepPage) -> list[int]:
    return [step.number for step in page.steps]


def filled(steps: int, kept: int = 8) -> StepLog:
    log = StepLog(kept)
    for number in range(steps):
        log.add(0.001 * (number + 1), 0.0005, ((16, number),), 2, 100)
    return log


def test_steps_are_read_page_by_page() -> None:
    log = filled(5)
    first = log.page("p0", 7, 0, 3)
    assert (numbers(first), first.next, first.lost) == ([0, 1, 2], 3, 0)
    rest = log.page("p0", 7, first.next, 3)
    assert (numbers(rest), rest.next, rest.lost) == ([3, 4], 5, 0)
    assert numbers(log.page("p0", 7, rest.next, 3)) == []
    assert rest.steps[0].prefill == ((16, 3),)
    assert rest.steps[0].seconds == 0.004
    assert (rest.instance_id, rest.generation) == ("p0", 7)


def test_without_a_number_the_newest_come() -> None:
    assert numbers(filled(6).page("p0", 1, -1, 2)) == [4, 5]
    assert numbers(StepLog().page("p0", 1, -1, 2)) == []


def test_forgotten_steps_are_counted() -> None:
    page = filled(20).page("p0", 1, 5, 100)
    assert numbers(page) == list(range(12, 20))
    assert (page.next, page.lost) == (20, 7)


def test_a_number_from_before_a_restart_starts_anew() -> None:
    page = filled(3).page("p0", 2, 1000, 10)
    assert (numbers(page), page.next, page.lost) == ([], 3, 0)


def test_a_page_survives_the_wire() -> None:
    page = filled(3).page("p0", 1, 0, 10)
    assert msgspec.json.decode(msgspec.json.encode(page), type=StepPage) == page


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
