"""The secrets of a cluster: `polyphase keys`, and the files in the data folder with the cluster token and the CurveZMQ
key of a suite on one host.
"""

import os
import secrets
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import yaml
import zmq

from gateway.auth import create_key, load_keys
from services.launcher.cluster_file import Cluster
from services.launcher.container import TOKEN_FILE, read_environment
from shared.errors import Conflict, InvalidRequest
from shared.files.text import read_text
from shared.runtime.keys import OPERATE, ROLES, checked, new_key, new_token, read_pair, read_token

TOKEN_NAME = "cluster-token"
CURVE_KEY_NAME = "curve-key"
_VARIABLE = "POLYPHASE_CLUSTER_TOKEN"
_CURVED = ("MONITOR", "SCHEDULER", "GATEWAY", "WORKER", "PREDICTOR", "PLANNER")
_PAIR = ("curve_public", "curve_secret")


def token_file(data_dir: Path) -> Path:
    """The file of the cluster token. Processes get its path, so that no environment contains the token."""
    return data_dir.resolve() / TOKEN_NAME


def keep_token(cluster: Cluster, data_dir: Path) -> None:
    """Write the token of the cluster file to the data folder; else keep the one there, or create one.

    Raises InvalidRequest for an existing file without a token.
    """
    _keep(token_file(data_dir), cluster.cluster_token.get_secret_value(), read_token, new_token)


def kept_token(data_dir: Path) -> str:
    """The token of the suite in that folder; empty without one. Raises InvalidRequest."""
    file = token_file(data_dir)
    return read_token(file) if file.exists() else ""


def token_of_environment() -> str:
    """POLYPHASE_CLUSTER_TOKEN, or the content of the file POLYPHASE_CLUSTER_TOKEN_FILE. Raises InvalidRequest."""
    if given := os.environ.get(_VARIABLE, ""):
        return checked(given, _VARIABLE)
    file = os.environ.get(f"{_VARIABLE}_FILE", "")
    return read_token(Path(file)) if file else ""


def curve_key_file(data_dir: Path) -> Path:
    """The file of the CurveZMQ key. Processes get its path, so that no environment contains the key."""
    return data_dir.resolve() / CURVE_KEY_NAME


def keep_curve_key(cluster: Cluster, data_dir: Path) -> None:
    """Create a CurveZMQ key in the data folder, unless there is one or the cluster file has a pair.

    Raises InvalidRequest for an existing file without a key.
    """
    if not cluster.curve_public:
        _keep(curve_key_file(data_dir), "", read_pair, new_key)


def _keep(file: Path, given: str, read: Callable[[Path], object], create: Callable[[], str]) -> None:
    """Write a given secret to its file. Without one, check the secret in the file, or create one."""
    if not given and file.exists():
        file.chmod(0o600)
        read(file)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    write_secret(file, f"{given or create()}\n")


def add_key(file: Path, name: str, requests_per_s: float = 0.0, burst: int = 0, role: str = "") -> str:
    """Create a key and add its digest to `file`. Returns the secret, which is not stored.

    Raises Conflict if the name is taken, InvalidRequest if the file is not a file of keys.
    """
    if requests_per_s < 0 or burst < 0:
        raise InvalidRequest(f"rate and burst must be at least 0, got {requests_per_s:g} and {burst}")
    if role not in ROLES:
        raise InvalidRequest(f"role must be one of {', '.join(filter(None, ROLES))}, got {role!r}")
    known = load_keys(file) if file.exists() else ()
    if any(key.name == name for key in known):
        raise Conflict(f"{file} already has a key named {name!r}")
    secret, key = create_key(name, requests_per_s, burst, role)
    text = yaml.safe_dump([asdict(each) for each in (*known, key)], sort_keys=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_secret(file, text)
    return secret


def curve_pair() -> dict[str, str]:
    """A new pair, as the keys of a cluster file."""
    public, secret = zmq.curve_keypair()
    return {"curve_public": public.decode(), "curve_secret": secret.decode()}


def init_folder(folder: Path, api: Path | None = None) -> list[str]:
    """Create the missing files of secrets for containers. Returns the names of files that were created or completed.

    keys.yaml, api-key: digest and secret of an API key. curve.env: the cluster's CurveZMQ pair as environment variables
    of all processes that use ZeroMQ; a file of an older version is completed with the same pair for newer processes.
    cluster-token: the cluster token. Existing entries do not change.
    Raises InvalidRequest for a curve.env with several pairs.

    api: the folder of keys.yaml and api-key, so that only the gateway needs access to them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made, api = [], api or folder
    if not (api / "keys.yaml").exists():
        write_secret(api / "api-key", add_key(api / "keys.yaml", "compose", role=OPERATE) + "\n")
        made += ["keys.yaml", "api-key"]
    if _complete_curves(folder / "curve.env"):
        made.append("curve.env")
    if not (folder / TOKEN_FILE.name).exists():
        write_secret(folder / TOKEN_FILE.name, f"{new_token()}\n")
        made.append(TOKEN_FILE.name)
    return made


def init_database(folder: Path) -> list[str]:
    """Create a password of the PostgreSQL user `polyphase` if there is none. Returns the names of the created files.

    password: for the server (POSTGRES_PASSWORD_FILE). pgpass: for clients (PGPASSFILE).
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "password").exists():
        write_secret(folder / "password", secrets.token_urlsafe(24))
    if (folder / "pgpass").exists():
        return []
    write_secret(folder / "pgpass", f"*:*:*:polyphase:{(folder / 'password').read_text().strip()}\n")
    return ["password", "pgpass"]


def _complete_curves(file: Path) -> bool:
    """Add the pair for each process that the file lacks. Returns whether there was one."""
    text = read_text(file) if file.exists() else ""
    known = read_environment(text)
    pair: dict[str, str] = {}
    for key in _PAIR:
        values = {known[name] for who in _CURVED if (name := _variable(who, key)) in known}
        if len(values) > 1:
            raise InvalidRequest(f"{file}: {key} differs between processes, so that missing ones cannot be added")
        if value := next(iter(values), ""):
            pair[key] = value
    if len(pair) == 1:
        raise InvalidRequest(f"{file}: it has only one half of a CurveZMQ pair")
    pair = pair or curve_pair()
    missing = [(name, key) for who in _CURVED for key in _PAIR if (name := _variable(who, key)) not in known]
    if missing:
        lines = [f"{name}='{pair[key]}'\n" for name, key in missing]  # Z85 has no quote
        write_secret(file, text + ("\n" if text and not text.endswith("\n") else "") + "".join(lines))
    return bool(missing)


def _variable(who: str, key: str) -> str:
    return f"POLYPHASE_{who}_{key.upper()}"


def write_secret(file: Path, text: str) -> None:
    """Write a file atomically, readable only by its owner."""
    fresh = file.with_name(f"{file.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(text)
    fresh.replace(file)
