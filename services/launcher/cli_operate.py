"""Commands that change a running suite: flip, drain, resume, forget, move-request, operation, policies, proposals."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.launcher import cli_common, events, operate
from services.launcher.cli_common import DATA_DIR, DataDir, Force, Instance, Json, Monitor, Scheduler
from shared.errors import InvalidRequest, NotFound

operate_app = typer.Typer()
OPERATE = "Operate"


@operate_app.command("flip", rich_help_panel=OPERATE)
def flip_command(
    instance: Instance,
    force: Force = False,
    timeout: Annotated[float, typer.Option(help="Time limit of the drain in seconds.")] = 30.0,
    data_dir: DataDir = DATA_DIR,
    monitor: Monitor = "",
    as_json: Json = False,
) -> None:
    """Drain an instance and change its role, from prefill to decode or back.

    Example: polyphase flip prefill-1

    Its running requests finish first; none fails.
    """
    _operate("flip", instance, data_dir, monitor, as_json, timeout_s=timeout, force=force)


@operate_app.command("drain", rich_help_panel=OPERATE)
def drain_command(
    instance: Instance,
    force: Force = False,
    timeout: Annotated[float, typer.Option(help="Time limit in seconds for its work to end.")] = 30.0,
    data_dir: DataDir = DATA_DIR,
    monitor: Monitor = "",
    as_json: Json = False,
) -> None:
    """Stop new work at an instance and wait until its work has ended, for example before its host is shut down."""
    _operate("drain", instance, data_dir, monitor, as_json, timeout_s=timeout, force=force)


@operate_app.command("resume", rich_help_panel=OPERATE)
def resume_command(
    instance: Instance, data_dir: DataDir = DATA_DIR, monitor: Monitor = "", as_json: Json = False
) -> None:
    """Give a drained instance work again."""
    _operate("resume", instance, data_dir, monitor, as_json)


@operate_app.command("forget", rich_help_panel=OPERATE)
def forget_command(
    instance: Instance, data_dir: DataDir = DATA_DIR, monitor: Monitor = "", as_json: Json = False
) -> None:
    """Stop counting a dead instance that will not return."""
    _operate("forget", instance, data_dir, monitor, as_json)


@operate_app.command("move-request", rich_help_panel=OPERATE)
def move_request_command(
    request: Annotated[
        str, typer.Argument(help="The request id of the answer or of the client, or a part that no other id has.")
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="The decode instance at which it goes on. Default: placement chooses one.",
            autocompletion=cli_common.complete_instances,
        ),
    ] = "",
    data_dir: DataDir = DATA_DIR,
    monitor: Monitor = "",
    scheduler: Scheduler = "",
    as_json: Json = False,
) -> None:
    """Move a request that decodes to another decode instance, with its KV; its answer goes on.

    Example: polyphase move-request chatcmpl-8f2e41 --to decode-1

    `polyphase explain` shows whether its gateway has moved it.
    """
    url = operate.monitor_url(data_dir, monitor)
    try:
        schedulers = events.scheduler_urls(data_dir, scheduler)
    except NotFound:  # with --monitor there need be no suite here
        schedulers = ()
    answer = asyncio.run(operate.move_request(request, to, url, schedulers, operate.token(data_dir, url)))
    show = partial(operate.show_outcome, instance=answer.instance_id, operation=answer)
    cli_common.output(answer, show, as_json=as_json)


@operate_app.command("operation", rich_help_panel=OPERATE)
def operation_command(
    operation_id: Annotated[str, typer.Argument(help="The id that the command printed, or the first letters of it.")],
    data_dir: DataDir = DATA_DIR,
    monitor: Monitor = "",
    as_json: Json = False,
) -> None:
    """Show the outcome of a flip, drain, resume or move by its id, for example after a lost connection."""
    answer = asyncio.run(operate.operation(operation_id, operate.monitor_url(data_dir, monitor)))
    show = partial(operate.show_outcome, instance=answer.instance_id, operation=answer)
    cli_common.output(answer, show, as_json=as_json)


@operate_app.command("policies", rich_help_panel=OPERATE)
def policies_command(
    wanted: Annotated[
        list[str] | None,
        typer.Argument(
            help="Policies to set, such as sjf or split=fraction:fraction=0.5.",
            autocompletion=cli_common.complete_policies,
        ),
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="Return to the cluster file's policies: all kinds, or those named.")
    ] = False,
    choices: Annotated[bool, typer.Option("--choices", help="List all policies and what each does.")] = False,
    data_dir: DataDir = DATA_DIR,
    monitor: Monitor = "",
    as_json: Json = False,
) -> None:
    """Show the policies in force, who set them and which processes follow; with arguments, change policies.

    Example: polyphase policies sjf dispatch=random

    A change holds for the whole cluster. `--reset` undoes changes, `--choices` lists all policies.
    """
    if choices and (wanted or reset):
        raise InvalidRequest("--choices only lists policies: leave it out to change some")
    change = operate.reset_of(wanted or ()) if reset else operate.change_of(wanted or ())
    url = operate.monitor_url(data_dir, monitor)
    answer = asyncio.run(operate.apply_policies(url, change, operate.actor(), operate.token(data_dir, url)))
    show = partial(operate.show_policies, answer=answer)
    if choices:
        show = partial(operate.show_choices, in_force=answer.policies)
    cli_common.output(answer, show, as_json=as_json)


@operate_app.command("proposals", rich_help_panel=OPERATE)
def proposals_command(
    accept: Annotated[str, typer.Option(help="Carry out the proposal with this id and wait for its end.")] = "",
    refuse: Annotated[str, typer.Option(help="Refuse the proposal with this id.")] = "",
    ask: Annotated[bool, typer.Option("--ask", help="Ask the planner for a proposal now.")] = False,
    auto: Annotated[
        bool | None, typer.Option("--auto/--no-auto", help="Let the planner apply its proposals, or stop that.")
    ] = None,
    data_dir: DataDir = DATA_DIR,
    planner: Annotated[
        str, typer.Option("--planner", help="URL of the planner. Default: that of the suite in --data-dir.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Show the planner's proposals for the running cluster and their expected effect; accept or refuse one."""
    options = operate.ProposalOptions(accept, refuse, ask, auto)
    url = operate.planner_url(data_dir, planner)
    answer = asyncio.run(operate.answer_proposal(url, options, operate.actor(), operate.token(data_dir, url)))
    cli_common.output(answer, partial(operate.show_proposals, answer=answer), as_json=as_json)
    if answer.failed:
        raise typer.Exit(1)


def _operate(
    what: str,
    instance: str,
    data_dir: Path,
    monitor: str,
    as_json: bool,
    *,
    timeout_s: float = 0.0,
    force: bool = False,
) -> None:
    url, console = operate.monitor_url(data_dir, monitor), Console(stderr=as_json)
    token = operate.token(data_dir, url)
    with console.status(f"{operate.DOING[what]} {instance}…"):  # prints nothing if the output is no terminal
        answer = asyncio.run(operate.act(what, instance, url, token, timeout_s=timeout_s, force=force))
    if as_json:
        cli_common.print_json(answer or {"instance_id": instance, "result": "forgotten"})
    else:
        operate.show_outcome(console, instance, answer)
