"""Commands that change a running suite: flip, drain, resume, forget, operation, policies, proposals."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from services.launcher import cli_common, operate
from services.launcher.cli_common import DATA_DIR, DataDir, Force, Instance, Json, Monitor
from shared.errors import InvalidRequest

operate_app = typer.Typer()
OPERATE = "Operate"


@operate_app.command("flip", rich_help_panel=OPERATE)
def flip_command(
    instance: Instance,
    force: Force = False,
    timeout: Annotated[float, typer.Option(help="Seconds for the drain.")] = 30.0,
    data_dir: DataDir = DATA_DIR,
    monitor: Monitor = "",
    as_json: Json = False,
) -> None:
    """Drain an instance and change its role, from prefill to decode or back.

    Example: polyphase flip prefill-1

    What it has is finished first; no request fails.
    """
    _operate("flip", instance, data_dir, monitor, as_json, timeout_s=timeout, force=force)


@operate_app.command("drain", rich_help_panel=OPERATE)
def drain_command(
    instance: Instance,
    force: Force = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for its work to end.")] = 30.0,
    data_dir: DataDir = DATA_DIR,
    monitor: Monitor = "",
    as_json: Json = False,
) -> None:
    """Give an instance no new work and wait until it has none, before it is taken away, say."""
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
    """Count a dead instance no longer: one that will not return."""
    _operate("forget", instance, data_dir, monitor, as_json)


@operate_app.command("operation", rich_help_panel=OPERATE)
def operation_command(
    operation_id: Annotated[str, typer.Argument(help="As the operation printed it; the beginning will do.")],
    data_dir: DataDir = DATA_DIR,
    monitor: Monitor = "",
    as_json: Json = False,
) -> None:
    """How a flip, drain or resume stands, by its id: for one whose answer never came."""
    answer = asyncio.run(operate.operation(operation_id, operate.monitor_url(data_dir, monitor)))
    if as_json:
        cli_common.print_json(answer)
    else:
        operate.show_outcome(Console(), answer["kind"], answer["instance_id"], answer)


@operate_app.command("policies", rich_help_panel=OPERATE)
def policies_command(
    wanted: Annotated[
        list[str] | None,
        typer.Argument(
            help="Such as split=fraction:fraction=0.5, or sjf.", autocompletion=cli_common.complete_policies
        ),
    ] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Back to the file's: all, or the kinds named.")] = False,
    choices: Annotated[
        bool, typer.Option("--choices", help="What there is to choose from, and what each does.")
    ] = False,
    data_dir: DataDir = DATA_DIR,
    monitor: Monitor = "",
    as_json: Json = False,
) -> None:
    """The policies in force, who chose them and who follows; with words, change some for the whole cluster.

    Example: polyphase policies sjf dispatch=random

    `--reset` takes all changes back; `--choices` says what there is.
    """
    if choices and (wanted or reset):
        raise InvalidRequest("--choices only lists what there is: leave it out to change policies")
    change = operate.reset_of(wanted or ()) if reset else operate.change_of(wanted or ())
    url = operate.monitor_url(data_dir, monitor)
    answer = asyncio.run(operate.change_policies(url, change, operate.actor(), operate.token(data_dir, url)))
    if as_json:
        cli_common.print_json(answer)
    elif choices:
        operate.show_choices(Console(), answer["policies"])
    else:
        operate.show_policies(Console(), answer)


@operate_app.command("proposals", rich_help_panel=OPERATE)
def proposals_command(
    accept: Annotated[str, typer.Option(help="Have that one carried out; waits for its end.")] = "",
    refuse: Annotated[str, typer.Option(help="That one is not to be done.")] = "",
    ask: Annotated[bool, typer.Option("--ask", help="Have the planner look now.")] = False,
    auto: Annotated[bool | None, typer.Option("--auto/--no-auto", help="Apply proposals without asking.")] = None,
    data_dir: DataDir = DATA_DIR,
    planner: Annotated[str, typer.Option("--planner", help="URL of the planner; default: --data-dir's.")] = "",
    as_json: Json = False,
) -> None:
    """What the planner proposes for the running cluster, and what is expected of it; accept or refuse."""
    wanted = operate.Wanted(accept, refuse, ask, auto)
    url = operate.planner_url(data_dir, planner)
    answer = asyncio.run(operate.answer_proposal(url, wanted, operate.actor(), operate.token(data_dir, url)))
    if as_json:
        cli_common.print_json(answer)
    else:
        operate.show_proposals(Console(), answer)
    if answer["failed"]:
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
    with console.status(f"{operate.DOING[what]} {instance}…"):  # nothing where it is no terminal
        answer: dict[str, Any] = asyncio.run(operate.act(what, instance, url, token, timeout_s=timeout_s, force=force))
    if as_json:
        cli_common.print_json(answer)
    else:
        operate.show_outcome(console, what, instance, answer)
