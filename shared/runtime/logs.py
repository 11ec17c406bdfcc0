"""Structured logs: one JSON object a line on stderr, with the service and, inside a job, its id."""

import faulthandler
import logging
import signal
import sys
from typing import Any

import structlog


def configure_logs(service: str, level: str = "INFO") -> None:
    """Send everything, structlog's and the standard library's, through one JSON line format.

    SIGUSR1 adds the stacks of all threads: also of one that holds the interpreter's lock and never gives it back.
    """
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or sys.stderr)
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    structlog.contextvars.bind_contextvars(service=service)


def get_log(name: str) -> Any:
    """A logger; `log.info("what happened", job_id=…, key=value)`."""
    return structlog.get_logger(name)
