"""Refuses calls that change something and have parameters or a body that their route does not know."""

from collections.abc import Iterator

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from shared.errors import InvalidRequest
from shared.runtime.keys import READING

_EMPTY = len("{}")


async def nothing_stray(request: Request) -> None:
    """For FastAPI's `Depends`. Raises InvalidRequest for unknown parameters, and for a body where none is accepted."""
    route = request.scope.get("route")
    if request.method in READING or not isinstance(route, APIRoute):
        return
    known = set(_queries(route.dependant))
    if unknown := [name for name in request.query_params if name not in known]:
        raise InvalidRequest(f"query.{unknown[0]}: {request.method} {route.path} knows no such parameter")
    length = request.headers.get("content-length", "0")
    if route.body_field is None and ("transfer-encoding" in request.headers or int(length) > _EMPTY):
        raise InvalidRequest(f"body: {request.method} {route.path} takes none")


def _queries(dependant: Dependant) -> Iterator[str]:
    yield from (param.alias for param in dependant.query_params)
    for each in dependant.dependencies:
        yield from _queries(each)
