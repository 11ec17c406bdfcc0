"""The scheduler's span: one for each question, with the answer and its reasons."""

import time
from collections.abc import Callable

import structlog

from shared.domain.route import Route
from shared.errors import PolyphaseError
from shared.runtime.otlp import Tracer
from shared.wire.messages import PlaceRequest
from shared.wire.rpc_server import ServerCall

MOST = 16  # reasons that are told
Place = Callable[[PlaceRequest, ServerCall], Route]


def traced(place: Place, tracer: Tracer) -> Place:
    """`place`, which tells what it decided where the question belongs to a trace."""

    def told(request: PlaceRequest, call: ServerCall) -> Route:
        trace = tracer.remote(request.trace) if request.trace else None
        if trace is None:
            return place(request, call)
        span = trace.child("place", time.time(), {"polyphase.job.id": request.job.job_id}, "server")
        with structlog.contextvars.bound_contextvars(trace_id=trace.trace_id):
            try:
                route = place(request, call)
            except PolyphaseError as error:
                span.end(time.time(), error=error.code)
                raise
        span.end(time.time(), _figures(route))
        return route

    return told


def _figures(route: Route) -> dict[str, str | int | list[str]]:
    return {
        "polyphase.policy": route.policy,
        "polyphase.split": route.split,
        "polyphase.prefill.instance.id": route.prefill.instance_id if route.prefill is not None else "",
        "polyphase.decode.instance.id": route.decode.instance_id if route.decode is not None else "",
        "polyphase.reasons": [reason.line for reason in route.reasons[:MOST]],
    }
