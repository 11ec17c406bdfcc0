"""Commands that look at a running suite: status, top, logs, explain, events, requests."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from services.launcher import cli_common, events, logs, operate, status
from services.launcher.cli_common import DATA_DIR, DataDir, Follow, Json, Monitor, Scheduler, until_interrupted

look_app = typer.Typer()
LOOK = "Look"


@look_app.command("status", rich_help_panel=LOOK)
def status_command(
    everything: Annotated[bool, typer.Option("--all", help="Every instance, however many there are.")] = False,
    data_dir: DataDir = DATA_DIR,
    monitor: Monitor = "",
    as_json: Json = False,
) -> None:
    """How the suite does: the verdict, what is wrong, where time goes, instances with trouble first, SLO attainment.

    Exit code 0: good, or nothing is asked for. 3: degraded, or the monitor is away. 4: down. 1: no suite runs there.
    """
    seen = asyncio.run(status.observe(data_dir, monitor))
    if as_json:
        cli_common.print_json(seen.as_json())
    else:
        status.show(Console(), seen, everything=everything)
    if code := status.exit_code(seen):
        raise typer.Exit(code)


@look_app.command("top", rich_help_panel=LOOK)
def top_command(
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    data_dir: DataDir = DATA_DIR,
    monitor: Monitor = "",
) -> None:
    """The same live, once a second, until q or Ctrl-C.

    Into a pipe it prints one page after the other.

    While the monitor is away what it said last stays, greyed, with its age.
    """
    until_interrupted(status.run_top(Console(), partial(status.observe, data_dir, monitor, rates=True), once=once))


@look_app.command("logs", rich_help_panel=LOOK)
def logs_command(
    name: Annotated[
        str,
        typer.Argument(help="A process: monitor, gateway, decode-0, …", autocompletion=cli_common.complete_processes),
    ],
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 100,
    follow: Follow = False,
    raw: Annotated[bool, typer.Option("--raw", help="As they are written: JSON, mostly.")] = False,
    data_dir: DataDir = DATA_DIR,
    monitor: Monitor = "",
) -> None:
    """What a process or an instance wrote last.

    Example: polyphase logs decode-0 -f

    It is read from the data folder, also after the suite has ended; an instance of another host is asked for its own.
    """
    until_interrupted(_logs(logs.read(data_dir, monitor, name, lines, follow=follow), raw))


async def _logs(lines: AsyncIterator[str], raw: bool) -> None:
    console = Console()
    async for line in lines:
        if raw:
            print(line, flush=True)
        else:
            logs.show(console, line)


@look_app.command("explain", rich_help_panel=LOOK)
def explain_command(
    request: Annotated[str, typer.Argument(help="Its id, or any part that no other has; the client's will do.")],
    figures: Annotated[bool, typer.Option("--figures", help="With the figures that each sentence rests on.")] = False,
    data_dir: DataDir = DATA_DIR,
    scheduler: Scheduler = "",
    as_json: Json = False,
) -> None:
    """What became of a request, and why: its stretches of time as bars, its decisions as sentences.

    Example: polyphase explain chatcmpl-8f2e41

    Also of one that is under way. The id is the one in the answer, or the one that the client gave.
    """
    explained = asyncio.run(events.find_request(events.scheduler_urls(data_dir, scheduler), request))
    if as_json:
        cli_common.print_json(explained.as_json())
    else:
        events.show_explanation(Console(), explained, figures=figures)


@look_app.command("events", rich_help_panel=LOOK)
def events_command(
    kind: Annotated[
        list[str] | None, typer.Option("--kind", help="Such as death or policy_flip; again for more kinds.")
    ] = None,
    instance: Annotated[str, typer.Option(help="Of this one only.", autocompletion=cli_common.complete_instances)] = "",
    since: Annotated[str, typer.Option(help="Not older than 90s, 10m, 2h, 1d.")] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="At most so many, the newest.")] = 50,
    follow: Follow = False,
    data_dir: DataDir = DATA_DIR,
    monitor: Monitor = "",
    as_json: Json = False,
) -> None:
    """What happened: deaths, returns, refusals, flips and why.

    Example: polyphase events --kind death --since 2h

    Newest last. With --json each is a line of its own.
    """
    wanted = events.EventsWanted(tuple(kind or ()), instance, events.ago_s(since) if since else None, limit)
    until_interrupted(_events(operate.monitor_url(data_dir, monitor), wanted, follow, as_json))


async def _events(url: str, wanted: events.EventsWanted, follow: bool, as_json: bool) -> None:
    console, none = Console(), True
    async for row in events.events(url, wanted, follow=follow):
        none = False
        if as_json:
            cli_common.print_json(row)
        else:
            events.show_event(console, row)
    if none and not as_json:
        console.print("nothing of that kind happened" if wanted != events.EventsWanted() else "nothing happened yet")


@look_app.command("requests", rich_help_panel=LOOK)
def requests_command(
    request: Annotated[str, typer.Argument(help="A part of its id.")] = "",
    missed: Annotated[
        bool | None, typer.Option("--missed/--met", help="Only those that missed, or met, theirs.")
    ] = None,
    instance: Annotated[
        str, typer.Option(help="That were on this one.", autocompletion=cli_common.complete_instances)
    ] = "",
    outcome: Annotated[str, typer.Option(help="Such as stop, length, cancelled, or an error's code.")] = "",
    slo: Annotated[str, typer.Option("--class", help="Of this SLO class.")] = "",
    caller: Annotated[str, typer.Option(help="Of the API key of this name.")] = "",
    since: Annotated[str, typer.Option(help="Not older than 90s, 10m, 2h, 1d.")] = "",
    order: Annotated[
        str, typer.Option(help="slowest_ttft, slowest_tpot, longest_gap, longest, newest.")
    ] = "slowest_ttft",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000)] = 20,
    data_dir: DataDir = DATA_DIR,
    scheduler: Scheduler = "",
    as_json: Json = False,
) -> None:
    """Requests of the last days, the worst first.

    Example: polyphase requests --missed --since 10m
    """
    wanted = events.RequestsWanted(
        request, caller, slo, instance, outcome, missed, events.ago_s(since) if since else None, order, limit
    )
    answer = asyncio.run(events.requests(events.scheduler_urls(data_dir, scheduler), wanted))
    if as_json:
        cli_common.print_json(answer)
    else:
        events.show_requests(Console(), answer)
