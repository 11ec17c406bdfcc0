"""What decode jobs will hold, and whether one more fits to its end: against the sum of all jobs, step by step."""

from hypothesis import given
from hypothesis import strategies as st

from shared.policy.decode_admission import (
    STRETCHES,
    ahead_of,
    fits_after,
    own_part,
    remaining_tokens,
    takes_tokens,
    with_job,
)
from tests.shared.policy.views import decode

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
