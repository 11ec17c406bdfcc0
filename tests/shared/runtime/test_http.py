"""`/health` and `/ready`: who is well and not ready is left alone, and gets no work. `/metrics` is kept for a while."""

from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily

from gateway.app import ready_of
from shared.runtime.http import Exposition, service_app


async def ask(app: object, path: str) -> tuple[int, str]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://it") as http:  # type: ignore[arg-type]
        answer = await http.get(path)
    return answer.status_code, answer.json()["status"]


@pytest.mark.parametrize(
    ("trouble", "unready", "health", "ready"),
    [
        ("", "", (200, "ok"), (200, "ok")),
        ("", "not registered", (200, "ok"), (503, "not registered")),
        ("stuck", "", (503, "stuck"), (503, "stuck")),
        ("stuck", "not registered", (503, "stuck"), (503, "stuck")),
    ],
)
async def test_what_is_said(trouble: str, unready: str, health: tuple[int, str], ready: tuple[int, str]) -> None:
    app = service_app("any", lambda _: None, trouble=lambda: trouble, unready=lambda: unready, token="")  # type: ignore[arg-type,return-value]
    assert await ask(app, "/health") == health
    assert await ask(app, "/ready") == ready


async def test_who_has_nothing_to_wait_for_is_ready() -> None:
    assert await ask(service_app("any", lambda _: None, token=""), "/ready") == (200, "ok")  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("connected", "unknown", "said"),
    [
        (True, None, (200, "ok")),
        (True, "", (200, "ok")),
        (True, "the loaded adapters are not known yet", (503, "the loaded adapters are not known yet")),
        (False, None, (503, "no scheduler is there")),
    ],
)
async def test_a_gateway_needs_a_scheduler(connected: bool, unknown: str | None, said: tuple[int, str]) -> None:
    class Schedulers:
        def __init__(self) -> None:
            self.connected = connected

    adapters = None if unknown is None else SimpleNamespace(unknown=unknown)
    assert await ask(ready_of(Schedulers(), adapters), "/ready") == said  # type: ignore[arg-type]


class Slow:
    """Series that take so long to read, by a clock of their own."""

    def __init__(self, takes_s: float) -> None:
        self.now, self.reads, self._takes_s = 100.0, 0, takes_s

    def collect(self) -> Iterator[Metric]:
        self.now += self._takes_s
        self.reads += 1
        yield GaugeMetricFamily("reads", "Reads.", self.reads)


@pytest.mark.parametrize(("takes_s", "kept_s"), [(0.004, 0.4), (0.5, 1.0)])
def test_a_client_that_hammers_metrics_has_them_made_a_hundredth_of_the_time(
    takes_s: float, kept_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.runtime.http.METRICS_KEPT_S", 1.0)
    series, registry = Slow(takes_s), CollectorRegistry()
    registry.register(series)
    exposition = Exposition(registry, lambda: series.now)
    reads, began = series.reads, series.now
    texts = {exposition.text() for _ in range(1000)}
    assert series.reads == reads + 1
    series.now = began + kept_s - 0.01 if takes_s < kept_s else series.now
    assert exposition.text() in texts
    series.now = began + kept_s + 0.01
    assert exposition.text() not in texts
    assert series.reads == reads + 2
