"""Admission of decodes by predicted lengths, and what decodes will hold against the sum of all jobs, step by step."""

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.domain.job import JobView, LengthPrediction
from shared.policy.decode_admission import (
    STRETCHES,
    Blocks,
    DecodeAdmission,
    DecodeMemory,
    Decoding,
    Greedy,
    PredictedEnd,
    RunningDecode,
    ahead_of,
    fits_after,
    is_heavy,
    may_decode,
    own_part,
    predicted_tokens,
    remaining_tokens,
    takes_tokens,
    with_job,
)
from shared.policy.papers.tetriinfer import ReserveDynamic, ReserveStatic
from tests.shared.policy.views import decode, job, predicted

LONG = predicted(200, 400)
LOWER, MIDDLE, UPPER = PredictedEnd.LOWER, PredictedEnd.MIDDLE, PredictedEnd.UPPER


def memory(free: int, reserved: int = 0, running: tuple[tuple[int, int], ...] = ()) -> DecodeMemory:
    """Of 100 blocks of 16 tokens."""
    return DecodeMemory(free, 16, 100, reserved, tuple(RunningDecode(*one) for one in running))


def static(end: PredictedEnd) -> ReserveStatic:
    return ReserveStatic(end, reserve_all=True)


def full(*running: tuple[int, int]) -> DecodeMemory:
    """Running decodes as (context, remaining tokens)."""
    return memory(100 - sum(-(-context // 16) for context, _ in running), running=running)


ADMISSIONS: list[tuple[str, DecodeAdmission, DecodeMemory, int, LengthPrediction | None, bool]] = [
    ("the prompt fits", Greedy(), memory(1), 16, None, True),
    ("the prompt needs one block more", Greedy(), memory(1), 17, None, False),
    ("nothing is free", Greedy(), memory(0), 1, None, False),
    # TetriInfer 3.4: "only if its predicted memory usage is smaller than the available accelerator memory for the
    # current iteration".
    ("100 + 200 are less than 304", ReserveStatic(LOWER), memory(19, 1_500), 100, LONG, True),
    ("304 are not less than 304", ReserveStatic(LOWER), memory(19, 1_500), 104, LONG, False),
    ("only what running jobs hold now counts", ReserveStatic(LOWER), memory(51, 1_500), 600, LONG, True),
    ("the middle of the range needs 300", ReserveStatic(MIDDLE), memory(25, 1_500), 100, LONG, False),
    ("the upper end needs 400", ReserveStatic(UPPER), memory(31, 1_500), 100, LONG, False),
    ("without a prediction 128", ReserveStatic(LOWER), memory(14, 1_500), 100, None, False),
    ("alone it may try", ReserveStatic(UPPER), memory(100), 1500, LONG, True),
    ("alone, but the prompt does not fit", ReserveStatic(UPPER), memory(100), 1601, LONG, False),
    ("all: 1300 + 100 + 200 = 1600 just fit", static(LOWER), memory(50, 1300), 100, LONG, True),
    ("all: one more token does not", static(LOWER), memory(50, 1301), 100, LONG, False),
    ("all: the middle of the range needs 300", static(MIDDLE), memory(50, 1300), 100, LONG, False),
    ("all: bucket 0 reserves nothing", static(LOWER), memory(50, 1500), 100, predicted(0, 200), True),
    ("all: without a prediction 128", static(LOWER), memory(50, 1373), 100, None, False),
    ("all: jobs outgrew what they reserved", static(LOWER), memory(6, 800), 100, LONG, False),
    ("all: alone it may try", static(UPPER), memory(100), 1500, LONG, True),
    ("all: alone, but the prompt does not fit", static(LOWER), memory(100), 1601, LONG, False),
    ("when the first ends, 20 + 40 + 40 blocks", ReserveDynamic(LOWER), full((560, 80), (560, 900)), 240, LONG, True),
    ("one block too many", ReserveDynamic(LOWER), full((560, 80), (561, 900)), 240, LONG, False),
    ("static would count 900 and more", ReserveDynamic(LOWER), full((16, 0), (640, 900)), 640, LONG, True),
    ("the job itself may be the shortest: 200", ReserveDynamic(LOWER), full((640, 900)), 552, LONG, True),
    ("or, at the upper end, 400 is too long", ReserveDynamic(UPPER), full((640, 900)), 552, LONG, False),
    ("dynamic: alone it may try", ReserveDynamic(UPPER), full(), 1590, LONG, True),
    ("dynamic: alone, but the prompt does not fit", ReserveDynamic(LOWER), full(), 1601, LONG, False),
]


@pytest.mark.parametrize(
    ("what", "policy", "there", "prompt", "prediction", "admitted"), ADMISSIONS, ids=[row[0] for row in ADMISSIONS]
)
def test_admission_by_example(
    what: str,
    policy: DecodeAdmission,
    there: DecodeMemory,
    prompt: int,
    prediction: LengthPrediction | None,
    admitted: bool,
) -> None:
    assert policy.admit(job(prompt, 1000, prediction=prediction), there, 0.0) is admitted


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(0, 5)), min_size=1, max_size=40),
    st.sampled_from(list(PredictedEnd)),
    st.sampled_from([static, lambda end: ReserveDynamic(end, 0)]),
)
def test_memory_is_not_promised_twice(
    jobs: list[tuple[int, int]], end: PredictedEnd, made: Callable[[PredictedEnd], DecodeAdmission]
) -> None:
    """With reserve-dynamic, memory is left when the first of the running jobs ends."""
    policy, running, reserved = made(end), list[tuple[int, int]](), 0

    def blocks(more: int = 0) -> int:
        return sum(-(-(context + more) // 16) for context, _ in running)

    for prompt, bucket in jobs:
        asked = job(prompt, 10_000, prediction=predicted(200 * bucket, 200 * bucket + 200))
        if policy.admit(asked, memory(100 - blocks(), reserved, tuple(running)), 0.0):
            running.append((prompt, predicted_tokens(asked, end, 128)))
            reserved += sum(running[-1])
            assert blocks() <= 100
            if isinstance(policy, ReserveDynamic):
                assert len(running) == 1 or blocks(min(left for _, left in running)) <= 100
            else:
                assert reserved <= 1600 or len(running) == 1


def likely(prompt: int, lower: int) -> JobView:
    return JobView("j", prompt, 500, prediction=LengthPrediction(0, lower, 2 * lower, 1.0, "observed"))


def test_what_runs_in_an_engine_counts_at_its_predicted_end_or_at_what_it_has_come_to() -> None:
    running, room = Decoding(likely(100, 50), 100, 120), Blocks(free=100, total=20, size_tokens=10)  # 30 more to come
    assert may_decode(static(LOWER), likely(40, 10), [running], room, 0.0)  # 150 + 50 of 200 tokens
    assert not may_decode(static(LOWER), likely(41, 10), [running], room, 0.0)
    assert not may_decode(static(LOWER), likely(40, 10), [running._replace(context_tokens=151)], room, 0.0)
    assert not may_decode(static(UPPER), likely(40, 10), [running], room, 0.0)
    # In 30 steps the running one ends at 150 tokens; 50 + 30 beside it do not fit into 200.
    assert not may_decode(ReserveDynamic(), likely(50, 100), [running], room, 0.0)
    assert may_decode(ReserveDynamic(), likely(50, 10), [running], room, 0.0)  # itself the first, in 10 steps
    for policy in (Greedy(), ReserveStatic(), ReserveDynamic()):  # the blocks alone decide where no job decodes
        assert may_decode(policy, likely(1_000, 1_000), [], room._replace(free=0), 0.0)


SPREAD = LengthPrediction(0, 0, 100, 0.6, "classifier", 100, (0.6, 0.1, 0.1, 0.2), 400)
LATE = LengthPrediction(0, 0, 100, 0.4, "classifier", 100, (0.4, 0.0, 0.3, 0.3), 400)
UNSURE = LengthPrediction(0, 0, 1000, 0.0, "observed")


@pytest.mark.parametrize(
    ("prediction", "end", "tokens"),
    [
        (LONG, LOWER, 200),
        (LONG, MIDDLE, 300),
        (LONG, UPPER, 400),
        (SPREAD, PredictedEnd.MEAN, 141),
        (SPREAD, PredictedEnd.P50, 84),
        (SPREAD, PredictedEnd.P90, 350),
        (None, LOWER, 7),
        (UNSURE, LOWER, 7),
    ],
)
def test_predicted_tokens(prediction: LengthPrediction | None, end: PredictedEnd, tokens: int) -> None:
    assert predicted_tokens(job(1, 1000, prediction=prediction), end, 7) == tokens
    assert predicted_tokens(job(1, 50, prediction=prediction), end, 7) == min(50, tokens)


@pytest.mark.parametrize(
    ("prediction", "max_tokens", "heavy"),
    [
        (predicted(0, 200), 1000, False),
        (predicted(200, 400), 1000, True),
        (predicted(200, 400), 128, False),
        (predicted(100, 158), 1000, True),
        (SPREAD, 1000, False),  # its median
        (LATE, 1000, True),
        (None, 129, True),
        (None, 128, False),
    ],
)
def test_heavy_is_more_than_128_tokens(prediction: LengthPrediction | None, max_tokens: int, heavy: bool) -> None:
    assert is_heavy(job(1, max_tokens, prediction=prediction)) is heavy


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
    nearly_done = ahead_of([(1990, 10)], BLOCK)
    assert fits_after(nearly_done, 2048, 100, 900, BLOCK) == 16.0
    assert fits_after(nearly_done, 2048, 20, 900, BLOCK) == 0.0


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
    there = decode("d", total_blocks=2048, free_blocks=2048 - 10 * 138, decoding=10, context_tokens=22_000)
    assert takes_tokens(there, 2300, 2048) == 2300
    assert takes_tokens(decode("idle", total_blocks=1024, free_blocks=1024), 2300, 2048) == 2300
    assert own_part(0, 100) == own_part(100, 0) == own_part(200, 100) == 1.0
