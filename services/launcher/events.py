"""`polyphase events`, `requests` and `explain`: the event log of the cluster, finished requests, and the course of one
request in sentences and as bars.

Rows of events and requests stay mappings, so that `--json` passes on fields that this release does not know.
"""

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
from shared.store.reading import Order
from shared.timeline import RequestTimeline, SpanRecord
from shared.wire.api import EventKind, Operation, OperationKind, OperationResult, Origin
from shared.wire.clients.http import JsonClient
from shared.wire.clients.scheduler import SchedulerAdmin

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_DAY_S = 86_400.0
_POLL_S, _ANSWER_S = 1.0, 5.0
_PAGE = 1_000  # the most events that the monitor answers at once
_LATE_S = 10.0  # an event may become known so much later than a newer one
_SAME_S = 1e-6  # another event of the same moment may follow
_BAD = {
    EventKind.DEATH,
    EventKind.UNRESPONSIVE,
    EventKind.OPERATION_FAILED,
    EventKind.REGISTRATION_REFUSED,
    EventKind.OPERATION_REFUSED,
}
_FINE = {EventKind.REGISTERED, EventKind.RETURNED, EventKind.RECOVERED}
_SUCCEEDED_OR_OPEN = (OperationResult.SUCCEEDED, OperationResult.RUNNING, OperationResult.UNKNOWN)
_STAGE_NAMES = {"decode_queue": "decode queue"}
_SEARCHED = 10_000  # jobs in a scheduler's memory
_ID_PREFIXES = ("", "chatcmpl-", "cmpl-", "resp_", "msg_")  # of ids, before the client's part
_NAME_KEPT = 100  # letters of a client's name that an id keeps
_MATCHES_SHOWN = 10
_LABEL = 34  # letters of a bar's label
_BAR, _MIN_BAR, _MAX_BAR = "█", 10, 60


def ago_s(words: str) -> float:
    """Seconds of `90s`, `10m`, `2h` or `1d`. Raises InvalidRequest."""
    found = _AGE.fullmatch(words.strip())
    if found is None:
        raise InvalidRequest(f"--since must be a time such as 90s, 10m, 2h or 1d, got {words!r}")
    return float(found[1]) * _UNITS[found[2]]


def _check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InvalidRequest(f"{option} must be one of {', '.join(choices)}, got {value!r}")


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Which events: the newest `limit`, of some kinds only, of one instance, of the last `since_s`."""

    kinds: tuple[str, ...] = ()
    instance: str = ""
    since_s: float | None = None
    limit: int = 50

    def __post_init__(self) -> None:
        """Raises InvalidRequest for an unknown kind."""
        for kind in self.kinds:
            _check_choice("--kind", kind, [*EventKind, *OperationKind])


async def events(url: str, wanted: EventFilter, *, follow: bool) -> AsyncIterator[Mapping[str, Any]]:
    """Events, the oldest first, and with `follow` each new one. Flips, drains and resumes by people are included; one
    that takes a while appears at its begin and at its end.

    Raises the monitor's own error.
    """
    since_s = time.time() - wanted.since_s if wanted.since_s is not None else 0.0
    seen: dict[str, float] = {}
    async with JsonClient(url) as monitor:
        log = _EventLog(monitor, wanted)
        rows = await log.newest(since_s)
        if len(rows) == wanted.limit:  # older events are not wanted
            since_s = float(rows[0]["time_s"]) - _SAME_S
        while True:
            for row in rows:
                yield row
            if not follow:
                return
            seen |= {str(row["event_id"]): float(row["time_s"]) for row in rows}
            since_s = max([since_s, *(time_s - _LATE_S for time_s in seen.values())])
            seen = {event_id: time_s for event_id, time_s in seen.items() if time_s > since_s}
            await asyncio.sleep(_POLL_S)
            rows = [row for row in await log.since(since_s) if row["event_id"] not in seen]


class _EventLog:
    """Reads events that pass a filter, and adds the operations of people, which the monitor lists separately."""

    def __init__(self, monitor: JsonClient, wanted: EventFilter) -> None:
        self._monitor = monitor
        self._wanted = wanted
        self._event_kinds = [kind for kind in wanted.kinds if kind not in list(OperationKind)]
        self._running: set[str] = set()  # operations whose end has not been shown yet

    async def newest(self, since_s: float) -> list[dict[str, Any]]:
        found = await self._page(since_s, {"limit": self._wanted.limit})
        return _in_order(found + await self._operations(since_s))[-self._wanted.limit :]

    async def since(self, since_s: float) -> list[dict[str, Any]]:
        """All events since then, however many."""
        found: dict[str, dict[str, Any]] = {}
        params: dict[str, float] = {"limit": _PAGE}
        while rows := await self._page(since_s, params):
            new = {row["event_id"]: row for row in rows if row["event_id"] not in found}
            found |= new
            if len(rows) < _PAGE or not new:
                break
            params["before"] = float(rows[-1]["time_s"]) + _SAME_S  # a page begins with the newest
        return _in_order([*found.values(), *await self._operations(since_s)])

    async def _page(self, since_s: float, params: Mapping[str, float]) -> list[dict[str, Any]]:
        if self._wanted.kinds and not self._event_kinds:
            return []
        query: dict[str, Any] = {**params, "since": since_s}
        query |= {"kind": self._event_kinds} if self._event_kinds else {}
        query |= {"instance": self._wanted.instance} if self._wanted.instance else {}
        rows: list[dict[str, Any]] = await self._monitor.call("GET", "/events", params=query, timeout_s=_ANSWER_S)
        return rows

    async def _operations(self, since_s: float) -> list[dict[str, Any]]:
        """Operations of people that began or ended since then, and the ends of those that were running before."""
        wanted, found = self._wanted, []
        if wanted.kinds and not set(OperationKind) & set(wanted.kinds):
            return []
        rows = await self._monitor.call("GET", "/flips", params={"limit": _PAGE})
        for one in msgspec.convert(rows, list[Operation]):
            running = one.result is OperationResult.RUNNING
            ended = one.operation_id in self._running and not running
            if ended:
                self._running.discard(one.operation_id)
            # Operations of policies and plans, and those that failed, are among the events already.
            by_operators = one.result in _SUCCEEDED_OR_OPEN and one.origin is Origin.OPERATOR
            fits = wanted.instance in ("", one.instance_id) and (not wanted.kinds or one.kind in wanted.kinds)
            event = _as_event(one)
            if by_operators and fits and (ended or event["time_s"] > since_s):
                found.append(event)
                if running:
                    self._running.add(one.operation_id)
        return found


def _in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: float(row["time_s"]))


def _as_event(one: Operation) -> dict[str, Any]:
    """An operation as an event: its begin while it runs, then its end."""
    roles = f"{one.from_role} → {one.to_role} " if one.kind is OperationKind.FLIP else ""
    took = f", {duration(one.total_s)}" if one.total_s else ""
    return {
        "event_id": f"{one.operation_id}-{one.result}",
        "time_s": one.started_s + (one.total_s or 0.0),
        "kind": one.kind,
        "instance_id": one.instance_id,
        "role": one.to_role,
        "text": f"{roles}by {one.who}: {one.result}{took}",
        "operation_id": one.operation_id,
    }


def show_event(console: Console, row: Mapping[str, Any]) -> None:
    """One event: time, kind, instance and text; a long text is wrapped beside the kind."""
    kind = str(row["kind"])
    style = "red" if kind in _BAD else "green" if kind in _FINE else "yellow"
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=False, width=console.width)
    when = _when(float(row["time_s"]))
    table.add_column(no_wrap=True, style="dim", width=len(when))
    table.add_column(width=20, no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    words = Text(f"{row['instance_id']}  " if row["instance_id"] else "", "bold").append(str(row["text"]), "not bold")
    table.add_row(when, Text(kind.replace("_", " "), style), words)
    console.print(table)


def _when(time_s: float) -> str:
    """The time of day, preceded by the date for times more than a day ago."""
    at = datetime.fromtimestamp(time_s)
    return f"{at:%m-%d %H:%M:%S}" if time.time() - time_s > _DAY_S else f"{at:%H:%M:%S}"


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Which requests; empty and None: any. `since_s`: seconds before now."""

    job: str = ""
    caller: str = ""
    slo: str = ""
    instance: str = ""
    outcome: str = ""
    missed: bool | None = None
    since_s: float | None = None
    order: str = "slowest_ttft"
    limit: int = 20

    def __post_init__(self) -> None:
        """Raises InvalidRequest for an unknown order."""
        _check_choice("--order", self.order, list(Order))

    def params(self, now_s: float) -> dict[str, str | int | float]:
        """The parameters of the scheduler's search."""
        found: dict[str, str | int | float] = {"order": self.order, "limit": self.limit}
        texts = {name: getattr(self, name) for name in ("job", "caller", "slo", "instance", "outcome")}
        found |= {name: text for name, text in texts.items() if text}
        if self.missed is not None:
            found["missed"] = "true" if self.missed else "false"
        if self.since_s is not None:
            found["since"] = now_s - self.since_s
        return found


async def requests(urls: Sequence[str], wanted: RequestFilter) -> dict[str, Any]:
    """Rows of the database, from any scheduler that answers. Raises the error of the last one."""
    for number, url in enumerate(urls, 1):
        async with JsonClient(url) as scheduler:
            try:
                params = wanted.params(time.time())
                answer: dict[str, Any] = await scheduler.call(
                    "GET", "/requests/search", params=params, timeout_s=_ANSWER_S
                )
            except (Unavailable, DeadlineExceeded):
                if number == len(urls):
                    raise
                continue
            return answer
    raise NotFound("this suite has no scheduler")


def show_requests(console: Console, answer: Mapping[str, Any]) -> None:
    """A table of requests; those that missed their SLO are marked."""
    if not answer["rows"]:
        console.print("no such requests")
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
    more = "`--limit` shows more; " if answer.get("more") else ""
    console.print(Text(f"✘ missed its SLO. {more}`polyphase explain ID` explains one, by any part of its id", "dim"))


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
    """The id without the prefix that all ids of an endpoint share, so that the distinct part is visible."""
    return job_id.removeprefix("chatcmpl-").removeprefix("cmpl-").removeprefix("resp_").removeprefix("msg_")


@dataclass(frozen=True, slots=True)
class Explained:
    """A request's timeline and its explanation."""

    timeline: RequestTimeline
    explanation: Explanation

    def as_json(self) -> dict[str, Any]:
        return {
            "job_id": self.timeline.job_id,
            "explanation": msgspec.to_builtins(self.explanation),
            "timeline": msgspec.to_builtins(self.timeline),
        }


def scheduler_urls(data_dir: Path, given: str) -> tuple[str, ...]:
    """`--scheduler`, or the schedulers of the running suite. Raises NotFound."""
    return (given,) if given else state_file.read(data_dir).scheduler_urls


async def find_request(urls: Sequence[str], wanted: str) -> Explained:
    """The request whose id contains `wanted`. Raises NotFound, InvalidRequest if several ids do, Unavailable."""
    if not wanted.strip():
        raise InvalidRequest("the request id is empty: give an id or a part of it; `polyphase requests` lists some")
    wanted = job_name(wanted.strip())
    clients = [SchedulerAdmin(url) for url in urls]
    try:
        timeline = await _timeline(clients, wanted)
        if timeline is None:
            timeline = await _timeline(clients, await _whole_id(clients, wanted[:_NAME_KEPT]))
    finally:
        for client in clients:
            await client.close()
    if timeline is None:
        raise NotFound(f"the request {wanted!r} has no timeline yet: it has just arrived")
    return Explained(timeline, explain(timeline))


async def _timeline(clients: Sequence[SchedulerAdmin], job_id: str) -> RequestTimeline | None:
    """The timeline from any scheduler that has it; all of them know ended requests. Raises the last one's error."""
    failure: PolyphaseError | None = None
    for client in clients:
        try:
            return msgspec.convert(await client.call("GET", f"/requests/{job_id}/timeline"), RequestTimeline)
        except NotFound:
            continue
        except PolyphaseError as error:
            failure = error
    if failure is not None:
        raise failure
    return None


async def _whole_id(clients: Sequence[SchedulerAdmin], part: str) -> str:
    """The only id that contains `part`, among the schedulers' jobs and those in the database."""
    found: dict[str, Mapping[str, Any]] = {}
    for client in clients:
        rows = await client.requests(limit=_SEARCHED)
        for prefix in _ID_PREFIXES:  # the database searches by the beginning of ids
            params: dict[str, str | int | float] = {"job": prefix + part, "limit": _MATCHES_SHOWN}
            rows += (await client.call("GET", "/requests/search", params=params))["rows"]
        found |= {row["job_id"]: row for row in rows if part in row["job_id"]}
    if not found:
        raise NotFound(f"no request id contains {part!r}; `polyphase requests` lists requests")
    if len(found) > 1:
        ids = "\n  ".join(list(found)[:_MATCHES_SHOWN])
        more = f"\n  … and {len(found) - _MATCHES_SHOWN} more" if len(found) > _MATCHES_SHOWN else ""
        raise InvalidRequest(f"{len(found)} request ids contain {part!r}; give a longer part:\n  {ids}{more}")
    return next(iter(found))


def show_explanation(console: Console, explained: Explained, *, figures: bool = False) -> None:
    """The headline, the waterfall and the sentences, with their figures if wanted."""
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
    """A bar for each span of time between arrival and end, and a mark at the first token.

    Where decoding takes most of the time, the parts before and after the first token have different scales.
    """
    spans = sorted(timeline.spans, key=lambda span: (span.started_s, span.ended_s))
    if not spans:
        return
    label = min(max(len(_name(span)) for span in spans), _LABEL)
    names = [_name(span, label) for span in spans]
    room = max(_MIN_BAR, min(_MAX_BAR, width - label - 12))
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
        mark = f"▲ first token after {duration(timeline.first_token_s - timeline.arrived_s)}"
        left = min(at, max(0, room + 9 - len(mark)))
        yield Text(" " * (label + 1 + left) + mark, "dim")


def _place(moment_s: float, timeline: RequestTimeline, end_s: float, room: int) -> int:
    """A column of 0..room. Less than half of the time before the first token gets half of the room."""
    begin_s, first_s = timeline.arrived_s, timeline.first_token_s
    whole_s = max(end_s - begin_s, 1e-9)
    if not first_s or (first_s - begin_s) * 2 >= whole_s:
        return max(0, min(room, round(room * (moment_s - begin_s) / whole_s)))
    half = room // 2
    if moment_s <= first_s:
        return max(0, round(half * (moment_s - begin_s) / max(first_s - begin_s, 1e-9)))
    return min(room, half + round((room - half) * (moment_s - first_s) / max(end_s - first_s, 1e-9)))


def _name(span: SpanRecord, room: int = 1_000) -> str:
    """The name of a span with its instance, shortened to `room` letters, and its attempt."""
    stage = _STAGE_NAMES.get(span.span, span.span.value)
    again = f" · attempt {span.attempt}" if span.attempt > 1 else ""
    left = room - len(stage) - len(again) - 3
    where = f" · {pages.elided(span.instance_id, max(left, 4))}" if span.instance_id else ""
    return f"{stage}{where}{again}"


def _figure(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value == round(value) else f"{value:.4g}"
