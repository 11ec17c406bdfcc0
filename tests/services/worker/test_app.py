"""The assembled instance: health, details, and its end in good order."""

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from services.launcher.suite import until
from services.worker.app import create_app, expected_s, finish
from services.worker.jobs.roles import RoleState
from shared.domain.instance import Role
from shared.domain.rates import UNKNOWN_STEPS
from shared.errors import WrongRole
from shared.runtime.http import service_app
from shared.wire.messages import StepRecord
from tests.services.worker.test_settings import settings


async def health(app: Any, path: str = "/health") -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as http:
        return await http.get(path)


@pytest.mark.parametrize(("step_s", "code", "said"), [(0.0, 200, "ok"), (59.0, 200, "ok"), (61.0, 503, "61 s")])
async def test_an_engine_whose_step_does_not_end_is_not_well(step_s: float, code: int, said: str) -> None:
    app = create_app(settings(hang_s=60.0))
    app.state.instance = SimpleNamespace(engine=SimpleNamespace(step_s=step_s))
    answer = await health(app)
    assert answer.status_code == code
    assert said in answer.json()["status"]


@pytest.mark.parametrize(("unready", "code"), [("", 200), ("it is draining", 503)])
async def test_one_that_drains_is_well_and_not_ready(unready: str, code: int) -> None:
    app = create_app(settings(hang_s=60.0))
    telemetry = SimpleNamespace(unready=unready)
    app.state.instance = SimpleNamespace(engine=SimpleNamespace(step_s=0.0), telemetry=telemetry)
    assert (await health(app)).status_code == 200
    answer = await health(app, "/ready")
    assert answer.status_code == code
    assert unready in answer.json()["status"]


async def test_health_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that is full of stuck threads says nothing of the event loop."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a thread was asked for")

    monkeypatch.setattr("starlette.routing.run_in_threadpool", refuse)
    monkeypatch.setattr("fastapi.routing.run_in_threadpool", refuse)
    app = service_app("any", lambda _: None, token="")  # type: ignore[arg-type,return-value]
    assert (await health(app)).json() == {"status": "ok", "service": "any"}


@pytest.mark.slow  # imports vLLM
async def test_the_real_engine_says_how_long_its_step_lasts() -> None:
    from services.worker.engines.vllm import VllmEngine

    engine, stuck, going_on = VllmEngine(settings(), {}), threading.Event(), threading.Event()
    engine._scheduler = SimpleNamespace(has_requests=lambda: False)
    engine._observer = SimpleNamespace(began=lambda: None, ended=lambda: None)
    engine._core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=None))
    engine._exports = engine._kept = SimpleNamespace(advance=lambda: None, close=lambda: None)
    engine._snapshot = lambda: None  # type: ignore[method-assign]

    def block() -> None:
        stuck.set()
        going_on.wait()

    engine._post(block)
    thread = threading.Thread(target=engine._steps)
    thread.start()
    assert stuck.wait(10)
    await until(lambda: engine.step_s > 0.05, 10, "the step to last")
    going_on.set()
    await until(lambda: engine.step_s == 0.0, 10, "the step to end")
    engine._stopping = True
    thread.join(10)


def step(prefill: tuple[tuple[int, int], ...], decodes: int = 0, context: int = 0) -> StepRecord:
    return StepRecord(0, 0.0, 0.1, 0.0, prefill, decodes, context)


def test_what_a_step_should_take() -> None:
    rates = UNKNOWN_STEPS
    assert expected_s(rates, step(((512, 100),))) == pytest.approx(rates.prefill_s(512, 100))
    assert expected_s(rates, step((), 8, 4_000)) == pytest.approx(rates.decode_s(8, 4_000))
    assert expected_s(rates, step(((256, 0),), 8, 4_000)) == pytest.approx(rates.mixed_s(256, 0, 8, 4_000))
    two = expected_s(rates, step(((256, 0), (128, 50))))
    assert two == pytest.approx(rates.prefill_s(256, 0) + rates.prefill_s(128, 50) - rates.prefill.fixed_s)
    assert expected_s(None, step(())) is None


async def test_it_waits_for_its_jobs_and_takes_no_more() -> None:
    roles, kv = RoleState(Role.DECODE), SimpleNamespace(staged_bytes=0)
    with roles.job(Role.DECODE, "j"):
        ending = asyncio.create_task(finish(roles, kv, 60.0))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        with pytest.raises(WrongRole), roles.job(Role.DECODE, "j"):
            pass
        assert not ending.done()
    await asyncio.wait_for(ending, 5)


async def test_it_waits_until_the_kv_of_its_jobs_was_fetched() -> None:
    kv: Any = SimpleNamespace(staged_bytes=100)
    ending = asyncio.create_task(finish(RoleState(Role.PREFILL), kv, 60.0))
    done, _ = await asyncio.wait([ending], timeout=0.2)
    assert not done
    kv.staged_bytes = 0
    await asyncio.wait_for(ending, 5)


async def test_it_ends_when_its_time_is_up() -> None:
    roles, kv = RoleState(Role.DECODE), SimpleNamespace(staged_bytes=1)
    began = time.monotonic()
    with roles.job(Role.DECODE, "j"):
        await finish(roles, kv, 0.2)  # type: ignore[arg-type]
    assert 0.2 <= time.monotonic() - began < 5


async def test_without_any_time_it_ends_at_once_and_refuses_nobody() -> None:
    roles = RoleState(Role.DECODE)
    with roles.job(Role.DECODE, "j"):
        await finish(roles, SimpleNamespace(staged_bytes=1), 0.0)  # type: ignore[arg-type]
        assert not roles.draining
