"""The load of a calibration: moderate, whatever the cluster's speed."""

from itertools import pairwise
from random import Random

import pytest

from lab.calibrate.live import _moderate, _moderate_rate
from lab.calibrate.target import Sample, Shot


def alone(ttft_s: float, tpot_s: float) -> list[Sample]:
    return [Sample("r", Shot(100, 11), 0.0, ttft_s, ttft_s + 10 * tpot_s)]


def test_a_fast_cluster_gets_more_but_not_endlessly() -> None:
    slow = _moderate_rate(alone(0.4, 0.05), 2, 2, 1000)
    assert slow == pytest.approx(0.4 * 2 / 1.5)  # decodes bind: 30 tokens of 50 ms
    assert _moderate_rate(alone(4.0, 0.01), 1, 4, 1000) == pytest.approx(0.4 / 2.0)  # prefills do
    assert _moderate_rate(alone(0.4, 0.05), 2, 2, 1) == pytest.approx(0.3 / 1.7)  # the cores do
    assert _moderate_rate(alone(1e-4, 1e-5), 8, 8, 1000) == 20.0


def test_arrivals_are_in_order_and_bounded() -> None:
    for rate in (0.1, 3.0, 20.0):
        shots = _moderate(Random(1), rate, [8, 16, 32, 64, 128, 256, 512])
        assert 24 <= len(shots) <= 400
        assert all(before.at_s <= after.at_s for before, after in pairwise(shots))
        assert max(shot.prompt_tokens for shot in shots) <= 512
