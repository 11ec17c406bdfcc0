"""Where a pull becomes faster than computing, by its measurements."""

import pytest

from benchmarks.pulls import crossover


@pytest.mark.parametrize(
    ("gains", "found"),
    [
        ([(256, -0.010), (512, 0.010), (1024, 0.100)], 384),
        ([(256, -0.010), (512, -0.002), (1024, 0.006)], 640),
        ([(256, 0.001), (512, -0.001), (1024, 0.001)], 768),  # the last one: noise makes several
        ([(256, 0.001), (512, 0.010)], None),
        ([(256, -0.010), (512, -0.001)], None),
    ],
)
def test_the_crossover_is_between_a_loss_and_a_gain(gains: list[tuple[int, float]], found: float | None) -> None:
    assert crossover(gains) == pytest.approx(found)
