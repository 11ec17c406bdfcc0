"""`polyphase logs NAME`: the last lines of a process, from its file, or by the monitor for another host's instance."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from services.launcher import state_file
from shared.errors import NotFound, PolyphaseError
from shared.files.faults import meant
from shared.wire.clients.monitor import MonitorClient

POLL_S = 0.25
_BLOCK = 64 << 10
_STYLES = {"warning": "yellow", "error": "red", "critical": "bold red", "debug": "dim"}
_LEAD = ("timestamp", "level", "event", "logger", "service")


async def read(data_dir: Path, monitor: str, name: str, lines: int, *, follow: bool) -> AsyncIterator[str]:
    """The last lines, and with `follow` each new one. Raises NotFound that names the processes with a log."""
    file = data_dir / "logs" / f"{name}.log"
    if file.is_file():
        for line in last_lines(file, lines):
            yield line
        if follow:
            async for line in _following(file):
                yield line
        return
    async for line in _from_monitor(data_dir, monitor, name, lines, follow):
        yield line


def known(data_dir: Path) -> list[str]:
    return sorted(file.stem for file in (data_dir / "logs").glob("*.log"))


def last_lines(file: Path, lines: int) -> list[str]:
    """The last lines, read from the end of the file in blocks."""
    with file.open("rb") as data:
        at, found = data.seek(0, os.SEEK_END), b""
        while at and found.count(b"\n") <= lines:
            start = max(0, at - _BLOCK)
            data.seek(start)
            found = data.read(at - start) + found
            at = start
        return found.decode(errors="replace").splitlines()[-lines:] if lines else []


async def _following(file: Path) -> AsyncIterator[str]:
    """Lines that are written from now on; a truncated file is read from its beginning."""
    with file.open("rb") as data:
        data.seek(0, os.SEEK_END)
        left = b""
        while True:
            if file.stat().st_size < data.tell():
                data.seek(0)
            *lines, left = (left + data.read()).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace")
            if not lines:
                await asyncio.sleep(POLL_S)


async def _from_monitor(data_dir: Path, given: str, name: str, lines: int, follow: bool) -> AsyncIterator[str]:
    """Lines of an instance of another host, whose worker keeps the last ones."""
    here = known(data_dir)
    try:
        url = given or state_file.read(data_dir).monitor_url
    except NotFound:
        raise _unknown(name, here, data_dir) from None
    shown: list[str] = []
    async with MonitorClient(url) as monitor:
        while True:
            try:
                found = await monitor.log(name, max(1, lines))
            except NotFound:
                others = [entry.instance_id for entry in await monitor.instances()]
                raise _unknown(name, sorted({*here, *others}), data_dir) from None
            for line in _new_lines(shown, found):
                yield line
            if not follow:
                return
            shown = found
            await asyncio.sleep(1.0)


def _new_lines(shown: list[str], found: list[str]) -> list[str]:
    """The lines of `found` after those of `shown`; both are the last lines of the same log."""
    for start in range(len(shown)):
        overlap = shown[start:]
        if found[: len(overlap)] == overlap:
            return found[len(overlap) :]
    return found


def _unknown(name: str, names: list[str], data_dir: Path) -> PolyphaseError:
    if not names:
        return NotFound(f"no process has a log in {data_dir / 'logs'}: start a suite with `polyphase up`")
    return NotFound(f"no process {name!r}{meant(name, names)} Known: {', '.join(names)}")


def show(console: Console, line: str) -> None:
    """Print a line; JSON is shown as time, level, event and other fields."""
    entry = _entry(line)
    if entry is None:
        console.print(Text(line), soft_wrap=True)
        return
    level = str(entry.get("level", ""))
    text = Text(f"{_time(entry.get('timestamp'))} ", "dim").append(f"{level:<8}", _STYLES.get(level, "dim"))
    text.append(str(entry.get("event", "")), _STYLES.get(level, "default"))
    for key, value in _other_fields(entry):
        text.append(f"  {key}=", "dim").append(value, "default")
    console.print(text, soft_wrap=True)


def _other_fields(entry: dict[str, object]) -> Iterator[tuple[str, str]]:
    for key, value in entry.items():
        if key not in _LEAD:
            text = value if isinstance(value, str) else json.dumps(value)
            yield key, f"\n{text}" if "\n" in text else text


def _entry(line: str) -> dict[str, object] | None:
    try:
        found = json.loads(line) if line.startswith("{") else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _time(stamp: object) -> str:
    """The time in this machine's time zone."""
    try:
        return f"{datetime.fromisoformat(str(stamp)).astimezone():%H:%M:%S.%f}"[:-3]
    except ValueError:
        return str(stamp or "")
