"""`/health` and `/ready`: who is well and not ready is left alone, and gets no work."""

import httpx
import pytest

from gateway.readiness import ready_of
from shared.runtime.http import service_app


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


@pytest.mark.parametrize(("connected", "said"), [(True, (200, "ok")), (False, (503, "no scheduler is there"))])
async def test_a_gateway_needs_a_scheduler(connected: bool, said: tuple[int, str]) -> None:
    class Schedulers:
        def __init__(self) -> None:
            self.connected = connected

    assert await ask(ready_of(Schedulers()), "/ready") == said  # type: ignore[arg-type]
