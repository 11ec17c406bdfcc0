from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidRequest
from shared.policy.prefill_order import Fcfs, Ljf, OrderedQueue, PrefillOrder, Sjf
from tests.shared.policy.views import job

EXAMPLES: list[tuple[PrefillOrder, list[int]]] = [
    (Fcfs(), [30, 10, 20, 5, 40]),
    (Sjf(window=3), [10, 20, 30, 5, 40]),
    (Ljf(window=3), [30, 20, 10, 40, 5]),
    (Sjf(), [5, 10, 20, 30, 40]),
]


@pytest.mark.parametrize(("policy", "served"), EXAMPLES)
def test_order_by_example(policy: PrefillOrder, served: list[int]) -> None:
    queue: OrderedQueue[int] = OrderedQueue(policy)
    for tokens in (30, 10, 20, 5, 40):
        queue.push(job(tokens), tokens)
    assert queue.tokens == 105
    assert [queue.pop(0.0)[1] for _ in range(len(queue))] == served


def test_nobody_starves_behind_ever_shorter_prompts() -> None:
    queue: OrderedQueue[str] = OrderedQueue(Sjf())
    queue.push(job(10_000), "long")
    served = []
    for number in range(40):
        queue.push(job(1), f"short-{number}")
        served.append(queue.pop(0.0)[1])
    assert "long" in served[:17]


def test_equal_lengths_keep_their_order() -> None:
    assert Sjf().order([job(5), job(5), job(1)], 0.0) == [2, 0, 1]
    assert Ljf().order([job(5), job(5), job(9)], 0.0) == [2, 0, 1]


def test_a_job_can_leave_wherever_it_is() -> None:
    queue: OrderedQueue[str] = OrderedQueue(Sjf(window=2))
    for name in "abcd":
        queue.push(job(5, job_id=name), name)
    assert queue.pop(0.0)[1] == "a"
    assert (queue.remove("b"), queue.remove("d"), queue.remove("zzz")) == ("b", "d", None)
    assert queue.pop(0.0)[1] == "c"
    with pytest.raises(IndexError):
        queue.pop(0.0)


def test_a_window_must_hold_somebody() -> None:
    with pytest.raises(InvalidRequest, match="window"):
        Sjf(window=0)


@given(st.lists(st.integers(1, 999)), st.integers(1, 20), st.integers(0, 9))
def test_every_job_is_served_once_and_no_window_overtakes_another(lengths: list[int], window: int, seed: int) -> None:
    policy = Random(seed).choice([Fcfs(window), Sjf(window), Ljf(window)])
    queue: OrderedQueue[int] = OrderedQueue(policy)
    for number, tokens in enumerate(lengths):
        queue.push(job(tokens), number)
    served = [queue.pop(0.0)[1] for _ in lengths]
    assert sorted(served) == list(range(len(lengths)))
    assert all(abs(at - number) < window for at, number in enumerate(served))
