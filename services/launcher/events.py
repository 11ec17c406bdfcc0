"""`polyphase events` and `polyphase requests`: what happened in the cluster, and how requests fared."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from services.launcher import pages, state_file
from shared import palette
from shared.domain.job import job_name
from shared.domain.verdict import duration
from shared.errors import DeadlineExceeded, InvalidRequest, NotFound, PolyphaseError, Unavailable
from shared.explain import Explanation, explain
from shared.timeline import RequestTimeline, SpanRecord
from shared.wire.clients.http import JsonClient
from shared.wire.clients.scheduler import SchedulerAdmin

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_AGAIN_S, _ANSWER_S = 1.0, 5.0
_PAGE = 1_000  # the most that the monitor tells at once
_LATE_S = 10.0  # what comes to light may be so much older than what is known already
_SAME_S = 1e-6  # another of the same moment may still come
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
    """Oldest first; then, if `follow`, each as it happens. People's flips, drains and resumes are among them: one that
    takes a while when it begins and when it ends.

    Raises the monitor's own error.
    """
    since_s = time.time() - wanted.since_s if wanted.since_s is not None else 0.0
    seen: dict[str, float] = {}
    under_way: set[str] = set()  # operations of which the end is not told yet
    async with JsonClient(url) as monitor:
        rows = await _newest(monitor, wanted, since_s, under_way)
        if len(rows) == wanted.limit:  # what is older was not asked for
            since_s = float(rows[0]["time_s"]) - _SAME_S
        while True:
            for row in rows:
                yield row
            if not follow:
                return
            seen |= {str(row["event_id"]): float(row["time_s"]) for row in rows}
            since_s = max([since_s, *(time_s - _LATE_S for time_s in seen.values())])
            seen = {event_id: time_s for event_id, time_s in seen.items() if time_s > since_s}
            await asyncio.sleep(_AGAIN_S)
            rows = [row for row in await _later(monitor, wanted, since_s, under_way) if row["event_id"] not in seen]


async def _newest(
    monitor: JsonClient, wanted: EventsWanted, since_s: float, under_way: set[str]
) -> list[dict[str, Any]]:
    found = await _page(monitor, wanted, since_s, {"limit": wanted.limit})
    found += await _operations(monitor, wanted, since_s, under_way)
    return _in_order(found)[-wanted.limit :]


async def _later(
    monitor: JsonClient, wanted: EventsWanted, since_s: float, under_way: set[str]
) -> list[dict[str, Any]]:
    """All since then, however many."""
    found: dict[str, dict[str, Any]] = {}
    params: dict[str, float] = {"limit": _PAGE}
    while rows := await _page(monitor, wanted, since_s, params):
        new = {row["event_id"]: row for row in rows if row["event_id"] not in found}
        found |= new
        if len(rows) < _PAGE or not new:
            break
        params["before"] = float(rows[-1]["time_s"]) + _SAME_S  # newest first
    return _in_order([*found.values(), *await _operations(monitor, wanted, since_s, under_way)])


def _in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: float(row["time_s"]))


async def _page(
    monitor: JsonClient, wanted: EventsWanted, since_s: float, params: Mapping[str, float]
) -> list[dict[str, Any]]:
    kinds = [kind for kind in wanted.kinds if kind not in _OPERATIONS]
    if wanted.kinds and not kinds:
        return []
    said: dict[str, Any] = {**params, "since": since_s}
    said |= {"kind": kinds} if kinds else {}
    said |= {"instance": wanted.instance} if wanted.instance else {}
    rows: list[dict[str, Any]] = await _asked(monitor, "/events", said)
    return rows


async def _operations(
    monitor: JsonClient, wanted: EventsWanted, since_s: float, under_way: set[str]
) -> list[dict[str, Any]]:
    """Those of people that began or ended since then, and all ends of those that were `under_way`; which are is kept
    up to date.
    """
    if wanted.kinds and not set(_OPERATIONS) & set(wanted.kinds):
        return []
    found = []
    for row in await monitor.call("GET", "/flips", params={"limit": _PAGE}):
        event, operation_id = _operation(row), str(row["operation_id"])
        runs = row["result"] == "running"
        ended = operation_id in under_way and not runs
        if ended:
            under_way.discard(operation_id)
        if _asked_for(event, row, wanted) and (ended or event["time_s"] > since_s):
            found.append(event)
            if runs:
                under_way.add(operation_id)
    return found


def _operation(row: Mapping[str, Any]) -> dict[str, Any]:
    """How an operation stands, as an event: its begin while it runs, then its end."""
    roles = f"{row['from_role']} → {row['to_role']} " if row["kind"] == "flip" else ""
    took = f", {duration(row['total_s'])}" if row["total_s"] else ""
    return {
        "event_id": f"{row['operation_id']}-{row['result']}",
        "time_s": row["started_s"] + (row["total_s"] or 0.0),
        "kind": row["kind"],
        "instance_id": row["instance_id"],
        "role": row["to_role"],
        "text": f"{roles}by {row['who']}: {row['result']}{took}",
        "operation_id": row["operation_id"],
    }


def _asked_for(event: Mapping[str, Any], row: Mapping[str, Any], wanted: EventsWanted) -> bool:
    """Whether it is wanted, and no event already: those that a policy asked for are, and those that failed."""
    of_people = row["result"] in _OF_PEOPLE and not row["why"]
    fits = not wanted.instance or row["instance_id"] == wanted.instance
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
    for column in ("tokens", "TTFT", "TPOT", "gap"):
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
    keys = ("ttft_s", "tpot_s", "longest_gap_s")
    times = [pages.NONE if row.get(key) is None else duration(row[key]) for key in keys]
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


# MERGED explaining.py
# `polyphase explain REQUEST`: what became of a request, in sentences and as bars.


_NAMES = {"decode_queue": "decode queue"}
_SEARCHED = 10_000  # jobs of a scheduler's memory
_BEGINS = ("", "chatcmpl-", "cmpl-", "resp_", "msg_")  # of ids, before the part that is the client's
_PART = 100  # letters of a name that an id keeps behind any of those
_SHOWN = 10  # of those that a part of an id may mean
_LABEL = 34  # letters of a stretch's name
_BAR, _LEAST_BAR, _MOST_BAR = "█", 10, 60


@dataclass(frozen=True, slots=True)
class Explained:
    """A request's timeline, and what it says."""

    timeline: RequestTimeline
    explanation: Explanation

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "job_id": self.timeline.job_id,
            "explanation": msgspec.to_builtins(self.explanation),
            "timeline": msgspec.to_builtins(self.timeline),
        }


def scheduler_urls(data_dir: Path, given: str) -> tuple[str, ...]:
    """`--scheduler`, or the running suite's. Raises NotFound."""
    return (given,) if given else state_file.read(data_dir).scheduler_urls


async def find_request(urls: Sequence[str], wanted: str) -> Explained:
    """The request whose id has `wanted` in it. Raises NotFound, InvalidRequest where it may be several, Unavailable."""
    if not wanted.strip():
        raise InvalidRequest("name a request by its id, or a part of it: `polyphase requests` lists some")
    wanted = job_name(wanted.strip())
    clients = [SchedulerAdmin(url) for url in urls]
    try:
        timeline = await _timeline(clients, wanted)
        if timeline is None:
            timeline = await _timeline(clients, await _whole_id(clients, wanted[:_PART]))
    finally:
        for client in clients:
            await client.close()
    if timeline is None:
        raise NotFound(f"the request {wanted!r} has no timeline yet: it has only begun")
    return Explained(timeline, explain(timeline))


async def _timeline(clients: Sequence[SchedulerAdmin], job_id: str) -> RequestTimeline | None:
    """Of whichever scheduler has it; any finds what has ended in the database. Raises the last one's error."""
    trouble: PolyphaseError | None = None
    for client in clients:
        try:
            return msgspec.convert(await client.call("GET", f"/requests/{job_id}/timeline"), RequestTimeline)
        except NotFound:
            continue
        except PolyphaseError as error:
            trouble = error
    if trouble is not None:
        raise trouble
    return None


async def _whole_id(clients: Sequence[SchedulerAdmin], part: str) -> str:
    """The one id that has `part` in it, of what schedulers remember and of what is in the database."""
    found: dict[str, Mapping[str, Any]] = {}
    for client in clients:
        rows = await client.requests(limit=_SEARCHED)
        for begin in _BEGINS:  # the database finds by how an id begins
            rows += (await client.call("GET", "/requests/search", params={"job": begin + part, "limit": _SHOWN}))[
                "rows"
            ]
        found |= {row["job_id"]: row for row in rows if part in row["job_id"]}
    if not found:
        raise NotFound(f"no request has {part!r} in its id; `polyphase requests` lists the newest")
    if len(found) > 1:
        ids = "\n  ".join(list(found)[:_SHOWN])
        more = f"\n  … and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise InvalidRequest(f"{len(found)} requests have {part!r} in their id; say more of it:\n  {ids}{more}")
    return next(iter(found))


def show_explanation(console: Console, explained: Explained, *, figures: bool = False) -> None:
    """The headline, the waterfall, the sentences; what these rest on if `figures` are wanted."""
    console.print(Text(explained.timeline.job_id, "dim"))
    console.print(Text(explained.explanation.headline, "bold"))
    console.print()
    for row in waterfall(explained.timeline, console.width):
        console.print(row)
    console.print()
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=False)
    table.add_column(justify="right", no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for step in explained.explanation.steps:
        text = Text(step.text)
        if figures and step.figures:
            text.append("\n" + ", ".join(f"{name} {_figure(value)}" for name, value in step.figures.items()), "dim")
        table.add_row("" if step.at_s is None else duration(max(0.0, step.at_s)), text)
    console.print(table)


def waterfall(timeline: RequestTimeline, width: int) -> Iterator[RenderableType]:
    """A bar for each stretch of time, in its place between arrival and end; a mark where the first token left.

    Until the first token and from there on the bars have scales of their own where decode would leave the rest no room.
    """
    spans = sorted(timeline.spans, key=lambda span: (span.started_s, span.ended_s))
    if not spans:
        return
    label = min(max(len(_name(span)) for span in spans), _LABEL)
    names = [_name(span, label) for span in spans]
    room = max(_LEAST_BAR, min(_MOST_BAR, width - label - 12))
    end_s = max(span.ended_s for span in spans)
    for span, name in zip(spans, names, strict=True):
        first, last = (_place(moment, timeline, end_s, room) for moment in (span.started_s, span.ended_s))
        row = Text(f"{name:<{label}} ", no_wrap=True, overflow="crop")
        row.append(" " * first)
        row.append(_BAR * max(1, last - first), palette.STAGE[span.span])
        row.append(" " * (room - max(last, first + 1)))
        row.append(f" {duration(span.ended_s - span.started_s):>8}")
        yield row
    if timeline.first_token_s:
        at = _place(timeline.first_token_s, timeline, end_s, room)
        told = f"▲ first token after {duration(timeline.first_token_s - timeline.arrived_s)}"
        left = min(at, max(0, room + 9 - len(told)))
        yield Text(" " * (label + 1 + left) + told, "dim")


def _place(moment_s: float, timeline: RequestTimeline, end_s: float, room: int) -> int:
    """A column of 0..room. Where the time to the first token is short beside all of it, it has half of the room."""
    begin_s, first_s = timeline.arrived_s, timeline.first_token_s
    whole_s = max(end_s - begin_s, 1e-9)
    if not first_s or (first_s - begin_s) * 2 >= whole_s:
        return max(0, min(room, round(room * (moment_s - begin_s) / whole_s)))
    half = room // 2
    if moment_s <= first_s:
        return max(0, round(half * (moment_s - begin_s) / max(first_s - begin_s, 1e-9)))
    return min(room, half + round((room - half) * (moment_s - first_s) / max(end_s - first_s, 1e-9)))


def _name(span: SpanRecord, room: int = 1_000) -> str:
    """What it is called and where it was; of the instance's name as much as there is room for."""
    stage = _NAMES.get(span.span, span.span.value)
    again = f" · attempt {span.attempt}" if span.attempt > 1 else ""
    left = room - len(stage) - len(again) - 3
    where = f" · {pages.elided(span.instance_id, max(left, 4))}" if span.instance_id else ""
    return f"{stage}{where}{again}"


def _figure(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value == round(value) else f"{value:.4g}"
