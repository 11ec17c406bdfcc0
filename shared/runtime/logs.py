"""Structured logs: one JSON object a line on stderr, with the service and, inside a job that is traced, its trace.

A trouble is told once: of warnings and errors of one kind, and of lines about single jobs, the first one is written and
then one in QUIET_S, with how many were left out.
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

# MERGED quiet.py
# Says a trouble once: what goes on all the time is one line, then one in a while with how many were left out.


QUIET_S = 30.0
KINDS = 1_000  # that are remembered; then the oldest may be told again
# What tells kinds apart, where a line has it: whom or what it is about, never what is different each time.
_ABOUT = ("instance_id", "scheduler", "to", "peer", "address", "table", "database", "step", "method", "path", "task")
_HOW = ("code", "state", "kind", "why", "error_type")
_TEXT = 120  # characters of a text that its logger has filled in itself, as asyncio does: what follows is details
_JOBS = ("job_id", "transfer_id", "request_id")  # lines that have one are as many as jobs


class Kind(NamedTuple):
    """What is one trouble: told by a logger, at a level, in the same words, of the same thing."""

    logger: str
    level: int
    event: str
    about: tuple[str, ...] = ()


@dataclass(slots=True)
class _Told:
    until_s: float  # of the clock; no other line before
    left_out: int = 0


class Limiter:
    """Which lines are written. `clock` gives seconds that never go back. For any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, quiet_s: float = QUIET_S) -> None:
        self._clock = clock
        self._quiet_s = quiet_s
        self._kinds: OrderedDict[Kind, _Told] = OrderedDict()  # in the order in which they were told
        self._lock = threading.Lock()

    def take(self, kind: Kind) -> int | None:
        """How many were left out before this line; None: leave it out, too."""
        now = self._clock()
        with self._lock:
            told = self._kinds.get(kind)
            if told is not None and now < told.until_s:
                told.left_out += 1
                return None
            self._kinds[kind] = _Told(now + self._quiet_s)
            self._kinds.move_to_end(kind)
            if len(self._kinds) > KINDS:
                self._kinds.popitem(last=False)
            return told.left_out if told is not None else 0

    def due(self) -> list[tuple[Kind, int]]:
        """Kinds of which lines were left out that nothing has told of since, and how many; each is given once."""
        now = self._clock()
        found = []
        with self._lock:
            while self._kinds:
                kind, told = next(iter(self._kinds.items()))
                if now < told.until_s:
                    break
                del self._kinds[kind]
                if told.left_out:
                    found.append((kind, told.left_out))
        return found


class Quiet:
    """Limits lines: those of structlog as a processor, all others in the handler."""

    def __init__(self, limiter: Limiter | None = None) -> None:
        self.limiter = limiter or Limiter()

    def processor(self, logger: Any, method: str, event: Any) -> Any:
        """The first one of structlog's chain. Raises DropEvent for what is left out."""
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
        """Whether a record is written. Of the standard library's a kind is the text before its values are filled in."""
        if isinstance(record.msg, dict) or record.levelno < logging.WARNING:  # structlog's have been asked about
            return True
        failed = record.exc_info[0] if record.exc_info else None
        about = (failed.__name__,) if failed is not None else ()
        text = str(record.msg).partition("\n")[0][:_TEXT]
        left_out = self.limiter.take(Kind(record.name, record.levelno, text, about))
        if left_out:
            record.left_out = left_out
        return left_out is not None


class QuietHandler(logging.StreamHandler[TextIO]):
    """Writes what passes. Whenever it writes, it also tells of what was left out and has not come again."""

    def __init__(self, quiet: Quiet, stream: TextIO) -> None:
        super().__init__(stream)
        self._quiet = quiet

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or leave it out."""
        for kind, left_out in self._quiet.limiter.due():
            more = logging.LogRecord(kind.logger, kind.level, "", 0, "more lines of a kind were left out", (), None)
            more.left_out, more.line = left_out, " ".join((kind.event, *kind.about))
            super().emit(more)
        if self._quiet.passes(record):
            super().emit(record)


_LEVELS = {"exception": "error", "warn": "warning", "fatal": "critical"}

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
