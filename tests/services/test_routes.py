"""Routes run on the event loop: in FastAPI's thread pool they would read dicts and deques that the loop changes."""

import inspect
from collections.abc import Iterator

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from tests.services.all_apps import NAMES, all_apps


def _calls(dependant: Dependant) -> Iterator[object]:
    yield dependant.call
    for one in dependant.dependencies:
        yield from _calls(one)


@pytest.mark.parametrize("name", NAMES)
def test_no_route_leaves_the_event_loop(name: str) -> None:
    routes = [route for route in all_apps()[name].routes if isinstance(route, APIRoute)]
    assert len(routes) >= 3
    sync = [route.path for route in routes if not inspect.iscoroutinefunction(route.endpoint)]
    assert sync == []
    if name in ("monitor", "scheduler"):  # nor what its arguments are made by: a thread a call
        called = {call for route in routes for call in _calls(route.dependant)}
        assert [call for call in called if not inspect.iscoroutinefunction(call)] == []
