"""The link rate that imports show."""

import pytest

from shared.cost.transfers import LinkLearner
from shared.domain.rates import LinkRate

MB = 1 << 20


def test_the_start_holds_until_a_large_import() -> None:
    links = LinkLearner(LinkRate(1e9, 0.001))
    links.add("p", 1000, 0.002)
    assert links.rate == LinkRate(1e9, 0.001)
    links.add("p", 10 * MB, 0.01)
    assert links.rate == LinkRate(10 * MB / 0.01, 0.002)
    assert LinkLearner(None).rate is None


def test_imports_that_share_the_way_do_not_make_it_slow() -> None:
    links = LinkLearner(None)
    for number in range(32):
        links.add("p", 10 * MB, 0.01 if number % 2 else 0.05)
    assert links.rate is not None
    assert links.rate.bytes_s == pytest.approx(10 * MB / 0.01)


def test_a_link_that_has_become_slower_is_seen() -> None:
    links = LinkLearner(None)
    for seconds in (*[0.01] * 100, *[0.1] * 32):
        links.add("p", 10 * MB, seconds)
    assert links.rate is not None
    assert links.rate.bytes_s == pytest.approx(100 * MB)


def test_slow_exporters_are_named() -> None:
    links = LinkLearner(None)
    for name, seconds in (("fast", 0.01), ("usual", 0.012), ("slow", 0.04)):
        links.add(name, 10 * MB, seconds)
    assert links.rate is not None
    assert links.rate.slow == {"slow": pytest.approx(10 * MB / 0.04)}
    assert links.rate.from_s("slow") < links.rate.from_s("fast") == links.rate.from_s("never seen")


def test_it_is_bounded_and_ignores_nonsense() -> None:
    links = LinkLearner(None)
    for number in range(1000):
        links.add(f"p{number}", 10 * MB, 0.01 * (1 + number))
    assert links.rate is not None
    assert len(links.rate.slow) <= 16
    assert len(links._peers) <= 64
    links.add("p", -1, 1.0)
    links.add("p", 10, 0.0)
    assert "p" not in links._peers
