"""The decaying share of steps with prompts in them."""

import pytest

from shared.policy.prefill_order import PrefillShare


def test_it_is_the_share_of_steps() -> None:
    share = PrefillShare()
    assert share.after() == 0.0
    for _ in range(2000):
        share.mixed()
        share.plain(3)
    assert share.after() == pytest.approx(0.25, abs=0.01)
    assert share.after(64) < 0.12


def test_many_steps_at_once_are_as_many_one_by_one() -> None:
    one, many = PrefillShare(), PrefillShare()
    for share in (one, many):
        share.mixed()
        share.mixed()
    for _ in range(37):
        one.plain()
    assert many.after(37) == pytest.approx(one.after())
    many.plain(37)
    assert many.after() == pytest.approx(one.after())
    one.mixed()
    many.mixed()
    assert many.after() == pytest.approx(one.after())
