"""`polyphase events`, `requests` and `explain`: the event log of the cluster, finished requests, and the course of one
request in sentences and as bars.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from services.launcher import pages, state_file
from shared import palette
from shared.domain.job import job_name
from shared.domain.verdict import duration
from shared.errors import DeadlineExceeded, InvalidRequest, NotFound, PolyphaseError, Unavailable
from shared.explain import Explanation, explain
from shared.store.reading import Order
from shared.timeline import RequestTimeline, SpanRecord
from shared.wire.api import Event, EventKind, Operation, OperationKind, OperationResult, Origin
from shared.wire.api.scheduler import RequestPage
from shared.wire.clients.monitor import MonitorClient
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


@dataclass(frozen=True, slots=True)
class OperationEvent:
    """The begin or the end of an operation, in the form of an event."""

    event_id: str
    time_s: float
    kind: OperationKind
    instance_id: str
    role: str
    text: str
    operation_id: str

    @classmethod
    def from_operation(cls, operation: Operation) -> "OperationEvent":
        """The begin of an operation that runs, or else its end."""
        about = ""
        if operation.kind is OperationKind.FLIP:
            about = f"{operation.from_role} → {operation.to_role} "
        elif operation.kind is OperationKind.MOVE:
            about = f"{operation.job_id} → {operation.to_instance or 'any instance'} "
        took = f", {duration(operation.total_s)}" if operation.total_s else ""
        return cls(
            event_id=f"{operation.operation_id}-{operation.result}",
            time_s=operation.started_s + (operation.total_s or 0.0),
            kind=operation.kind,
            instance_id=operation.instance_id,
            role=operation.to_role,
            text=f"{about}by {operation.who}: {operation.result}{took}",
            operation_id=operation.operation_id,
        )


LogEntry = Event | OperationEvent


async def events(url: str, wanted: EventFilter, *, follow: bool) -> AsyncIterator[LogEntry]:
    """Events, the oldest first, and with `follow` each new one. Operations by people are included; one that
    takes a while appears at its begin and at its end.

    Raises the monitor's own error.
    """
    since_s = time.time() - wanted.since_s if wanted.since_s is not None else 0.0
    shown: dict[str, float] = {}
    async with MonitorClient(url) as monitor:
        log = _EventLog(monitor, wanted)
        entries = await log.newest(since_s)
        if len(entries) == wanted.limit:  # older events are not wanted
            since_s = entries[0].time_s - _SAME_S
        while True:
            for entry in entries:
                yield entry
            if not follow:
                return
            shown |= {entry.event_id: entry.time_s for entry in entries}
            since_s = max([since_s, *(time_s - _LATE_S for time_s in shown.values())])
            shown = {event_id: time_s for event_id, time_s in shown.items() if time_s > since_s}
            await asyncio.sleep(_POLL_S)
            entries = [entry for entry in await log.since(since_s) if entry.event_id not in shown]


class _EventLog:
    """Reads events that pass a filter, and adds the operations of people, which the monitor lists separately."""

    def __init__(self, monitor: MonitorClient, wanted: EventFilter) -> None:
        self._monitor = monitor
        self._wanted = wanted
        self._event_kinds = [kind for kind in wanted.kinds if kind not in list(OperationKind)]
        self._running: set[str] = set()  # operations whose end has not been shown yet

    async def newest(self, since_s: float) -> list[LogEntry]:
        page = await self._page(since_s, self._wanted.limit)
        return _in_order([*page, *await self._operations(since_s)])[-self._wanted.limit :]

    async def since(self, since_s: float) -> list[LogEntry]:
        """All events since then, however many."""
        found: dict[str, Event] = {}
        before_s = None
        while page := await self._page(since_s, _PAGE, before_s):
            new = {event.event_id: event for event in page if event.event_id not in found}
            found |= new
            if len(page) < _PAGE or not new:
                break
            before_s = page[-1].time_s + _SAME_S  # a page begins with the newest
        return _in_order([*found.values(), *await self._operations(since_s)])

    async def _page(self, since_s: float, limit: int, before_s: float | None = None) -> list[Event]:
        if self._wanted.kinds and not self._event_kinds:
            return []
        kinds, instance = self._event_kinds, self._wanted.instance
        return await self._monitor.events(
            limit=limit, since_s=since_s, before_s=before_s, kinds=kinds, instance=instance
        )

    async def _operations(self, since_s: float) -> list[OperationEvent]:
        """Operations of people that began or ended since then, and the ends of those that were running before."""
        wanted, found = self._wanted, []
        if wanted.kinds and not set(OperationKind) & set(wanted.kinds):
            return []
        for operation in await self._monitor.flips(_PAGE):
            running = operation.result is OperationResult.RUNNING
            ended = operation.operation_id in self._running and not running
            if ended:
                self._running.discard(operation.operation_id)
            # Operations of policies and plans, and those that failed, are among the events already.
            by_operator = operation.result in _SUCCEEDED_OR_OPEN and operation.origin is Origin.OPERATOR
            kinds = wanted.kinds or tuple(OperationKind)
            fits = wanted.instance in ("", operation.instance_id) and operation.kind in kinds
            event = OperationEvent.from_operation(operation)
            if by_operator and fits and (ended or event.time_s > since_s):
                found.append(event)
                if running:
                    self._running.add(operation.operation_id)
        return found


def _in_order(entries: list[LogEntry]) -> list[LogEntry]:
    return sorted(entries, key=lambda entry: entry.time_s)


def show_event(console: Console, event: LogEntry) -> None:
    """One event: time, kind, instance and text; a long text is wrapped beside the kind."""
    style = "red" if event.kind in _BAD else "green" if event.kind in _FINE else "yellow"
    table, when = pages.plain_table(), _when(event.time_s)
    table.width = console.width
    table.add_column(no_wrap=True, style="dim", width=len(when))
    table.add_column(width=20, no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    words = Text(f"{event.instance_id}  " if event.instance_id else "", "bold").append(event.text, "not bold")
    table.add_row(when, Text(event.kind.replace("_", " "), style), words)
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

    def parameters(self, now_s: float) -> dict[str, str | float | None]:
        """The parameters of the scheduler's search; empty values and None are left out there."""
        found: dict[str, str | float | None] = {name: getattr(self, name) for name in _SAME_NAME}
        found["missed"] = None if self.missed is None else str(self.missed).lower()
        found["since"] = None if self.since_s is None else now_s - self.since_s
        return found


_SAME_NAME = ("order", "limit", "job", "caller", "slo", "instance", "outcome")  # parameters named as their fields


async def requests(urls: Sequence[str], wanted: RequestFilter) -> RequestPage:
    """Rows of the database, from any scheduler that answers. Raises the error of the last one."""
    for number, url in enumerate(urls, 1):
        async with SchedulerAdmin(url) as scheduler:
            try:
                return await scheduler.search(**wanted.parameters(time.time()))
            except (Unavailable, DeadlineExceeded):
                if number == len(urls):
                    raise
    raise NotFound("this suite has no scheduler")


def show_requests(console: Console, answer: RequestPage) -> None:
    """A table of requests; those that missed their SLO are marked."""
    if not answer.rows:
        console.print("no such requests")
        return
    table = pages.plain_table("request", *_SHORT_COLUMNS, *_NUMBERS, right=_NUMBERS)
    table.width, table.columns[0].ratio = console.width, 1
    for column in table.columns[1 : 1 + len(_SHORT_COLUMNS)]:
        column.max_width = 14
    for row in answer.rows:
        missed = row.slo_met is False
        table.add_row(
            Text(f"{'✘' if missed else ' '} {_without_prefix(row.job_id)}", "red" if missed else ""),
            _when(row.arrived_s),
            row.slo,
            row.outcome or row.phase,
            f"{row.prompt_tokens:,} + {row.output_tokens:,}",
            *(pages.time(seconds) for seconds in (row.ttft_s, row.tpot_s, row.longest_gap_s)),
        )
    console.print(table)
    more = "`--limit` shows more; " if answer.more else ""
    console.print(Text(f"✘ missed its SLO. {more}`polyphase explain ID` explains one, by any part of its id", "dim"))


_SHORT_COLUMNS, _NUMBERS = ("arrived", "class", "outcome"), ("tokens", "TTFT", "TPOT", "gap")


def _without_prefix(job_id: str) -> str:
    """The id without the prefix that all ids of an endpoint share, so that the distinct part is visible."""
    return next((job_id.removeprefix(prefix) for prefix in _ID_PREFIXES[1:] if job_id.startswith(prefix)), job_id)


@dataclass(frozen=True, slots=True)
class Explained:
    """A request with its explanation and its timeline."""

    job_id: str
    explanation: Explanation
    timeline: RequestTimeline


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
    return Explained(timeline.job_id, explain(timeline), timeline)


async def find_job(urls: Sequence[str], wanted: str) -> str:
    """The id of the request whose id is or contains `wanted`. Raises as `find_request` does."""
    wanted = job_name(wanted.strip())
    clients = [SchedulerAdmin(url) for url in urls]
    try:
        for client in clients:
            try:
                return (await client.request(wanted)).job_id
            except NotFound:
                continue
        return await _whole_id(clients, wanted[:_NAME_KEPT])
    finally:
        for client in clients:
            await client.close()


async def _timeline(clients: Sequence[SchedulerAdmin], job_id: str) -> RequestTimeline | None:
    """The timeline from any scheduler that has it; all of them know ended requests. Raises the last one's error."""
    failure: PolyphaseError | None = None
    for client in clients:
        try:
            return await client.timeline(job_id)
        except NotFound:
            continue
        except PolyphaseError as error:
            failure = error
    if failure is not None:
        raise failure
    return None


async def _whole_id(clients: Sequence[SchedulerAdmin], part: str) -> str:
    """The only id that contains `part`, among the schedulers' jobs and those in the database."""
    found: set[str] = set()
    for client in clients:
        ids = [row.job_id for row in await client.requests(limit=_SEARCHED)]
        for prefix in _ID_PREFIXES:  # the database searches by the beginning of ids
            page = await client.search(job=prefix + part, limit=_MATCHES_SHOWN)
            ids += [row.job_id for row in page.rows]
        found |= {job_id for job_id in ids if part in job_id}
    if not found:
        raise NotFound(f"no request id contains {part!r}; `polyphase requests` lists requests")
    if len(found) > 1:
        ids = sorted(found)
        shown = "\n  ".join(ids[:_MATCHES_SHOWN])
        more = f"\n  … and {len(ids) - _MATCHES_SHOWN} more" if len(ids) > _MATCHES_SHOWN else ""
        raise InvalidRequest(f"{len(ids)} request ids contain {part!r}; give a longer part:\n  {shown}{more}")
    return found.pop()


def show_explanation(console: Console, explained: Explained, *, figures: bool = False) -> None:
    """The headline, the waterfall and the sentences, with their figures if wanted."""
    console.print(Text(explained.timeline.job_id, "dim"))
    console.print(Text(explained.explanation.headline, "bold"))
    console.print()
    for row in waterfall(explained.timeline, console.width):
        console.print(row)
    console.print()
    table = pages.plain_table()
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
