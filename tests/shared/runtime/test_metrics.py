"""Children of a metric, looked up once."""

from prometheus_client import CollectorRegistry, Counter

from shared.runtime.metrics import Bound


def test_it_gives_the_metrics_own_children() -> None:
    registry = CollectorRegistry()
    counter = Counter("asked", "Asked.", ["who", "what"], registry=registry)
    bound = Bound(counter)
    bound.labels("a", "x").inc()
    bound.labels("a", "x").inc()
    bound.labels("b", "x").inc()
    counter.labels(who="a", what="x").inc()
    assert registry.get_sample_value("asked_total", {"who": "a", "what": "x"}) == 3
    assert registry.get_sample_value("asked_total", {"who": "b", "what": "x"}) == 1
    assert bound.labels("a", "x") is bound.labels("a", "x")


def test_children_that_are_not_wanted_leave_the_metric() -> None:
    registry = CollectorRegistry()
    bound = Bound(Counter("asked", "Asked.", ["who", "what"], registry=registry))
    for who in ("a", "b"):
        bound.labels(who, "x").inc()
    bound.keep(lambda labels: labels[0] == "b")
    assert len(bound) == 1
    assert registry.get_sample_value("asked_total", {"who": "a", "what": "x"}) is None
    assert registry.get_sample_value("asked_total", {"who": "b", "what": "x"}) == 1
    bound.labels("a", "x").inc()
    assert registry.get_sample_value("asked_total", {"who": "a", "what": "x"}) == 1
