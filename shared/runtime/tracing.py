"""Tracing, if it is on; while it is off, this module does not import OpenTelemetry."""

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
    """The tracer, which exports spans until a moment after the block; None while tracing is off.

    `service` is the kind of process, `name` identifies it. Raises InvalidRequest for an invalid endpoint.
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
