import numpy as np
import pytest

from shared.cost.slowdown import others_busy, slowdown_at, slowdown_curve


def interval(*pairs: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    starts, ends = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(starts, dtype=float), np.array(ends, dtype=float)


def test_overlap_is_counted_by_its_share_of_the_step() -> None:
    found = others_busy({"a": interval((0, 2), (2, 4)), "b": interval((1, 3)), "c": interval((0, 4)), "d": interval()})
    assert found["a"] == pytest.approx([1.5, 1.5])
    assert found["b"] == pytest.approx([2.0])
    assert found["c"] == pytest.approx([1.5])
    assert len(found["d"]) == 0


def test_steps_that_clocks_let_overlap_count_once() -> None:
    found = others_busy({"a": interval((0, 1.0), (0.9, 2.0)), "b": interval((0, 2))})
    assert found["b"] == pytest.approx([1.0])


def test_the_curve_comes_back_from_steps_that_follow_it() -> None:
    rng = np.random.default_rng(3)
    others = rng.choice([0.0, 1.0, 2.0], 600) + rng.uniform(-0.05, 0.05, 600).clip(0)
    alone = rng.uniform(0.005, 0.02, 600)
    truth = (1.0, 1.3, 1.9)
    curve = slowdown_curve(others, alone * slowdown_at(truth, others), alone)
    assert curve == pytest.approx(truth, rel=0.02)


def test_a_curve_never_falls_and_ends_where_too_little_was_seen() -> None:
    others = np.array([0.0] * 50 + [1.0] * 50 + [2.0] * 5)
    seconds = np.array([1.0] * 50 + [0.9] * 50 + [3.0] * 5)
    assert slowdown_curve(others, seconds, np.ones(105)) == (1.0, 1.0)
    assert slowdown_curve(np.zeros(0), np.zeros(0), np.zeros(0)) == (1.0,)


def test_beyond_its_end_a_curve_goes_on_as_steeply() -> None:
    assert slowdown_at((1.0, 1.2, 1.6), np.array([0.5, 2.0, 3.0])) == pytest.approx([1.1, 1.6, 2.0])
    assert slowdown_at((1.0,), np.array([0.0, 5.0])) == pytest.approx([1.0, 1.0])
