"""The queue of jobs that wait for placement, without a clock: turns, rests, and jobs that step aside."""

from shared.domain.job import Slo, WhenFull
from shared.policy.fair_queue import FairQueue, Line, Waiter, excess_jobs, excess_tokens
from shared.policy.fair_share import TokenCounters

CHAT = Slo(ttft_s=2.0, tpot_s=0.1, name="chat", when_full=WhenFull.REJECT)


class Queue:
    """A fair queue with its counters."""

    def __init__(self, callers: str = "a") -> None:
        self.counters = TokenCounters()
        for caller in callers:
            self.counters.came(caller, 0.0)
        self.jobs: FairQueue[str] = FairQueue(self.counters)

    def join(self, name: str, caller: str = "a") -> tuple[Waiter[str], Line[str]]:
        waiter = Waiter(name, CHAT, caller)
        return waiter, self.jobs.join(waiter)


def head(line: Line[str] | None) -> str | None:
    waiter = line.turn() if line is not None else None
    return waiter.item if waiter is not None else None


def test_the_caller_with_the_least_service_is_next() -> None:
    queue, order = Queue("ab"), ""
    waiters = [queue.join(f"{caller}{number}", caller) for number, caller in enumerate("aaaabbbb")]
    line = waiters[0][1]
    queue.counters.charge("a", 1000, 0)
    assert queue.jobs.waiting("chat") == 8
    while (waiter := line.turn()) is not None:
        order += waiter.caller
        queue.counters.charge(waiter.caller, 400, 0)
        queue.jobs.leave(waiter)
    assert order == "bbbabaaa"
    assert (queue.jobs.waiting("chat"), queue.jobs.is_waiting("chat")) == (0, False)


def test_a_delayed_head_keeps_its_place_and_its_line_rests() -> None:
    queue = Queue()
    (first, line), _ = queue.join("first"), queue.join("second")
    assert head(line) == "first"
    assert queue.jobs.delay(first, 0.5, 0.1) is line
    assert head(line) is None
    queue.jobs.wake(line)
    assert head(line) == "first"


def test_a_head_that_gives_up_leaves_the_rest_to_the_next() -> None:
    queue = Queue()
    (first, line), _ = queue.join("first"), queue.join("second")
    queue.jobs.delay(first, 0.5, 0.1)
    assert queue.jobs.leave(first) is line
    assert head(line) is None, "the cluster is as full for the next job"
    queue.jobs.wake(line)
    assert head(line) == "second"
    assert queue.jobs.leave(first) is None


def test_late_jobs_step_aside_and_the_first_of_them_rests_before_its_next_try() -> None:
    queue = Queue()
    (one, line), (two, _), _ = queue.join("one"), queue.join("two"), queue.join("three")
    aside = queue.jobs.delay(one, 1.95, 0.1)
    assert aside is not None
    assert aside is not line
    assert (head(line), head(aside)) == ("two", None)
    assert queue.jobs.delay(two, 1.95, 0.1) is None, "it waits behind the other one"
    assert (head(line), queue.jobs.waiting("chat")) == ("three", 3)
    queue.jobs.wake(aside)
    assert head(aside) == "one"
    assert queue.jobs.delay(one, 3.0, 0.1) is aside
    queue.jobs.wake(aside)
    assert queue.jobs.leave(one) is aside
    assert head(aside) == "two"
    assert list(queue.jobs.clear()) == ["three", "two"]


def test_a_job_that_was_delayed_before_it_joined_rests_unless_others_came_first() -> None:
    queue = Queue()
    line = queue.jobs.join_delayed(Waiter("first", CHAT, "a"))
    assert line is not None
    assert queue.jobs.join_delayed(Waiter("second", CHAT, "a")) is None
    assert head(line) is None
    queue.jobs.wake(line)
    assert head(line) == "first"


def test_limits() -> None:
    assert [excess_jobs(waiting, 2, 3) for waiting in (0, 1, 2)] == [-1, 0, 1]
    assert [excess_tokens(waiting, 50, 40) for waiting in (0, 1)] == [0, 11], "a job with none before it fits"
    assert excess_jobs(10**9, 1, None) == excess_tokens(10**9, 1, None) == 0
