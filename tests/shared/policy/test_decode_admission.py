from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.policy.decode_admission import (
    DecodeMemory,
    Greedy,
    PredictedEnd,
    ReserveDynamic,
    ReserveStatic,
    RunningDecode,
    predicted_tokens,
)
from tests.shared.policy.views import job, predicted

LONG = predicted(200, 400)


@pytest.mark.parametrize(("prompt", "free", "admitted"), [(16, 1, True), (17, 1, False), (17, 2, True), (1, 0, False)])
def test_greedy_admits_iff_the_prompt_fits_now(prompt: int, free: int, admitted: bool) -> None:
    memory = DecodeMemory(free_blocks=free, block_size=16, total_blocks=100)
    assert Greedy().admit(job(prompt, 100_000), memory, 0.0).admitted is admitted


# 100 blocks of 16 tokens, of which some are free. (free blocks, prompt, prediction, end, admitted)
STATIC_AS_PRINTED: list[tuple[str, int, int, Any, PredictedEnd, bool]] = [
    ("100 + 200 are less than 304", 19, 100, LONG, PredictedEnd.LOWER, True),
    ("304 are not less than 304", 19, 104, LONG, PredictedEnd.LOWER, False),
    ("what runs may grow: only what it holds now counts", 51, 600, LONG, PredictedEnd.LOWER, True),
    ("the middle of the range needs 300", 25, 100, LONG, PredictedEnd.MIDDLE, False),
    ("the upper end needs 400", 31, 100, LONG, PredictedEnd.UPPER, False),
    ("without a prediction 128", 14, 100, None, PredictedEnd.LOWER, False),
]


@pytest.mark.parametrize(
    ("what", "free", "prompt", "prediction", "end", "admitted"),
    STATIC_AS_PRINTED,
    ids=[row[0] for row in STATIC_AS_PRINTED],
)
def test_reserve_static_compares_with_the_memory_that_is_free_now(
    what: str, free: int, prompt: int, prediction: Any, end: PredictedEnd, admitted: bool
) -> None:
    # TetriInfer 3.4: "only if its predicted memory usage is smaller than the available accelerator memory for the
    # current iteration".
    memory = DecodeMemory(free, 16, 100, reserved_tokens=1_500)
    assert ReserveStatic(end).admit(job(prompt, 1000, prediction=prediction), memory, 0.0).admitted is admitted


@pytest.mark.parametrize("every", [False, True])
def test_where_nothing_runs_the_prompt_alone_decides(every: bool) -> None:
    policy, memory = ReserveStatic(PredictedEnd.UPPER, reserve_all=every), DecodeMemory(100, 16, 100)
    assert policy.admit(job(1500, 1000, prediction=LONG), memory, 0.0).admitted
    assert not policy.admit(job(1601, 1000, prediction=LONG), memory, 0.0).admitted


# With `reserve_all`. (reserved tokens, free blocks, prompt, prediction, end, admitted)
STATIC: list[tuple[str, int, int, int, Any, PredictedEnd, bool]] = [
    ("1300 + 100 + 200 = 1600 just fit", 1300, 50, 100, LONG, PredictedEnd.LOWER, True),
    ("one more token does not", 1301, 50, 100, LONG, PredictedEnd.LOWER, False),
    ("the middle of the range needs 300", 1300, 50, 100, LONG, PredictedEnd.MIDDLE, False),
    ("the upper end needs 400", 1150, 50, 100, LONG, PredictedEnd.UPPER, False),
    ("the lower end of bucket 0 reserves nothing", 1500, 50, 100, predicted(0, 200), PredictedEnd.LOWER, True),
    ("without a prediction 128", 1373, 50, 100, None, PredictedEnd.LOWER, False),
    ("jobs outgrew what they reserved: no room now", 800, 6, 100, LONG, PredictedEnd.LOWER, False),
    ("alone it may try", 0, 100, 1500, LONG, PredictedEnd.UPPER, True),
    ("alone, but the prompt does not fit", 0, 100, 1601, LONG, PredictedEnd.LOWER, False),
]


@pytest.mark.parametrize(
    ("what", "reserved", "free", "prompt", "prediction", "end", "admitted"), STATIC, ids=[row[0] for row in STATIC]
)
def test_reserve_static_of_all_by_example(
    what: str, reserved: int, free: int, prompt: int, prediction: Any, end: PredictedEnd, admitted: bool
) -> None:
    memory = DecodeMemory(free, 16, 100, reserved)
    policy = ReserveStatic(end, reserve_all=True)
    assert policy.admit(job(prompt, 1000, prediction=prediction), memory, 0.0).admitted is admitted


# 100 blocks of 16 tokens. (running (context, remaining), prompt, end, admitted)
DYNAMIC: list[tuple[str, list[tuple[int, int]], int, PredictedEnd, bool]] = [
    ("when the first ends, 20 + 40 + 40 blocks are taken", [(560, 80), (560, 900)], 240, PredictedEnd.LOWER, True),
    ("one token more is one block too many", [(560, 80), (561, 900)], 240, PredictedEnd.LOWER, False),
    ("static would count 900 and more", [(16, 0), (640, 900)], 640, PredictedEnd.LOWER, True),
    ("the job itself may be the shortest: 200", [(640, 900)], 552, PredictedEnd.LOWER, True),
    ("or, at the upper end, 400 is too long", [(640, 900)], 552, PredictedEnd.UPPER, False),
    ("alone it may try", [], 1590, PredictedEnd.UPPER, True),
    ("alone, but the prompt does not fit", [], 1601, PredictedEnd.LOWER, False),
]


@pytest.mark.parametrize(("what", "running", "prompt", "end", "admitted"), DYNAMIC, ids=[row[0] for row in DYNAMIC])
def test_reserve_dynamic_by_example(
    what: str, running: list[tuple[int, int]], prompt: int, end: PredictedEnd, admitted: bool
) -> None:
    free = 100 - sum(-(-context // 16) for context, _ in running)
    memory = DecodeMemory(free, 16, 100, running=tuple(RunningDecode(*one) for one in running))
    assert ReserveDynamic(end).admit(job(prompt, 1000, prediction=LONG), memory, 0.0).admitted is admitted


def test_who_needs_the_running_jobs() -> None:
    assert [policy.needs_running for policy in (Greedy(), ReserveStatic(), ReserveDynamic())] == [False, False, True]


arrivals = st.lists(st.tuples(st.integers(1, 900), st.integers(0, 5)), min_size=1, max_size=40)
ends = st.sampled_from(list(PredictedEnd))


@settings(deadline=None)
@given(arrivals, ends)
def test_reserve_static_of_all_never_promises_more_than_there_is(
    jobs: list[tuple[int, int]], end: PredictedEnd
) -> None:
    policy, used, reserved, running = ReserveStatic(end, reserve_all=True), 0, 0, 0
    for prompt, bucket in jobs:
        asked = job(prompt, 10_000, prediction=predicted(200 * bucket, 200 * bucket + 200))
        if policy.admit(asked, DecodeMemory(100 - used, 16, 100, reserved), 0.0).admitted:
            reserved += prompt + predicted_tokens(asked, end, policy.unpredicted_tokens)
            used += -(-prompt // 16)
            running += 1
    assert used <= 100
    assert reserved <= 1600 or running == 1  # one alone may try


@settings(deadline=None)
@given(arrivals, ends)
def test_under_reserve_dynamic_the_first_ends_before_memory_does(
    jobs: list[tuple[int, int]], end: PredictedEnd
) -> None:
    """With right predictions none is preempted before the next job ends: memory holds until then."""
    policy = ReserveDynamic(end)
    running: list[RunningDecode] = []

    def blocks(more: int = 0) -> int:
        return sum(-(-(one.context_tokens + more) // 16) for one in running)

    for prompt, bucket in jobs:
        lower = 200 * bucket
        asked = job(prompt, 10_000, prediction=predicted(lower, lower + 200))
        length = predicted_tokens(asked, end, 0)
        if policy.admit(asked, DecodeMemory(100 - blocks(), 16, 100, running=tuple(running)), 0.0).admitted:
            running.append(RunningDecode(prompt, length))
            shortest = min(one.predicted_remaining_tokens for one in running)
            assert len(running) == 1 or blocks(shortest) <= 100
            assert blocks() <= 100
