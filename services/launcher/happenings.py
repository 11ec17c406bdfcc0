"""`polyphase events` and `polyphase requests`: what happened in the cluster, and how requests fared."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.launcher import pages
from shared.domain.words import duration
from shared.errors import DeadlineExceeded, InvalidRequest, NotFound, Unavailable
from shared.wire.clients.http import JsonClient

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_AGAIN_S, _ANSWER_S = 1.0, 5.0
_QUERY = re.compile(r"query\.(\w+)(?:\.\d+)?: Input should be")  # how a service names what it does not take
_BAD = {"death", "unresponsive", "operation_failed", "registration_refused", "operation_refused"}
_FINE = {"registered", "returned", "recovered"}
_DAY_S = 86_400.0
_OPERATIONS = ("flip", "drain", "resume")
_OF_PEOPLE = ("succeeded", "running", "unknown")  # others are events


def ago_s(words: str) -> float:
    """Seconds of `90s`, `10m`, `2h` or `1d`. Raises InvalidRequest."""
    found = _SPAN.fullmatch(words.strip())
    if found is None:
        raise InvalidRequest(f"--since {words!r}: say how long ago, such as 90s, 10m, 2h or 1d")
    return float(found[1]) * _UNITS[found[2]]


@dataclass(frozen=True, slots=True)
class EventsWanted:
    """Which events: the newest `limit`, of some kinds only, of one instance, of the last `since_s`."""

    kinds: tuple[str, ...] = ()
    instance: str = ""
    since_s: float | None = None
    limit: int = 50


async def events(url: str, wanted: EventsWanted, *, follow: bool) -> AsyncIterator[Mapping[str, Any]]:
    """Oldest first; then, if `follow`, each as it happens. People's flips, drains and resumes are among them.

    Raises the monitor's own error.
    """
    since_s = time.time() - wanted.since_s if wanted.since_s is not None else 0.0
    seen: set[str] = set()
    async with JsonClient(url) as monitor:
        while True:
            rows = [row for row in await _newest(monitor, wanted, since_s) if row["event_id"] not in seen]
            for row in rows:
                yield row
            if not follow:
                return
            if rows:  # one of the same moment may still come
                since_s = float(rows[-1]["time_s"]) - 1e-3
            seen |= {str(row["event_id"]) for row in rows}
            await asyncio.sleep(_AGAIN_S)


async def _newest(monitor: JsonClient, wanted: EventsWanted, since_s: float) -> list[dict[str, Any]]:
    kinds = [kind for kind in wanted.kinds if kind not in _OPERATIONS]
    found: list[dict[str, Any]] = []
    if kinds or not wanted.kinds:
        params: dict[str, Any] = {"limit": wanted.limit, "since": since_s}
        params |= {"kind": kinds} if kinds else {}
        params |= {"instance": wanted.instance} if wanted.instance else {}
        found += await _asked(monitor, "/events", params)
    if not wanted.kinds or len(kinds) < len(wanted.kinds):
        rows = await monitor.call("GET", "/flips", params={"limit": 1_000})
        found += [event for row in rows if _asked_for(event := _operation(row), row, wanted, since_s)]
    return sorted(found, key=lambda row: float(row["time_s"]))[-wanted.limit :]


def _operation(row: Mapping[str, Any]) -> dict[str, Any]:
    """An operation as an event."""
    roles = f"{row['from_role']} → {row['to_role']} " if row["kind"] == "flip" else ""
    took = f", {duration(row['total_s'])}" if row["total_s"] else ""
    return {
        "event_id": row["operation_id"],
        "time_s": row["started_s"],
        "kind": row["kind"],
        "instance_id": row["instance_id"],
        "role": row["to_role"],
        "text": f"{roles}by {row['who']}: {row['result']}{took}",
        "operation_id": row["operation_id"],
    }


def _asked_for(event: Mapping[str, Any], row: Mapping[str, Any], wanted: EventsWanted, since_s: float) -> bool:
    """Whether it is wanted, and no event already: those that a policy asked for are, and those that failed."""
    of_people = row["result"] in _OF_PEOPLE and not row["why"]
    fits = (not wanted.instance or row["instance_id"] == wanted.instance) and event["time_s"] > since_s
    return of_people and fits and (not wanted.kinds or event["kind"] in wanted.kinds)


def show_event(console: Console, row: Mapping[str, Any]) -> None:
    """One event: when, what, whom it concerns, and its words, on lines of their own where the width wants it."""
    kind = str(row["kind"])
    style = "red" if kind in _BAD else "green" if kind in _FINE else "yellow"
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=False, width=console.width)
    table.add_column(no_wrap=True, style="dim", width=_when_width(row))
    table.add_column(width=20, no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    words = Text(f"{row['instance_id']}  " if row["instance_id"] else "", "bold").append(str(row["text"]), "not bold")
    table.add_row(_when(float(row["time_s"])), Text(kind.replace("_", " "), style), words)
    console.print(table)


def _when(time_s: float) -> str:
    """The time of day; the date before it once it is older than a day."""
    at = datetime.fromtimestamp(time_s)
    return f"{at:%m-%d %H:%M:%S}" if time.time() - time_s > _DAY_S else f"{at:%H:%M:%S}"


def _when_width(row: Mapping[str, Any]) -> int:
    return len(_when(float(row["time_s"])))


@dataclass(frozen=True, slots=True)
class RequestsWanted:
    """Which requests; empty and None: any. Times in seconds before now."""

    job: str = ""
    caller: str = ""
    slo: str = ""
    instance: str = ""
    outcome: str = ""
    missed: bool | None = None
    since_s: float | None = None
    order: str = "slowest_ttft"
    limit: int = 20

    def params(self, now_s: float) -> dict[str, str | int | float]:
        """As the scheduler's search takes them."""
        said: dict[str, str | int | float] = {"order": self.order, "limit": self.limit}
        texts = {name: getattr(self, name) for name in ("job", "caller", "slo", "instance", "outcome")}
        said |= {name: text for name, text in texts.items() if text}
        if self.missed is not None:
            said["missed"] = "true" if self.missed else "false"
        if self.since_s is not None:
            said["since"] = now_s - self.since_s
        return said


async def requests(urls: Sequence[str], wanted: RequestsWanted) -> dict[str, Any]:
    """Rows of the database, by any scheduler that answers. Raises the last one's error."""
    for number, url in enumerate(urls, 1):
        async with JsonClient(url) as scheduler:
            try:
                answer: dict[str, Any] = await _asked(scheduler, "/requests/search", wanted.params(time.time()))
            except (Unavailable, DeadlineExceeded):
                if number == len(urls):
                    raise
                continue
            return answer
    raise NotFound("this suite has no scheduler")


async def _asked(client: JsonClient, path: str, params: Mapping[str, Any]) -> Any:
    """The answer; what is wrong with a parameter is told of the option that it came from."""
    try:
        return await client.call("GET", path, params=params, timeout_s=_ANSWER_S)
    except InvalidRequest as error:
        raise InvalidRequest(_QUERY.sub(r"--\1 must be one of", error.message)) from error


def show_requests(console: Console, answer: Mapping[str, Any]) -> None:
    """A table; what missed its target is marked."""
    if not answer["rows"]:
        console.print("no such request")
        return
    table = Table(box=None, padding=(0, 1), pad_edge=False, width=console.width)
    table.add_column("request", no_wrap=True, ratio=1)
    for column in ("arrived", "class", "outcome"):
        table.add_column(column, no_wrap=True, max_width=14, overflow="ellipsis")
    for column in ("tokens", "TTFT", "TPOT"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in answer["rows"]:
        table.add_row(*_cells(row))
    console.print(table)
    more = "there are more: `--limit`; " if answer.get("more") else ""
    console.print(
        Text(f"✘ missed its SLO. {more}`polyphase explain ID` tells one's story; any part of its id will do", "dim")
    )


def _cells(row: Mapping[str, Any]) -> tuple[Text | str, ...]:
    missed = row["slo_met"] is False
    times = [pages.NONE if row[key] is None else duration(row[key]) for key in ("ttft_s", "tpot_s")]
    return (
        Text(f"{'✘' if missed else ' '} {_short(row['job_id'])}", "red" if missed else ""),
        _when(float(row["arrived_s"])),
        str(row["slo"]),
        str(row["outcome"] or row["phase"]),
        f"{row['prompt_tokens']:,} + {row['output_tokens']:,}",
        *times,
    )


def _short(job_id: str) -> str:
    """Without what all of a kind have in common, so that what tells them apart is seen, and can be copied."""
    return job_id.removeprefix("chatcmpl-").removeprefix("cmpl-").removeprefix("resp_").removeprefix("msg_")
