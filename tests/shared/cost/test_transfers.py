"""The link rate that imports show."""

import pytest

from shared.cost.learning import LinkLearner
from shared.domain.kv import Codec
from shared.domain.rates import LinkRate

MB = 1 << 20


def raw(links: LinkLearner, exporter: str, size: int, seconds: float) -> None:
    links.add(exporter, Codec.RAW, size, size, seconds)


def test_the_start_holds_until_a_large_import() -> None:
    links = LinkLearner(LinkRate(1e9, 0.001))
    raw(links, "p", 1000, 0.002)
    assert links.rate == LinkRate(1e9, 0.001)
    raw(links, "p", 10 * MB, 0.01)
    assert links.rate == LinkRate(10 * MB / 0.01, 0.002)
    assert LinkLearner(None).rate is None


def test_imports_that_share_the_way_do_not_make_it_slow() -> None:
    links = LinkLearner(None)
    for number in range(32):
        raw(links, "p", 10 * MB, 0.01 if number % 2 else 0.05)
    assert links.rate is not None
    assert links.rate.bytes_s == pytest.approx(10 * MB / 0.01)


def test_a_link_that_has_become_slower_is_seen() -> None:
    links = LinkLearner(None)
    for seconds in (*[0.01] * 100, *[0.1] * 32):
        raw(links, "p", 10 * MB, seconds)
    assert links.rate is not None
    assert links.rate.bytes_s == pytest.approx(100 * MB)


def test_slow_exporters_are_named() -> None:
    links = LinkLearner(None)
    for name, seconds in (("fast", 0.01), ("usual", 0.012), ("slow", 0.04)):
        raw(links, name, 10 * MB, seconds)
    assert links.rate is not None
    assert links.rate.slow == {"slow": pytest.approx(10 * MB / 0.04)}
    assert links.rate.from_s("slow") < links.rate.from_s("fast") == links.rate.from_s("never seen")


def test_it_is_bounded_and_ignores_nonsense() -> None:
    links = LinkLearner(None)
    for number in range(1000):
        raw(links, f"p{number}", 10 * MB, 0.01 * (1 + number))
    assert links.rate is not None
    assert len(links.rate.slow) <= 16
    assert len(links._peers) <= 64
    raw(links, "p", -1, 1.0)
    raw(links, "p", 10, 0.0)
    assert "p" not in links._peers


def test_what_came_coded_says_how_fast_that_is_and_nothing_bad_of_the_link() -> None:
    links = LinkLearner(None)
    raw(links, "near", 100 * MB, 0.1)
    for name, seconds in (("near", 1.0), ("far", 4.0)):
        links.add(name, Codec.INT8, 200 * MB, 110 * MB, seconds)
    links.add("near", Codec.INT4, 200 * MB, 60 * MB, 0.5)
    assert links.rate is not None
    assert links.rate.bytes_s == pytest.approx(1000 * MB)
    assert links.rate.coded == {"int8": 200 * MB, "int8 far": 50 * MB, "int4": 400 * MB}
    assert links.rate.coded_from_s("int8", "far") == 50 * MB
    assert links.rate.coded_from_s("int8", "near") == links.rate.coded_from_s("int8", "new") == 200 * MB
    assert links.rate.coded_from_s("fp8", "near") is None


def test_a_link_that_has_recovered_is_seen_by_coded_transfers_too() -> None:
    links = LinkLearner(None)
    for _ in range(32):
        raw(links, "p", 10 * MB, 1.0)
    for _ in range(32):
        links.add("p", Codec.INT8, 200 * MB, 110 * MB, 1.0)
    assert links.rate is not None
    assert links.rate.bytes_s == pytest.approx(110 * MB)


def test_before_a_link_is_measured_coded_transfers_are_kept_beside_the_start() -> None:
    links = LinkLearner(LinkRate(1e9, 0.001))
    links.add("p", Codec.INT8, 200 * MB, 110 * MB, 1.0)
    assert links.rate == LinkRate(1e9, 0.001, coded={"int8": 200 * MB})
