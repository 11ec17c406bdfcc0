"""Lines of our logs for people."""

import json

_FIRST = ("timestamp", "level", "event", "service")


def plain(line: str) -> str:
    """Time of day, level, what happened, then the rest by name; a line that is no record of ours as it is."""
    try:
        record = json.loads(line)
    except ValueError:
        return line
    if not isinstance(record, dict) or "event" not in record:
        return line
    at = str(record.get("timestamp", ""))[11:23]
    rest = " ".join(f"{name}={value}" for name, value in record.items() if name not in _FIRST)
    return f"{at:12} {record.get('level', '')!s:8} {record['event']}{'  ' if rest else ''}{rest}"
