"""Where the cluster's secret is kept: in the data folder, for the processes of this host and for the command."""

import os
from pathlib import Path

from services.launcher.cluster_file import Cluster
from shared.runtime.keys import checked, new_token, read_token

NAME = "cluster-token"
_VARIABLE = "POLYPHASE_CLUSTER_TOKEN"


def file_in(data_dir: Path) -> Path:
    """The file; processes are told of it, so that the secret is in no environment."""
    return data_dir.resolve() / NAME


def keep(cluster: Cluster, data_dir: Path) -> None:
    """Have the file, readable by its owner only: the cluster file's secret, else the one that is there, else a new one.

    Raises InvalidRequest for a file that has none.
    """
    file, given = file_in(data_dir), cluster.cluster_token.get_secret_value()
    if not given and file.exists():
        file.chmod(0o600)
        read_token(file)
        return
    data_dir.mkdir(parents=True, exist_ok=True)
    write(file, given or new_token())


def kept(data_dir: Path) -> str:
    """The secret of the suite in that folder; empty where there is none. Raises InvalidRequest."""
    file = file_in(data_dir)
    return read_token(file) if file.exists() else ""


def of_environment() -> str:
    """POLYPHASE_CLUSTER_TOKEN, or what the file POLYPHASE_CLUSTER_TOKEN_FILE says. Raises InvalidRequest."""
    if given := os.environ.get(_VARIABLE, ""):
        return checked(given, _VARIABLE)
    file = os.environ.get(f"{_VARIABLE}_FILE", "")
    return read_token(Path(file)) if file else ""


def write(file: Path, token: str) -> None:
    """The whole file or nothing, readable by its owner only."""
    fresh = file.with_name(f"{file.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(token + "\n")
    fresh.replace(file)
