"""The `polyphase` command."""

import asyncio
import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from services.launcher import keys, measuring, operate, policies, proposals
from services.launcher.cli_bench import bench_app
from services.launcher.up import UpOptions, up
from shared.errors import PolyphaseError

app = typer.Typer(
    name="polyphase",
    no_args_is_help=True,
    add_completion=False,
    help="LLM serving that splits prefill and decode over unlike accelerators.",
)
keys_app = typer.Typer(no_args_is_help=True, help="API keys; the keys for traffic between hosts.")
app.add_typer(keys_app, name="keys")
app.add_typer(bench_app, name="bench")
app.add_typer(measuring.from_lab("calibrate.command", "calibrate_app"), name="calibrate")
app.add_typer(measuring.from_lab("plan.command", "plan_app"), name="plan")

DataDir = Annotated[Path, typer.Option("--data-dir", help="State, logs and database of the suite.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; its last line is one object.")]
Monitor = Annotated[str, typer.Option("--monitor", help="URL of the monitor; default: --data-dir's.")]
ClusterFile = Annotated[Path, typer.Option(help="A cluster file, or the name of one that is shipped.")]
ModelName = Annotated[str, typer.Option(help="A Hugging Face name or a folder, instead of the file's.")]
DATA_DIR = Path(".polyphase")
LAPTOP, DEMO = Path("laptop"), Path("demo")
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command("up")
def up_command(
    cluster: ClusterFile = LAPTOP,
    model: ModelName = "",
    port: Annotated[int | None, typer.Option(help="Port of the API; 8000 unless the file says else.")] = None,
    dashboard_port: Annotated[int | None, typer.Option(help="Port of the dashboard; 8501 unless…")] = None,
    dashboard: Annotated[bool, typer.Option("--dashboard/--no-dashboard")] = True,
    data_dir: DataDir = DATA_DIR,
    host_name: Annotated[str, typer.Option(help="Which of the file's hosts this machine is.")] = "",
    auto: Annotated[bool, typer.Option("--auto", help="The planner applies its proposals without asking.")] = False,
) -> None:
    """Start everything and keep it running until Ctrl-C."""
    options = UpOptions(cluster, model, port, dashboard_port, dashboard, data_dir, host_name, auto)
    asyncio.run(up(options, Console()))


@app.command("demo")
def demo_command(
    as_json: Json = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the suite running after the report.")] = False,
    cluster: ClusterFile = DEMO,
    model: ModelName = "",
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Default: a temporary folder.")] = None,
) -> None:
    """Start a suite on free ports, put it through everything it promises, and report."""
    demo = measuring.from_lab("demo.run", "demo")
    options = UpOptions(cluster, model)
    if not asyncio.run(demo(options, data_dir, Console(), as_json=as_json, keep=keep)):
        raise typer.Exit(1)


@app.command("status")
def status_command(data_dir: DataDir = DATA_DIR, monitor: Monitor = "", as_json: Json = False) -> None:
    """Instances with role, state and load; SLO attainment."""
    answer = asyncio.run(operate.status(data_dir, monitor))
    if as_json:
        measuring.print_json(answer)
    else:
        operate.show_status(Console(), answer)


@app.command("flip")
def flip_command(
    instance: str,
    force: Annotated[bool, typer.Option("--force", help="Even the last ready instance of its role.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for the drain.")] = 30.0,
    data_dir: DataDir = DATA_DIR,
    monitor: Monitor = "",
    as_json: Json = False,
) -> None:
    """Drain an instance and change its role."""
    _operate("flip", instance, data_dir, monitor, as_json, timeout_s=timeout, force=force)


@app.command("drain")
def drain_command(
    instance: str,
    force: Annotated[bool, typer.Option("--force", help="Even the last ready instance of its role.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for its work to end.")] = 30.0,
    data_dir: DataDir = DATA_DIR,
    monitor: Monitor = "",
    as_json: Json = False,
) -> None:
    """Give an instance no new work and wait until it has none."""
    _operate("drain", instance, data_dir, monitor, as_json, timeout_s=timeout, force=force)


@app.command("resume")
def resume_command(instance: str, data_dir: DataDir = DATA_DIR, monitor: Monitor = "", as_json: Json = False) -> None:
    """Give a drained instance work again."""
    _operate("resume", instance, data_dir, monitor, as_json)


@app.command("policies")
def policies_command(
    wanted: Annotated[list[str] | None, typer.Argument(help="Such as split=fraction:fraction=0.5, or sjf.")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Back to the file's: all, or the kinds named.")] = False,
    data_dir: DataDir = DATA_DIR,
    monitor: Monitor = "",
    as_json: Json = False,
) -> None:
    """The policies in force, who changed them and who follows; or change some for the whole cluster."""
    change = policies.reset_of(wanted or ()) if reset else policies.change_of(wanted or ())
    answer = asyncio.run(policies.act(operate.monitor_url(data_dir, monitor), change, operate.actor()))
    if as_json:
        measuring.print_json(answer)
    else:
        policies.show(Console(), answer)


@app.command("proposals")
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
    wanted = proposals.Wanted(accept, refuse, ask, auto)
    answer = asyncio.run(proposals.act(proposals.planner_url(data_dir, planner), wanted, operate.actor()))
    if as_json:
        measuring.print_json(answer)
    else:
        proposals.show(Console(), answer)
    if answer["failed"]:
        raise typer.Exit(1)


@app.command("forget")
def forget_command(instance: str, data_dir: DataDir = DATA_DIR, monitor: Monitor = "", as_json: Json = False) -> None:
    """Count a dead instance no longer."""
    _operate("forget", instance, data_dir, monitor, as_json)


@app.command("operation")
def operation_command(
    operation_id: str, data_dir: DataDir = DATA_DIR, monitor: Monitor = "", as_json: Json = False
) -> None:
    """How a flip, drain or resume stands, by its id: for one whose answer never came."""
    answer = asyncio.run(operate.operation(operation_id, operate.monitor_url(data_dir, monitor)))
    if as_json:
        measuring.print_json(answer)
    else:
        operate.show_outcome(Console(), answer["kind"], answer["instance_id"], answer)


@keys_app.command("add")
def keys_add(
    name: str,
    file: Annotated[Path, typer.Option(help="The gateway's api_keys_file.")] = Path("keys.yaml"),
    rate: Annotated[float, typer.Option(help="Requests a second; 0: no limit.")] = 0.0,
    burst: Annotated[int, typer.Option(help="Requests at once; 0: as the rate.")] = 0,
) -> None:
    """Make an API key. Its secret is shown once and kept nowhere."""
    secret = keys.add_key(file, name, rate, burst)
    print(f"{name!r} is in {file}. The secret, shown only now:", file=sys.stderr)
    print(secret)


@keys_app.command("curve")
def keys_curve() -> None:
    """Make the key pair that encrypts traffic between hosts; its two lines go into the cluster file."""
    for key, value in keys.curve_pair().items():
        print(f"{key}: '{value}'")


@keys_app.command("init")
def keys_init(folder: Path) -> None:
    """Make an API key and a CurveZMQ pair as files, for containers, or complete them; what is there already stays."""
    made = keys.init_folder(folder)
    print(f"{folder}: made or completed {', '.join(made)}" if made else f"{folder}: everything is there already")


app.command("simulate")(measuring.from_lab("simulate.command", "simulate_command"))


@app.command("predictor", context_settings=_PASS_ON)
def predictor_command(context: typer.Context) -> None:
    """Length predictor: `dataset` asks a model for answers, `train` learns how long they get, `evaluate` judges."""
    importlib.import_module("predictor.cli").app(args=context.args, prog_name="polyphase predictor")


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
    url = operate.monitor_url(data_dir, monitor)
    answer: dict[str, Any] = asyncio.run(operate.act(what, instance, url, timeout_s=timeout_s, force=force))
    if as_json:
        measuring.print_json(answer)
    else:
        operate.show_outcome(Console(), what, instance, answer)


def main() -> None:
    """Run the command; an error of ours is one line and exit code 1."""
    try:
        app()
    except PolyphaseError as error:
        print(f"polyphase: {error.message}", file=sys.stderr)
        sys.exit(1)
