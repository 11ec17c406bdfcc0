"""`polyphase explain REQUEST`: what became of a request, in sentences and as bars."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from shared.errors import InvalidRequest, NotFound, PolyphaseError
from shared.explain import Explanation, explain
from shared.timeline import RequestTimeline, SpanRecord
from shared.wire.clients.scheduler import SchedulerAdmin

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


async def find(urls: Sequence[str], wanted: str) -> Explained:
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


def show(console: Console, explained: Explained, *, figures: bool = False) -> None:
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
