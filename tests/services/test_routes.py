"""Routes run on the event loop: in FastAPI's thread pool they would read dicts and deques that the loop changes."""

import inspect
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from predictor.app import build_app as predictor
from predictor.settings import PredictorSettings
from services.cluster_monitor.app import create_app as monitor
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.app import create_app as scheduler
from services.global_scheduler.settings import SchedulerSettings
from services.worker.app import create_app as worker
from services.worker.settings import WorkerSettings


def _apps() -> dict[str, FastAPI]:
    settings = WorkerSettings(
        instance_id="d0",
        model="demo",
        rpc_port=1,
        http_port=2,
        kv_port=3,
        monitor_url="http://127.0.0.1:9",
        heartbeat_address="tcp://127.0.0.1:9",
        broadcast_address="tcp://127.0.0.1:9",
        engine="emulated",
    )
    return {
        "monitor": monitor(MonitorSettings()),
        "scheduler": scheduler(SchedulerSettings()),
        "worker": worker(settings),
        "predictor": predictor(PredictorSettings()),
    }


def _calls(dependant: Dependant) -> Iterator[object]:
    yield dependant.call
    for one in dependant.dependencies:
        yield from _calls(one)


@pytest.mark.parametrize("name", ["monitor", "scheduler", "worker", "predictor"])
def test_no_route_leaves_the_event_loop(name: str) -> None:
    routes = [route for route in _apps()[name].routes if isinstance(route, APIRoute)]
    assert len(routes) >= 3
    sync = [route.path for route in routes if not inspect.iscoroutinefunction(route.endpoint)]
    assert sync == []
    if name in ("monitor", "scheduler"):  # nor what its arguments are made by: a thread a call
        called = {call for route in routes for call in _calls(route.dependant)}
        assert [call for call in called if not inspect.iscoroutinefunction(call)] == []
