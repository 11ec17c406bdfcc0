"""A glide is its steps, taken one by one."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.sim.group import Glide

SEGMENTS = st.lists(
    st.tuples(
        st.integers(1, 40),
        st.floats(1e-4, 0.1),
        st.floats(0.0, 1e-3),  # growth a step
    ),
    min_size=1,
    max_size=4,
).map(lambda parts: tuple((n, first, first + growth * (n - 1)) for n, first, growth in parts))


def ends(glide_segments: tuple[tuple[int, float, float], ...], start_s: float) -> list[float]:
    """Ends of all steps, by addition."""
    steps = [first + (last - first) / max(1, n - 1) * at for n, first, last in glide_segments for at in range(n)]
    return list(accumulate(steps, initial=start_s))


@given(SEGMENTS, st.floats(0.0, 1e4))
def test_ends_of_steps_are_sums(segments: tuple[tuple[int, float, float], ...], start_s: float) -> None:
    glide = Glide(start_s, segments)
    for steps, end_s in enumerate(ends(segments, start_s)):
        assert glide.end_s(steps) == pytest.approx(end_s, abs=1e-9, rel=1e-12)


@given(SEGMENTS, st.floats(0.0, 1.0))
def test_steps_begun_and_done(segments: tuple[tuple[int, float, float], ...], share: float) -> None:
    glide = Glide(5.0, segments)
    now = 5.0 + share * (glide.end_s(glide.steps) - 5.0)
    begun, done = glide.steps_begun(now), glide.steps_done(now)
    assert 1 <= begun <= glide.steps
    assert glide.end_s(begun) >= now - 1e-9
    assert done <= begun <= done + 1 or begun == 1
    assert done == 0 or glide.end_s(done) <= now + 1e-9
    assert begun == glide.steps or begun == 1 or glide.end_s(begun - 1) < now + 1e-9


@given(SEGMENTS, st.data())
def test_runs_of_a_part(segments: tuple[tuple[int, float, float], ...], data: st.DataObject) -> None:
    glide = Glide(0.0, segments)
    steps = data.draw(st.integers(1, glide.steps))
    runs = glide.runs(steps)
    assert sum(length for length, _, _ in runs) == steps
    assert sum(n * (first + last) / 2.0 for n, first, last in runs) == pytest.approx(glide.end_s(steps), rel=1e-9)
