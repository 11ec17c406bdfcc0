"""The `polyphase` command."""

import asyncio
import importlib
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from sqlalchemy.exc import SQLAlchemyError

from services.launcher import cli_common, cluster_keys
from services.launcher.cli_bench import bench_app
from services.launcher.cli_common import DATA_DIR, DataDir, Json
from services.launcher.cli_look import look_app
from services.launcher.cli_operate import operate_app
from services.launcher.render.manifests import render_app
from services.launcher.up import UpOptions, up
from shared.errors import PolyphaseError, Unavailable
from shared.runtime.keys import new_token
from shared.store.database import open_engine
from shared.store.migrate import migrate

# MERGED database.py
# `polyphase migrate`: the newest schema, before anything writes.


_AGAIN_S = 0.5


async def migrate_url(url: str, wait_s: float) -> None:
    """Try for `wait_s` seconds. Raises InvalidRequest for a URL that is none, Unavailable with the last reason."""
    until = time.monotonic() + wait_s
    while True:
        engine = open_engine(url)
        try:
            return await migrate(engine)
        except (OSError, SQLAlchemyError, TimeoutError) as error:
            if time.monotonic() > until:
                raise Unavailable(f"the database does not answer: {type(error).__name__}: {error}") from error
        finally:
            await engine.dispose()
        await asyncio.sleep(_AGAIN_S)


SERVE, MEASURE = "Serve", "Plan and measure"
app = typer.Typer(
    name="polyphase", no_args_is_help=True, help="LLM serving that splits prefill and decode over unlike accelerators."
)
keys_app = typer.Typer(no_args_is_help=True, help="API keys; the keys for traffic between hosts.")
app.add_typer(look_app)
app.add_typer(operate_app)
app.add_typer(keys_app, name="keys", rich_help_panel=SERVE)
app.add_typer(render_app, name="render", rich_help_panel=SERVE)
app.add_typer(bench_app, name="bench", rich_help_panel=MEASURE)
app.add_typer(cli_common.from_lab("calibrate.command", "calibrate_app"), name="calibrate", rich_help_panel=MEASURE)
app.add_typer(cli_common.from_lab("plan.command", "plan_app"), name="plan", rich_help_panel=MEASURE)

ClusterFile = Annotated[
    Path,
    typer.Option(
        help="A cluster file, or the name of one that is shipped.", autocompletion=cli_common.complete_clusters
    ),
]
ModelName = Annotated[str, typer.Option(help="A Hugging Face name or a folder, instead of the file's.")]
LAPTOP, DEMO = Path("laptop"), Path("demo")
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _say_version(wanted: bool) -> None:
    if wanted:
        print(cli_common.version())
        raise typer.Exit


@app.callback()
def polyphase(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Of polyphase, vLLM and Python.")
    ] = False,
) -> None:
    """LLM serving that splits prefill and decode over unlike accelerators.

    `polyphase up` starts a suite; `polyphase status` says how it does; `polyphase COMMAND --help` explains a command.
    """


class On(StrEnum):
    """Who runs the instances."""

    RAY = "ray"


@app.command("up", rich_help_panel=SERVE)
def up_command(
    cluster: ClusterFile = LAPTOP,
    model: ModelName = "",
    port: Annotated[int | None, typer.Option(help="Port of the API; 8000 unless the file says else.")] = None,
    dashboard_port: Annotated[int | None, typer.Option(help="Port of the dashboard; 8501 unless…")] = None,
    dashboard: Annotated[bool, typer.Option("--dashboard/--no-dashboard")] = True,
    data_dir: DataDir = DATA_DIR,
    host_name: Annotated[str, typer.Option(help="Which of the file's hosts this machine is.")] = "",
    auto: Annotated[bool, typer.Option("--auto", help="The planner applies its proposals without asking.")] = False,
    on: Annotated[On | None, typer.Option(help="Who runs the instances, if not this host.")] = None,
    ray_address: Annotated[str, typer.Option(help="Of Ray's head; default: RAY_ADDRESS, or a new one here.")] = "",
) -> None:
    """Start everything and keep it running until Ctrl-C.

    Example: polyphase up --cluster my.yaml
    """
    ray = ray_address if on is On.RAY else None
    options = UpOptions(cluster, model, port, dashboard_port, dashboard, data_dir, host_name, auto, ray)
    asyncio.run(up(options, Console()))


@app.command("demo", rich_help_panel=SERVE)
def demo_command(
    as_json: Json = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the suite running after the report.")] = False,
    cluster: ClusterFile = DEMO,
    model: ModelName = "",
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Default: a temporary folder.")] = None,
) -> None:
    """Start a suite on free ports, put it through everything it promises, and report."""
    demo = cli_common.from_lab("demo.run", "demo")
    options = UpOptions(cluster, model)
    if not asyncio.run(demo(options, data_dir, Console(), as_json=as_json, keep=keep)):
        raise typer.Exit(1)


@keys_app.command("add")
def keys_add(
    name: str,
    file: Annotated[Path, typer.Option(help="The gateway's api_keys_file.")] = Path("keys.yaml"),
    rate: Annotated[float, typer.Option(help="Requests a second; 0: no limit.")] = 0.0,
    burst: Annotated[int, typer.Option(help="Requests at once; 0: as the rate.")] = 0,
    role: Annotated[str, typer.Option(help="At the dashboard: look or operate; none: the API only.")] = "",
) -> None:
    """Make an API key. Its secret is shown once and kept nowhere."""
    secret = cluster_keys.add_key(file, name, rate, burst, role)
    print(f"{name!r} is in {file}. The secret, shown only now:", file=sys.stderr)
    print(secret)


@keys_app.command("curve")
def keys_curve() -> None:
    """Make the key pair that encrypts traffic between hosts; its two lines go into the cluster file."""
    for key, value in cluster_keys.curve_pair().items():
        print(f"{key}: '{value}'")


@keys_app.command("token")
def keys_token() -> None:
    """Make the cluster's secret, for what changes something over HTTP; its line goes into the cluster file."""
    print(f"cluster_token: '{new_token()}'")


@keys_app.command("init")
def keys_init(
    folder: Path,
    api: Annotated[Path | None, typer.Option(help="A folder of its own for the API key and its digest.")] = None,
    database: Annotated[Path | None, typer.Option(help="A folder for a password of PostgreSQL's, too.")] = None,
) -> None:
    """Make an API key, a CurveZMQ pair and the cluster's secret, for containers; what is there already stays."""
    made = cluster_keys.init_folder(folder, api)
    made += cluster_keys.init_database(database) if database is not None else []
    print(f"{folder}: made or completed {', '.join(made)}" if made else f"{folder}: everything is there already")


@app.command("migrate", rich_help_panel=SERVE)
def migrate_command(
    url: Annotated[str, typer.Option("--database", envvar="POLYPHASE_DATABASE_URL", help="postgresql://… or sqlite:…")],
    wait: Annotated[float, typer.Option(help="Seconds for the database to come up.")] = 0.0,
) -> None:
    """Bring a database to the newest schema. Services do so themselves; here it is done before any of them starts."""
    asyncio.run(migrate_url(url, wait))
    print("the database has the newest schema")


app.command("simulate", rich_help_panel=MEASURE)(cli_common.from_lab("simulate.command", "simulate_command"))


@app.command("predictor", rich_help_panel=MEASURE, context_settings=_PASS_ON)
def predictor_command(context: typer.Context) -> None:
    """Length predictor: `dataset` asks a model for answers, `train` learns how long they get, `evaluate` judges."""
    importlib.import_module("predictor.cli").app(args=context.args, prog_name="polyphase predictor")


def main() -> None:
    """Run the command; an error of ours is one line and exit code 1."""
    try:
        app()
    except PolyphaseError as error:
        print(f"polyphase: {error.message}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
