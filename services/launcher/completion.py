"""What a shell completes: names of the running suite, from its files alone, and of policies."""

from collections.abc import Iterable
from pathlib import Path

import typer

from services.launcher import logs, state_file
from shared.errors import PolyphaseError


def instances(context: typer.Context, incomplete: str) -> list[str]:
    """Instances of the suite whose data folder is named, or the usual one."""
    try:
        return _that_begin(state_file.read(_data_dir(context)).instance_ids, incomplete)
    except PolyphaseError:
        return []


def processes(context: typer.Context, incomplete: str) -> list[str]:
    """Processes that have a log."""
    return _that_begin(logs.known(_data_dir(context)), incomplete)


def policies(incomplete: str) -> list[str]:
    """Policies, those of several kinds with their kind before them."""
    from shared.policy.registry import KINDS

    names = [name for table in KINDS.values() for name in table]
    words = ["adaptive"] + [
        name if names.count(name) == 1 else f"{kind}={name}" for kind, table in KINDS.items() for name in table
    ]
    whole = [f"{kind}={name}" for kind, table in KINDS.items() for name in table]
    return list(dict.fromkeys(_that_begin(whole if "=" in incomplete else words, incomplete)))


def clusters(incomplete: str) -> list[str]:
    """Cluster files that are shipped; files of one's own are the shell's to complete."""
    shipped = sorted(file.stem for file in (Path(__file__).parent / "clusters").glob("*.yaml"))
    here = sorted(str(file) for file in Path().glob("*.yaml"))
    return _that_begin([*shipped, *here], incomplete)


def _that_begin(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _data_dir(context: typer.Context) -> Path:
    return Path(context.params.get("data_dir") or ".polyphase")
