"""Threads of the tokeniser: long texts leave one to short ones, and callers take turns."""

from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any

from gateway.admission import Admissions, RequestState, current_request
from gateway.settings import GatewaySettings
from gateway.vllm_patches import LONG_BYTES, TokeniserSlots

ADMISSION = Admissions(GatewaySettings(schedulers=("s",), model="m"), ()).for_class("default")


class Threads:
    """A pool whose work ends when the test says so."""

    def __init__(self) -> None:
        self.running: list[tuple[Callable[..., Any], Any]] = []
        self.order: list[str] = []

    def submit(self, run: Callable[..., Any], work: Any) -> Future[Any]:
        self.running.append((run, work))
        return Future()

    def end_first(self) -> None:
        run, work = self.running.pop(0)
        run(work)

    def end_all(self) -> None:
        while self.running:
            self.end_first()


def put(slots: TokeniserSlots, threads: Threads, key: str, name: str, size: int = 10) -> Future[Any]:
    state = RequestState(ADMISSION, key, body_bytes=size)

    def submit() -> Future[Any]:
        current_request.set(state)
        return slots.submit(threads.order.append, name)

    return copy_context().run(submit)


def test_long_texts_leave_a_thread_to_short_ones() -> None:
    threads = Threads()
    slots = TokeniserSlots(threads.submit, 2)
    for number in range(3):
        put(slots, threads, "a", f"long {number}", LONG_BYTES + 1)
    assert len(threads.running) == 1
    short = put(slots, threads, "a", "short")
    assert len(threads.running) == 2
    run, work = threads.running.pop()
    run(work)
    assert short.done()
    assert threads.order == ["short"]
    threads.end_all()
    assert threads.order == ["short", "long 0", "long 1", "long 2"]


def test_short_ones_do_not_keep_a_long_one_waiting() -> None:
    for count in (1, 2):
        threads = Threads()
        slots = TokeniserSlots(threads.submit, count)
        for number in range(4):
            put(slots, threads, "a", f"short {number}")
        put(slots, threads, "a", "long", LONG_BYTES + 1)
        threads.end_all()
        assert threads.order.index("long") <= count


def test_the_caller_with_the_least_thread_time_is_next() -> None:
    threads = Threads()
    slots = TokeniserSlots(threads.submit, 1)
    for number in range(4):
        put(slots, threads, "a", f"a{number}")
    put(slots, threads, "b", "b0")
    threads.end_all()
    assert threads.order[:2] == ["a0", "b0"] or threads.order[:3] == ["a0", "a1", "b0"]


def test_what_was_given_up_is_not_run_and_an_error_is_its_callers() -> None:
    threads = Threads()
    slots = TokeniserSlots(threads.submit, 1)
    put(slots, threads, "a", "first")
    gone = put(slots, threads, "a", "gone")
    wrong = slots.submit(lambda: 1 / 0)
    assert gone.cancel()
    threads.end_all()
    assert threads.order == ["first"]
    assert isinstance(wrong.exception(), ZeroDivisionError)
    last = put(slots, threads, "a", "last")
    threads.end_all()
    assert last.done()
