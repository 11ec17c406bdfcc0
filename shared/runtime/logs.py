"""Structured logs: one JSON object a line on stderr, with the service and, in a traced job, its trace.

Repeated lines are limited: of warnings and errors of one kind, and of lines about single jobs, the first is written and
then one every `QUIET_S`, with the number of lines that were left out.
"""

import faulthandler
import logging
import signal
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

import structlog
from structlog import DropEvent

QUIET_S = 30.0
KINDS = 1_000  # that are remembered; then a line of the oldest kind may be written again
# Keys that distinguish kinds of lines: the subject of a line, not values that differ each time.
_ABOUT = ("instance_id", "scheduler", "to", "peer", "address", "table", "database", "step", "method", "path", "task")
_HOW = ("code", "state", "kind", "why", "error_type")
_TEXT = 120  # characters of a text into which its logger has put the details, as asyncio does
_JOBS = ("job_id", "transfer_id", "request_id")  # lines with one of these are as many as jobs


class Kind(NamedTuple):
    """Lines that count as repetitions: of one logger, level, text and subject."""

    logger: str
    level: int
    event: str
    about: tuple[str, ...] = ()


@dataclass(slots=True)
class _Written:
    until_s: float  # by the clock; no other line before
    left_out: int = 0


class Limiter:
    """Decides which lines are written; thread-safe. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, quiet_s: float = QUIET_S) -> None:
        self._clock = clock
        self._quiet_s = quiet_s
        self._kinds: OrderedDict[Kind, _Written] = OrderedDict()  # in the order in which they were written
        self._lock = threading.Lock()

    def take(self, kind: Kind) -> int | None:
        """The number of lines that were left out before this one; None: leave this one out, too."""
        now = self._clock()
        with self._lock:
            written = self._kinds.get(kind)
            if written is not None and now < written.until_s:
                written.left_out += 1
                return None
            self._kinds[kind] = _Written(now + self._quiet_s)
            self._kinds.move_to_end(kind)
            if len(self._kinds) > KINDS:
                self._kinds.popitem(last=False)
            return written.left_out if written is not None else 0

    def due(self) -> list[tuple[Kind, int]]:
        """The kinds with lines that were left out and not reported since, with their number; each is returned once."""
        now = self._clock()
        found = []
        with self._lock:
            while self._kinds:
                kind, written = next(iter(self._kinds.items()))
                if now < written.until_s:
                    break
                del self._kinds[kind]
                if written.left_out:
                    found.append((kind, written.left_out))
        return found


class Quiet:
    """Limits lines: those of structlog as a processor, those of the standard library in the handler."""

    def __init__(self, limiter: Limiter | None = None) -> None:
        self.limiter = limiter or Limiter()

    def processor(self, logger: Any, method: str, event: Any) -> Any:
        """The first processor of structlog's chain. Raises DropEvent for lines that are left out."""
        level = logging.getLevelNamesMapping().get(_LEVELS.get(method, method).upper(), logging.INFO)
        if level < logging.WARNING and not any(key in event for key in _JOBS):
            return event
        about = [f"{key}={event[key]}" for key in (*_ABOUT, *_HOW) if event.get(key)]
        failed = event.get("exc_info")
        failed = sys.exc_info()[1] if failed is True else failed
        if isinstance(failed, BaseException):
            about.append(type(failed).__name__)
        left_out = self.limiter.take(Kind(getattr(logger, "name", ""), level, str(event.get("event")), tuple(about)))
        if left_out is None:
            raise DropEvent
        if left_out:
            event["left_out"] = left_out
        return event

    def passes(self, record: logging.LogRecord) -> bool:
        """Whether a record is written. Its kind is the text before values are filled in."""
        if isinstance(record.msg, dict) or record.levelno < logging.WARNING:  # structlog's lines passed `processor`
            return True
        failed = record.exc_info[0] if record.exc_info else None
        about = (failed.__name__,) if failed is not None else ()
        text = str(record.msg).partition("\n")[0][:_TEXT]
        left_out = self.limiter.take(Kind(record.name, record.levelno, text, about))
        if left_out:
            record.left_out = left_out
        return left_out is not None


class QuietHandler(logging.StreamHandler[TextIO]):
    """Writes the lines that pass, and with each of them the number of left-out lines of kinds that did not come
    again.
    """

    def __init__(self, quiet: Quiet, stream: TextIO) -> None:
        super().__init__(stream)
        self._quiet = quiet

    def emit(self, record: logging.LogRecord) -> None:
        for kind, left_out in self._quiet.limiter.due():
            more = logging.LogRecord(kind.logger, kind.level, "", 0, "more lines of a kind were left out", (), None)
            more.left_out, more.line = left_out, " ".join((kind.event, *kind.about))
            super().emit(more)
        if self._quiet.passes(record):
            super().emit(record)


_LEVELS = {"exception": "error", "warn": "warning", "fatal": "critical"}

KEPT = 2_000  # lines


class LogTail(logging.Handler):
    """Keeps the newest lines of a log, for inspection of its process."""

    def __init__(self, kept: int = KEPT) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=kept)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(self.format(record))
        except Exception:
            self.handleError(record)

    def newest(self, lines: int) -> list[str]:
        """At most `lines` lines, oldest first."""
        return list(self._lines)[-lines:]


def configure_logs(service: str, level: str = "INFO", tail: LogTail | None = None) -> None:
    """Write the lines of structlog and the standard library in one JSON format, to `tail`, too.

    SIGUSR1 writes the stacks of all threads, also of a thread that never releases the interpreter's lock.
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
    """Restore log levels after imports in the block: a library of vLLM sets the root logger to errors only."""
    root = logging.getLogger()
    leveled: list[logging.Logger | logging.Handler] = [root, *root.handlers]
    before = [(each, each.level) for each in leveled]
    try:
        yield
    finally:
        for each, level in before:
            each.setLevel(level)


def in_logs(trace_id: str) -> None:
    """Add the trace to all lines of this task and of tasks that it starts."""
    structlog.contextvars.bind_contextvars(trace_id=trace_id)


def get_log(name: str) -> Any:
    """A logger; `log.info("what happened", job_id=…, key=value)`."""
    return structlog.get_logger(name)
