"""The door to tracing. While it is off, nothing of OpenTelemetry is imported from here."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from shared.runtime.settings import Tracing

if TYPE_CHECKING:
    from shared.runtime.otlp import Tracer


@asynccontextmanager
async def tracing(
    settings: Tracing | None, service: str, name: str, registry: CollectorRegistry
) -> "AsyncIterator[Tracer | None]":
    """What makes spans, exported while the block lasts and for a moment after it; None where tracing is off.

    `service` is the kind of process, `name` which of them. Raises InvalidRequest for an endpoint that makes no sense.
    """
    if settings is None:
        yield None
        return
    from shared.runtime.otlp import Tracer

    tracer = Tracer(settings, service, name, registry)
    try:
        yield tracer
    finally:
        await tracer.close()
