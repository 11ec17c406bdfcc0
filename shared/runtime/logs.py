"""Structured logs: one JSON object a line on stderr, with the service and, inside a job that is traced, its trace.

A trouble is told once: of warnings and errors of one kind, and of lines about single jobs, the first one is written and
then one in QUIET_S, with how many were left out.
"""

import faulthandler
import logging
import signal
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from shared.runtime.quiet import Quiet, QuietHandler

KEPT = 2_000  # lines


class LogTail(logging.Handler):
    """Keeps the newest lines of a log, for those who look at its process."""

    def __init__(self, kept: int = KEPT) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=kept)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one; of one that cannot be written, logging itself tells: nobody fails for what he logs."""
        try:
            self._lines.append(self.format(record))
        except Exception:
            self.handleError(record)

    def newest(self, lines: int) -> list[str]:
        """So many at most, oldest first."""
        return list(self._lines)[-lines:]


def configure_logs(service: str, level: str = "INFO", tail: LogTail | None = None) -> None:
    """Send everything, structlog's and the standard library's, through one JSON line format; `tail` hears it, too.

    SIGUSR1 adds the stacks of all threads: also of one that holds the interpreter's lock and never gives it back.
    """
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or sys.stderr)
    quiet = Quiet()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[quiet.processor, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handlers: list[logging.Handler] = [QuietHandler(quiet, sys.stderr), *([tail] if tail is not None else [])]
    for handler in handlers:
        handler.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=[structlog.stdlib.ExtraAdder(allow=("left_out", "line")), *shared],
                processors=[
                    structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                    structlog.processors.JSONRenderer(),
                ],
            )
        )
    logging.basicConfig(handlers=handlers, level=level.upper(), force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    structlog.contextvars.bind_contextvars(service=service)


@contextmanager
def keeping_levels() -> Iterator[None]:
    """For what is imported in the block: a library of vLLM's has the root logger say nothing below an error."""
    root = logging.getLogger()
    leveled: list[logging.Logger | logging.Handler] = [root, *root.handlers]
    before = [(each, each.level) for each in leveled]
    try:
        yield
    finally:
        for each, level in before:
            each.setLevel(level)


def in_logs(trace_id: str) -> None:
    """Have all lines of this task, and of those that it starts, name its trace."""
    structlog.contextvars.bind_contextvars(trace_id=trace_id)


def get_log(name: str) -> Any:
    """A logger; `log.info("what happened", job_id=…, key=value)`."""
    return structlog.get_logger(name)
