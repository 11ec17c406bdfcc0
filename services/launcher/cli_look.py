"""Commands that show a running suite: status, top, logs, explain, events, requests."""

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
    everything: Annotated[bool, typer.Option("--all", help="Show all instances, even if there are many.")] = False,
    data_dir: DataDir = DATA_DIR,
    monitor: Monitor = "",
    as_json: Json = False,
) -> None:
    """Show the state of the suite: verdict, problems, where time is spent, instances, SLO attainment.

    Exit code 0: good, or idle. 1: no suite runs there. 3: degraded, or the monitor does not answer. 4: down.
    """
    snapshot = asyncio.run(status.observe(data_dir, monitor))
    show = partial(status.show, snapshot=snapshot, everything=everything)
    cli_common.output(snapshot.as_json(), show, as_json=as_json)
    if code := status.exit_code(snapshot):
        raise typer.Exit(code)


@look_app.command("top", rich_help_panel=LOOK)
def top_command(
    once: Annotated[bool, typer.Option("--once", help="Print one page and exit.")] = False,
    data_dir: DataDir = DATA_DIR,
    monitor: Monitor = "",
) -> None:
    """Show the state of the suite live, once a second, until q or Ctrl-C.

    If the output is a pipe, it prints one page after the other.

    While the monitor does not answer, its last answer stays visible in grey, with its age.
    """
    until_interrupted(status.run_top(Console(), partial(status.observe, data_dir, monitor, rates=True), once=once))


@look_app.command("logs", rich_help_panel=LOOK)
def logs_command(
    name: Annotated[
        str,
        typer.Argument(
            help="A process, such as monitor, gateway or decode-0.", autocompletion=cli_common.complete_processes
        ),
    ],
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many lines to show.")] = 100,
    follow: Follow = False,
    raw: Annotated[bool, typer.Option("--raw", help="Print the lines as written, mostly JSON.")] = False,
    data_dir: DataDir = DATA_DIR,
    monitor: Monitor = "",
) -> None:
    """Show the last log lines of a process or an instance.

    Example: polyphase logs decode-0 -f

    The log is read from the data folder, even after the suite has ended. Lines of another host's instance come from the
    monitor.
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
    request: Annotated[
        str, typer.Argument(help="The request id of the answer or of the client, or a part that no other id has.")
    ],
    figures: Annotated[bool, typer.Option("--figures", help="Add the figures behind each sentence.")] = False,
    data_dir: DataDir = DATA_DIR,
    scheduler: Scheduler = "",
    as_json: Json = False,
) -> None:
    """Explain what happened to a request and why: its time as bars, the decisions as sentences.

    Example: polyphase explain chatcmpl-8f2e41

    This works for running requests, too.
    """
    explained = asyncio.run(events.find_request(events.scheduler_urls(data_dir, scheduler), request))
    cli_common.output(
        explained, partial(events.show_explanation, explained=explained, figures=figures), as_json=as_json
    )


@look_app.command("events", rich_help_panel=LOOK)
def events_command(
    kind: Annotated[
        list[str] | None, typer.Option("--kind", help="Only this kind, such as death or policy_flip; may be repeated.")
    ] = None,
    instance: Annotated[
        str, typer.Option(help="Only events of this instance.", autocompletion=cli_common.complete_instances)
    ] = "",
    since: Annotated[str, typer.Option(help="Maximum age, such as 90s, 10m, 2h or 1d.")] = "",
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=1000, help="How many events to show, the newest.")
    ] = 50,
    follow: Follow = False,
    data_dir: DataDir = DATA_DIR,
    monitor: Monitor = "",
    as_json: Json = False,
) -> None:
    """Show the event log of the cluster: deaths, returns, refusals, flips and their reasons.

    Example: polyphase events --kind death --since 2h

    The newest event is last. With --json each event is one line.
    """
    wanted = events.EventFilter(tuple(kind or ()), instance, events.ago_s(since) if since else None, limit)
    until_interrupted(_events(operate.monitor_url(data_dir, monitor), wanted, follow, as_json))


async def _events(url: str, wanted: events.EventFilter, follow: bool, as_json: bool) -> None:
    console, empty = Console(), True
    async for event in events.events(url, wanted, follow=follow):
        empty = False
        if as_json:
            cli_common.print_json(event)
        else:
            events.show_event(console, event)
    if empty and not as_json:
        console.print("no such events" if wanted != events.EventFilter() else "no events yet")


@look_app.command("requests", rich_help_panel=LOOK)
def requests_command(
    request: Annotated[str, typer.Argument(help="The first part of a request id.")] = "",
    missed: Annotated[
        bool | None, typer.Option("--missed/--met", help="Only requests that missed, or met, their SLO.")
    ] = None,
    instance: Annotated[
        str, typer.Option(help="Only requests that ran on this instance.", autocompletion=cli_common.complete_instances)
    ] = "",
    outcome: Annotated[str, typer.Option(help="Only this outcome: stop, length, cancelled or an error code.")] = "",
    slo: Annotated[str, typer.Option("--class", help="Only this SLO class.")] = "",
    caller: Annotated[str, typer.Option(help="Only requests with the API key of this name.")] = "",
    since: Annotated[str, typer.Option(help="Maximum age, such as 90s, 10m, 2h or 1d.")] = "",
    order: Annotated[
        str, typer.Option(help="slowest_ttft, slowest_tpot, longest_gap, longest or newest.")
    ] = "slowest_ttft",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="How many requests to show.")] = 20,
    data_dir: DataDir = DATA_DIR,
    scheduler: Scheduler = "",
    as_json: Json = False,
) -> None:
    """List requests of the last days, the worst first.

    Example: polyphase requests --missed --since 10m
    """
    wanted = events.RequestFilter(
        job=request,
        caller=caller,
        slo=slo,
        instance=instance,
        outcome=outcome,
        missed=missed,
        since_s=events.ago_s(since) if since else None,
        order=order,
        limit=limit,
    )
    answer = asyncio.run(events.requests(events.scheduler_urls(data_dir, scheduler), wanted))
    cli_common.output(answer, partial(events.show_requests, answer=answer), as_json=as_json)
