"""What decode jobs will hold, and whether one more fits to its end: against the sum of all jobs, step by step."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.domain.job import JobView, LengthPrediction
from shared.policy.admission_gate import Blocks, Decoding, may_decode
from shared.policy.decode_admission import (
    STRETCHES,
    DecodeMemory,
    Greedy,
    PredictedEnd,
    ReserveDynamic,
    ReserveStatic,
    RunningDecode,
    ahead_of,
    fits_after,
    is_heavy,
    own_part,
    predicted_tokens,
    remaining_tokens,
    takes_tokens,
    with_job,
)
from tests.shared.policy.views import decode, job, predicted

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


@pytest.mark.parametrize(
    ("end", "tokens"), [(PredictedEnd.LOWER, 200), (PredictedEnd.MIDDLE, 300), (PredictedEnd.UPPER, 400)]
)
def test_ends_of_the_range(end: PredictedEnd, tokens: int) -> None:
    assert predicted_tokens(job(1, 1000, prediction=predicted(200, 400)), end, 7) == tokens
    assert predicted_tokens(job(1, 250, prediction=predicted(200, 400)), end, 7) == min(250, tokens)
    assert predicted_tokens(job(1, 1000), end, 7) == 7


def test_a_prediction_that_says_it_knows_nothing_is_none() -> None:
    nothing = job(1, 1000, prediction=LengthPrediction(0, 0, 1000, 0.0, "observed"))
    assert predicted_tokens(nothing, PredictedEnd.LOWER, 7) == 7


@pytest.mark.parametrize(
    ("lower", "upper", "max_tokens", "heavy"),
    [(0, 200, 1000, False), (200, 400, 1000, True), (200, 400, 128, False), (100, 158, 1000, True)],
)
def test_heavy_is_more_than_128_tokens(lower: int, upper: int, max_tokens: int, heavy: bool) -> None:
    assert is_heavy(job(1, max_tokens, prediction=predicted(lower, upper))) is heavy


def test_without_a_prediction_max_tokens_decides() -> None:
    assert is_heavy(job(1, 129))
    assert not is_heavy(job(1, 128))


SPREAD = LengthPrediction(0, 0, 100, 0.6, "classifier", 100, (0.6, 0.1, 0.1, 0.2), 400)


@pytest.mark.parametrize(("end", "tokens"), [(PredictedEnd.MEAN, 141), (PredictedEnd.P50, 84), (PredictedEnd.P90, 350)])
def test_figures_of_the_distribution(end: PredictedEnd, tokens: int) -> None:
    assert predicted_tokens(job(1, 1000, prediction=SPREAD), end, 7) == tokens
    assert predicted_tokens(job(1, 50, prediction=SPREAD), end, 7) == 50


def test_heavy_goes_by_the_median_of_a_distribution() -> None:
    assert not is_heavy(job(1, 1000, prediction=SPREAD))
    late = LengthPrediction(0, 0, 100, 0.4, "classifier", 100, (0.4, 0.0, 0.3, 0.3), 400)
    assert is_heavy(job(1, 1000, prediction=late))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12).filter(any), st.integers(1, 500))
@example([0.5, 0.0625], 1)
@example([0.1] * 6 + [0.0], 10)
def test_quantiles_rise_with_their_share_and_stay_within_the_buckets(shares: list[float], width: int) -> None:
    most = width * len(shares)
    said = LengthPrediction(0, 0, width, 0.5, "classifier", width, tuple(shares), most)
    found = [said.quantile(share / 20) for share in range(1, 21)]
    assert found == sorted(found)
    assert found[0] > 0
    last = max(at for at, share in enumerate(shares, 1) if share)
    assert found[-1] <= max(2, last * width)
    assert 0 < said.mean <= max(2, most)


# What decode jobs will hold, and whether one more fits to its end: against the sum of all jobs, step by step
BLOCK = 16
jobs = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), max_size=12)


def held(of: list[tuple[int, int]], step: int) -> int:
    """Tokens of whole blocks that jobs of (tokens held now, tokens to come) hold after so many steps."""
    return sum(-(-(now + step) // BLOCK) * BLOCK for now, left in of if step <= left)


@given(jobs)
def test_no_step_of_a_stretch_holds_more(of: list[tuple[int, int]]) -> None:
    ahead = ahead_of(of, BLOCK)
    begin = 1
    for most, end in zip(ahead, STRETCHES, strict=False):
        ends = {min(left, end) for _, left in of if left >= begin}
        assert max((held(of, step) for step in (begin, *ends)), default=0) <= most
        begin = end + 1


@given(jobs, st.tuples(st.integers(1, 3000), st.integers(1, 3000)))
def test_one_more_is_added_to_the_others(of: list[tuple[int, int]], one: tuple[int, int]) -> None:
    assert with_job(ahead_of(of, BLOCK), *one, BLOCK) == ahead_of([*of, one], BLOCK)


@given(jobs, st.integers(1, 3000), st.integers(1, 3000), st.integers(3000, 40_000))
def test_a_job_that_begins_when_it_fits_never_lacks_room(
    of: list[tuple[int, int]], prompt: int, answer: int, room: int
) -> None:
    if held(of, 1) > room or prompt + answer > room:
        return
    begins = int(fits_after(ahead_of(of, BLOCK), room, prompt, answer, BLOCK))
    ends = {begins + answer, *(left for _, left in of)}  # where sums have their peaks
    for step in (begins + 1, *(end for end in ends if begins < end <= begins + answer)):
        others = held(of, step)
        assert others == 0 or others + held([(prompt, answer)], step - begins) <= room


def test_jobs_that_fill_the_memory_exactly_fit() -> None:
    """16 streams of 6 + 500 tokens in 8,192, one after the other, and no seventeenth before they end."""
    ahead: tuple[int, ...] = ()
    for _ in range(16):
        assert fits_after(ahead, 8192, 6, 500, BLOCK) == 0.0
        ahead = with_job(ahead, 6, 500, BLOCK)
    assert fits_after(ahead, 8192, 6, 500, BLOCK) == 512.0


def test_a_job_fits_beside_those_that_end_while_it_is_short() -> None:
    """What two jobs hold at their ends does not count together when they do not end together."""
    nearly_done = ahead_of([(1990, 10)], BLOCK)
    assert fits_after(nearly_done, 2048, 100, 900, BLOCK) == 16.0
    assert fits_after(nearly_done, 2048, 20, 900, BLOCK) == 0.0


def test_where_nobody_decodes_a_job_fits() -> None:
    assert ahead_of([], BLOCK) == ()
    assert fits_after((), 16, 100_000, 5, BLOCK) == 0.0


def test_an_answer_that_is_longer_than_expected_goes_on_for_a_while() -> None:
    assert remaining_tokens(40, 100, 500) == 60
    assert remaining_tokens(100, 100, 500) == 25
    assert remaining_tokens(20, 10, 500) == 16
    assert remaining_tokens(499, 100, 500) == 1
    assert remaining_tokens(600, 100, 500) == 1


def test_jobs_that_share_blocks_count_for_their_part_and_one_that_comes_for_what_it_does_not_share() -> None:
    """Ten jobs of 2,048 tokens in common and 160 of their own, in 3,648 tokens of blocks, so that 1,843 of each are
    shared on average.
    """
    assert own_part(3648, 22_080) == 3648 / 22_080
    assert sum(ahead_of([(2208, 10)] * 10, BLOCK, own_part(3648, 22_080))[:1]) == 10 * 384
    there = decode("d", total_blocks=1024, free_blocks=1024 - 228, decoding=10, context_tokens=22_080)
    assert takes_tokens(there, 2300, 2048) == 2300 - 1843
    assert takes_tokens(there, 2300, 512) == 2300 - 512
    assert takes_tokens(there, 2300, 0) == 2300


def test_a_prefix_that_is_cached_and_that_nobody_uses_takes_blocks_when_it_is_used() -> None:
    """Turns of chats, each with a history of its own: what is cached of it lies in free blocks."""
    there = decode("d", total_blocks=2048, free_blocks=2048 - 10 * 138, decoding=10, context_tokens=22_000)
    assert takes_tokens(there, 2300, 2048) == 2300
    assert takes_tokens(decode("idle", total_blocks=1024, free_blocks=1024), 2300, 2048) == 2300
    assert own_part(0, 100) == own_part(100, 0) == own_part(200, 100) == 1.0


def likely(prompt: int, lower: int) -> JobView:
    return JobView("j", prompt, 500, prediction=LengthPrediction(0, lower, 2 * lower, 1.0, "observed"))


RUNNING = Decoding(likely(100, 50), 100, 120)  # 30 more to come


def test_what_runs_is_counted_at_its_predicted_end_or_at_what_it_has_come_to() -> None:
    beside, room = likely(40, 10), Blocks(free=100, total=20, size_tokens=10)
    policy = ReserveStatic(reserve_all=True)
    assert may_decode(policy, beside, [RUNNING], room, 0.0)  # 150 + 50 of 200 tokens
    assert not may_decode(policy, likely(41, 10), [RUNNING], room, 0.0)
    outgrown = RUNNING._replace(context_tokens=151)
    assert not may_decode(policy, beside, [outgrown], room, 0.0)
    assert not may_decode(ReserveStatic(PredictedEnd.UPPER, reserve_all=True), beside, [RUNNING], room, 0.0)


def test_static_as_printed_counts_what_is_free_now() -> None:
    beside = likely(40, 10)
    assert may_decode(ReserveStatic(), beside, [RUNNING], Blocks(free=6, total=20, size_tokens=10), 0.0)
    assert not may_decode(ReserveStatic(), beside, [RUNNING], Blocks(free=5, total=20, size_tokens=10), 0.0)


def test_dynamic_looks_ahead_to_the_first_end() -> None:
    room = Blocks(free=100, total=20, size_tokens=10)
    # In 30 steps RUNNING ends at 150 tokens; 50 + 30 beside it do not fit into 200.
    assert not may_decode(ReserveDynamic(), likely(50, 100), [RUNNING], room, 0.0)
    assert may_decode(ReserveDynamic(), likely(20, 100), [RUNNING], room, 0.0)
    assert may_decode(ReserveDynamic(), likely(50, 10), [RUNNING], room, 0.0)  # itself the first, in 10 steps


def test_where_nobody_decodes_the_blocks_alone_decide() -> None:
    full = Blocks(free=0, total=20, size_tokens=10)
    for policy in (Greedy(), ReserveStatic(), ReserveDynamic()):
        assert may_decode(policy, likely(1_000, 1_000), [], full, 0.0)
        assert not may_decode(policy, likely(10, 0), [RUNNING], full, 0.0)
