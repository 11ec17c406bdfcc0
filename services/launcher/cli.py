"""The `polyphase` command: start a suite, create keys, upgrade the database's schema; and the groups of all others."""

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

from benchmarks.cli import bench_app
from services.launcher import cli_common, cluster_keys
from services.launcher.cli_common import DATA_DIR, DataDir, Json
from services.launcher.cli_look import look_app
from services.launcher.cli_operate import operate_app
from services.launcher.render.manifests import render_app
from services.launcher.up import UpOptions, up
from shared.errors import PolyphaseError, Unavailable
from shared.runtime.keys import new_token
from shared.store.database import open_engine
from shared.store.migrate import migrate
from tools.calibrate.command import calibrate_app
from tools.plan.command import plan_app
from tools.simulate.command import simulate_command

SERVE, MEASURE = "Serve", "Plan and measure"
app = typer.Typer(
    name="polyphase",
    no_args_is_help=True,
    help="LLM serving that splits prefill and decode across different accelerators.",
)
keys_app = typer.Typer(no_args_is_help=True, help="Create API keys, and the secrets for traffic between hosts.")
app.add_typer(look_app)
app.add_typer(operate_app)
app.add_typer(keys_app, name="keys", rich_help_panel=SERVE)
app.add_typer(render_app, name="render", rich_help_panel=SERVE)
app.add_typer(bench_app, name="bench", rich_help_panel=MEASURE)
app.add_typer(calibrate_app, name="calibrate", rich_help_panel=MEASURE)
app.add_typer(plan_app, name="plan", rich_help_panel=MEASURE)

ClusterFile = Annotated[
    Path,
    typer.Option(help="A cluster file, or the name of a shipped one.", autocompletion=cli_common.complete_clusters),
]
ModelName = Annotated[
    str, typer.Option(help="A Hugging Face name or a folder, in place of the model in the cluster file.")
]
_RETRY_S = 0.5
LAPTOP, DEMO = Path("laptop"), Path("demo")
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _print_version(wanted: bool) -> None:
    if wanted:
        print(cli_common.version())
        raise typer.Exit


@app.callback()
def polyphase(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the versions of Polyphase, vLLM and Python."
        ),
    ] = False,
) -> None:
    """LLM serving that splits prefill and decode across different accelerators.

    `polyphase up` starts a suite, `polyphase status` shows its state, `polyphase COMMAND --help` explains a command.
    """


class On(StrEnum):
    """Systems that can run the instances in place of this host."""

    RAY = "ray"


@app.command("up", rich_help_panel=SERVE)
def up_command(
    cluster: ClusterFile = LAPTOP,
    model: ModelName = "",
    port: Annotated[
        int | None, typer.Option(help="Port of the API. Default: that of the cluster file, 8000 without one.")
    ] = None,
    dashboard_port: Annotated[
        int | None, typer.Option(help="Port of the dashboard. Default: that of the cluster file, 8501 without one.")
    ] = None,
    dashboard: Annotated[bool, typer.Option("--dashboard/--no-dashboard", help="Start the dashboard.")] = True,
    data_dir: DataDir = DATA_DIR,
    host_name: Annotated[str, typer.Option(help="The name of this machine among the hosts of the cluster file.")] = "",
    auto: Annotated[
        bool, typer.Option("--auto", help="Let the planner apply its proposals without confirmation.")
    ] = False,
    on: Annotated[On | None, typer.Option(help="Run the instances on this system instead of this host.")] = None,
    ray_address: Annotated[
        str, typer.Option(help="Address of the Ray head. Default: RAY_ADDRESS, or a new Ray cluster on this machine.")
    ] = "",
) -> None:
    """Start a suite and keep it running until Ctrl-C.

    Example: polyphase up --cluster my.yaml
    """
    ray = ray_address if on is On.RAY else None
    options = UpOptions(
        cluster=cluster,
        model=model,
        port=port,
        dashboard_port=dashboard_port,
        dashboard=dashboard,
        data_dir=data_dir,
        host_name=host_name,
        auto=auto,
        ray=ray,
    )
    asyncio.run(up(options, Console()))


@app.command("demo", rich_help_panel=SERVE)
def demo_command(
    as_json: Json = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the suite running after the report.")] = False,
    cluster: ClusterFile = DEMO,
    model: ModelName = "",
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="The folder for state and logs. Default: a temporary folder.")
    ] = None,
) -> None:
    """Start a suite on free ports, demonstrate its features one by one, and report the results."""
    from benchmarks.demo.run import demo

    options = UpOptions(cluster, model)
    if not asyncio.run(demo(options, data_dir, Console(), as_json=as_json, keep=keep)):
        raise typer.Exit(1)


@keys_app.command("add")
def keys_add(
    name: str,
    file: Annotated[Path, typer.Option(help="The file named by the gateway's setting api_keys_file.")] = Path(
        "keys.yaml"
    ),
    rate: Annotated[float, typer.Option(help="Limit in requests per second; 0: no limit.")] = 0.0,
    burst: Annotated[int, typer.Option(help="Requests allowed at once; 0: as many as the rate.")] = 0,
    role: Annotated[str, typer.Option(help="Role at the dashboard: look or operate. Default: API access only.")] = "",
) -> None:
    """Create an API key. Its secret is shown once and is not stored."""
    secret = cluster_keys.add_key(file, name, rate, burst, role)
    print(f"{name!r} was added to {file}. The secret, which is shown only once:", file=sys.stderr)
    print(secret)


@keys_app.command("curve")
def keys_curve() -> None:
    """Create the key pair that encrypts traffic between hosts. Put the two printed lines into the cluster file."""
    for key, value in cluster_keys.curve_pair().items():
        print(f"{key}: '{value}'")


@keys_app.command("token")
def keys_token() -> None:
    """Create the cluster token, which authorizes changes over HTTP. Put the printed line into the cluster file."""
    print(f"cluster_token: '{new_token()}'")


@keys_app.command("init")
def keys_init(
    folder: Path,
    api: Annotated[Path | None, typer.Option(help="A separate folder for the API key and its digest.")] = None,
    database: Annotated[Path | None, typer.Option(help="A folder for a new PostgreSQL password.")] = None,
) -> None:
    """Create an API key, a CurveZMQ key pair and a cluster token for containers. Existing files are kept."""
    made = cluster_keys.init_folder(folder, api)
    made += cluster_keys.init_database(database) if database is not None else []
    print(f"{folder}: created or completed {', '.join(made)}" if made else f"{folder}: all files exist already")


@app.command("migrate", rich_help_panel=SERVE)
def migrate_command(
    url: Annotated[
        str,
        typer.Option(
            "--database", envvar="POLYPHASE_DATABASE_URL", help="URL of the database: postgresql://… or sqlite:…"
        ),
    ],
    wait: Annotated[float, typer.Option(help="How many seconds to wait for the database to start.")] = 0.0,
) -> None:
    """Upgrade a database to the newest schema before any service starts. Services also do this themselves."""
    asyncio.run(migrate_url(url, wait))
    print("the database has the newest schema")


async def migrate_url(url: str, wait_s: float) -> None:
    """Upgrade the schema, retrying for `wait_s`. Raises InvalidRequest for an invalid URL, else Unavailable."""
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
        await asyncio.sleep(_RETRY_S)


app.command("simulate", rich_help_panel=MEASURE)(simulate_command)


@app.command("predictor", rich_help_panel=MEASURE, context_settings=_PASS_ON)
def predictor_command(context: typer.Context) -> None:
    """Length predictor: `dataset` collects a model's answers, `train` learns their lengths, `evaluate` measures it."""
    importlib.import_module("predictor.cli").app(args=context.args, prog_name="polyphase predictor")


def main() -> None:
    """Run the command. A PolyphaseError is printed as one line; the exit code is 1."""
    try:
        app()
    except PolyphaseError as error:
        print(f"polyphase: {error.message}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
