"""What a process wrote last: its tail, and the cause of its end."""

import json
import re
from pathlib import Path

_TAIL_BYTES = 64 << 10
_TRACEBACK = "Traceback (most recent call last):"
_FATAL = re.compile(r"^(Fatal Python error: .*|Killed|Segmentation fault.*|.*: error: .*)$")


def size(log: Path) -> int:
    """Bytes so far; 0 if there is none."""
    return log.stat().st_size if log.exists() else 0


def tail(log: Path, lines: int = 15, since: int = 0) -> str:
    """Its last lines, of what was written after `since` bytes."""
    return "\n".join(_read(log, since)[-lines:])


def cause_of(log: Path, since: int = 0) -> str:
    """Why the process that wrote it since then ended: its last exception, else its last error, else its last line."""
    lines = _read(log, since)
    for found in (_exception(lines), _error(lines)):
        if found:
            return found
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")


def complaint(log: Path) -> str:
    """What a running process complained of last, such as the monitor's reason to refuse it; empty if of nothing."""
    return _error(_read(log, 0))


def _read(log: Path, since: int) -> list[str]:
    try:
        with log.open("rb") as data:
            data.seek(max(since, log.stat().st_size - _TAIL_BYTES))
            return data.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _exception(lines: list[str]) -> str:
    """The last line of the last traceback, which may stand in a JSON line."""
    found, inside = "", False
    for line in lines:
        entry = _entry(line)
        text = "\n".join(str(entry.get(key, "")) for key in ("event", "exception"))
        if _TRACEBACK in text:
            found = _last_of(text)
        elif line.strip().endswith(_TRACEBACK):
            inside = True
        elif _FATAL.match(line) or (inside and line and not line[0].isspace()):
            found, inside = line.strip(), False
    return found


def _error(lines: list[str]) -> str:
    for line in reversed(lines):
        entry = _entry(line)
        if entry.get("level") in ("error", "critical"):
            reason = entry.get("reason", entry.get("error", ""))
            return f"{entry.get('event', '')}: {reason}" if reason else str(entry.get("event", ""))
    return ""


def _last_of(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _entry(line: str) -> dict[str, object]:
    try:
        found = json.loads(line) if line.startswith("{") else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
