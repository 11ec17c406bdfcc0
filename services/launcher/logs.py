"""`polyphase logs NAME`: the last words of a process, here from its file, of another host's instance by the monitor."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.text import Text

from services.launcher import state_file
from shared.errors import NotFound, PolyphaseError
from shared.files.faults import meant
from shared.wire.clients.http import JsonClient

POLL_S = 0.25
_BLOCK = 64 << 10
_STYLES = {"warning": "yellow", "error": "red", "critical": "bold red", "debug": "dim"}
_LEAD = ("timestamp", "level", "event", "logger", "service")


async def read(data_dir: Path, monitor: str, name: str, lines: int, *, follow: bool) -> AsyncIterator[str]:
    """The last lines, then, if `follow`, each new one. Raises NotFound that names those that have a log."""
    file = data_dir / "logs" / f"{name}.log"
    if file.is_file():
        for line in last_lines(file, lines):
            yield line
        if follow:
            async for line in _following(file):
                yield line
        return
    async for line in _elsewhere(data_dir, monitor, name, lines, follow):
        yield line


def known(data_dir: Path) -> list[str]:
    """The processes that have a log here."""
    return sorted(file.stem for file in (data_dir / "logs").glob("*.log"))


def last_lines(file: Path, lines: int) -> list[str]:
    """The last so many, however long the file is."""
    with file.open("rb") as data:
        at, found = data.seek(0, os.SEEK_END), b""
        while at and found.count(b"\n") <= lines:
            start = max(0, at - _BLOCK)
            data.seek(start)
            found = data.read(at - start) + found
            at = start
        return found.decode(errors="replace").splitlines()[-lines:] if lines else []


async def _following(file: Path) -> AsyncIterator[str]:
    """Lines that are written from now on; a file that is begun anew is read from its beginning."""
    with file.open("rb") as data:
        data.seek(0, os.SEEK_END)
        left = b""
        while True:
            whole, left = _split(left + _rest(data, file))
            for line in whole:
                yield line.decode(errors="replace")
            if not whole:
                await asyncio.sleep(POLL_S)


def _rest(data: BinaryIO, file: Path) -> bytes:
    if file.stat().st_size < data.tell():
        data.seek(0)
    return data.read()


def _split(data: bytes) -> tuple[list[bytes], bytes]:
    *whole, left = data.split(b"\n")
    return whole, left


async def _elsewhere(data_dir: Path, given: str, name: str, lines: int, follow: bool) -> AsyncIterator[str]:
    """An instance of another host: its worker keeps its last lines."""
    here = known(data_dir)
    try:
        url = given or state_file.read(data_dir).monitor_url
    except NotFound:
        raise _unknown(name, here, data_dir) from None
    shown: list[str] = []
    async with JsonClient(url) as monitor:
        while True:
            try:
                found = _lines(await monitor.call("GET", f"/instances/{name}/log", params={"lines": max(1, lines)}))
            except NotFound:
                others = [str(entry["instance_id"]) for entry in await monitor.call("GET", "/instances")]
                raise _unknown(name, sorted({*here, *others}), data_dir) from None
            for line in _news(shown, found):
                yield line
            if not follow:
                return
            shown = found
            await asyncio.sleep(1.0)


def _lines(answer: Any) -> list[str]:
    return [str(line) for line in (answer["lines"] if isinstance(answer, dict) else answer)]


def _news(shown: list[str], found: list[str]) -> list[str]:
    """What of `found` comes after what was shown: both are the last lines of one log."""
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
    """A line for people: what is JSON as time, level, event and the rest."""
    entry = _entry(line)
    if entry is None:
        console.print(Text(line), soft_wrap=True)
        return
    level = str(entry.get("level", ""))
    text = Text(f"{_time(entry.get('timestamp'))} ", "dim").append(f"{level:<8}", _STYLES.get(level, "dim"))
    text.append(str(entry.get("event", "")), _STYLES.get(level, "default"))
    for key, value in _rest_of(entry):
        text.append(f"  {key}=", "dim").append(value, "default")
    console.print(text, soft_wrap=True)


def _rest_of(entry: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in entry.items():
        if key not in _LEAD:
            text = value if isinstance(value, str) else json.dumps(value)
            yield key, f"\n{text}" if "\n" in text else text


def _entry(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line) if line.startswith("{") else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _time(stamp: object) -> str:
    """By this machine's clock."""
    try:
        return f"{datetime.fromisoformat(str(stamp)).astimezone():%H:%M:%S.%f}"[:-3]
    except ValueError:
        return str(stamp or "")
