"""Command line of `polyphase calibrate`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.launcher import cli_common

calibrate_app = typer.Typer(
    no_args_is_help=True, help="Calibrate the cost model, from tables of measured operators or from a running suite."
)

_Out = Annotated[Path, typer.Option("--out", help="The YAML file to write.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON; the last line is one object.")]


@calibrate_app.command("tables")
def tables_command(
    folder: Annotated[
        Path, typer.Argument(help="Folder with the subfolders aiconfigurator/, llmservingsim/ and vidur/.")
    ],
    out: _Out,
    as_json: _Json = False,
) -> None:
    """Fit operators to measured tables; write an efficiencies file and compare held-out errors with the roofline's."""
    from tools.fit.efficiencies import run_tables

    _report(run_tables(folder, out), out, as_json)


@calibrate_app.command("live")
def live_command(
    out: _Out,
    data_dir: Annotated[Path, typer.Option("--data-dir", help="The data folder of the running suite.")] = Path(
        ".polyphase"
    ),
    api: Annotated[str, typer.Option("--api", help="URL of the API, for a suite on another host.")] = "",
    monitor: Annotated[str, typer.Option("--monitor", help="URL of the monitor.")] = "",
    scheduler: Annotated[
        list[str] | None, typer.Option("--scheduler", help="URL of a scheduler; may be repeated.")
    ] = None,
    api_key: Annotated[str, typer.Option("--api-key", help="API key, if the API requires one.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the load.")] = 0,
    as_json: _Json = False,
) -> None:
    """Measure a running suite for a minute: step times of each kind of instance and latencies of the services."""
    from tools.calibrate.live import run_live
    from tools.calibrate.target import find_target

    target = find_target(data_dir, api, monitor, tuple(scheduler or ()), api_key)
    _report(run_live(target, out, seed), out, as_json)


def _report(result: cli_common.Result, out: Path, as_json: bool) -> None:
    result.setdefault("notes", []).append(f"written to {out}")
    if not cli_common.report(Console(), result, as_json):
        raise typer.Exit(1)
