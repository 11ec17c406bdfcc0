"""Why a process ended or fails, from the end of its log: tracebacks, log records in JSON, and plain lines."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

_TAIL_BYTES = 64 << 10
_TRACEBACK = "Traceback (most recent call last):"
_FATAL = re.compile(r"^(Fatal Python error: .*|Killed|Segmentation fault.*|.*: error: .*)$")


@dataclass(slots=True)
class _LogEnd:
    """The last of each kind in a log; empty if there is none."""

    exception: str = ""
    error: str = ""  # a record of level error or critical
    line: str = ""


def cause_of(log: Path, since: int = 0) -> str:
    """Why the process ended: its last exception, else its last error, else its last line, all after `since` bytes."""
    end = _read_end(log, since)
    return end.exception or end.error or end.line or "its log is empty"


def last_error(log: Path) -> str:
    """The last error of a running process, such as the monitor's reason to refuse it; empty if there is none."""
    return _read_end(log, 0).error


def size_of(log: Path) -> int:
    """Its size in bytes; 0 if there is no log."""
    return log.stat().st_size if log.exists() else 0


def _read_end(log: Path, since: int) -> _LogEnd:
    end, in_traceback = _LogEnd(), False
    for line in _tail(log, since):
        record = _record(line)
        traceback = next((text for key in ("exception", "event") if _TRACEBACK in (text := str(record.get(key)))), "")
        if traceback:
            end.exception = traceback.strip().splitlines()[-1].strip()
        elif line.strip().endswith(_TRACEBACK):
            in_traceback = True
        elif _FATAL.match(line) or (in_traceback and line and not line[0].isspace()):
            end.exception, in_traceback = line.strip(), False
        if record.get("level") in ("error", "critical"):
            event, reason = str(record.get("event", "")), record.get("reason", record.get("error", ""))
            end.error = f"{event}: {reason}" if reason else event
        end.line = line.strip() or end.line
    return end


def _tail(log: Path, since: int) -> list[str]:
    try:
        with log.open("rb") as data:
            data.seek(max(since, log.stat().st_size - _TAIL_BYTES))
            return data.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _record(line: str) -> dict[str, object]:
    """A log record in JSON; empty for any other line."""
    try:
        found = json.loads(line) if line.startswith("{") else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
