"""`polyphase keys`: API keys of the gateway, the cluster's CurveZMQ pair and its secret."""

import os
import secrets
from collections.abc import Mapping
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

# MERGED cluster_token.py
# Where the cluster's secret is kept: in the data folder, for the processes of this host and for the command.


TOKEN_NAME = "cluster-token"
_VARIABLE = "POLYPHASE_CLUSTER_TOKEN"


def token_file(data_dir: Path) -> Path:
    """The file; processes are told of it, so that the secret is in no environment."""
    return data_dir.resolve() / TOKEN_NAME


def keep_token(cluster: Cluster, data_dir: Path) -> None:
    """Have the file, readable by its owner only: the cluster file's secret, else the one that is there, else a new one.

    Raises InvalidRequest for a file that has none.
    """
    file, given = token_file(data_dir), cluster.cluster_token.get_secret_value()
    if not given and file.exists():
        file.chmod(0o600)
        read_token(file)
        return
    data_dir.mkdir(parents=True, exist_ok=True)
    write_secret(file, given or new_token())


def kept_token(data_dir: Path) -> str:
    """The secret of the suite in that folder; empty where there is none. Raises InvalidRequest."""
    file = token_file(data_dir)
    return read_token(file) if file.exists() else ""


def token_of_environment() -> str:
    """POLYPHASE_CLUSTER_TOKEN, or what the file POLYPHASE_CLUSTER_TOKEN_FILE says. Raises InvalidRequest."""
    if given := os.environ.get(_VARIABLE, ""):
        return checked(given, _VARIABLE)
    file = os.environ.get(f"{_VARIABLE}_FILE", "")
    return read_token(Path(file)) if file else ""


def write_secret(file: Path, token: str) -> None:
    """The whole file or nothing, readable by its owner only."""
    fresh = file.with_name(f"{file.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(token + "\n")
    fresh.replace(file)


_CURVED = ("MONITOR", "SCHEDULER", "GATEWAY", "WORKER", "PREDICTOR", "PLANNER")
_PAIR = ("curve_public", "curve_secret")


def add_key(file: Path, name: str, requests_per_s: float = 0.0, burst: int = 0, role: str = "") -> str:
    """Make a key and keep its digest in `file`; the secret is returned and kept nowhere.

    Raises Conflict when the name is taken, InvalidRequest when the file is not one of keys.
    """
    if requests_per_s < 0 or burst < 0:
        raise InvalidRequest("rate and burst must be 0 or more")
    if role not in ROLES:
        raise InvalidRequest(f"no role {role!r}; known: {', '.join(filter(None, ROLES))}")
    known = load_keys(file) if file.exists() else ()
    if any(key.name == name for key in known):
        raise Conflict(f"{file} has a key named {name!r} already")
    secret, key = create_key(name, requests_per_s, burst, role)
    text = yaml.safe_dump([asdict(each) for each in (*known, key)], sort_keys=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    _write(file, text)
    return secret


def curve_pair() -> dict[str, str]:
    """A new pair, as the keys of a cluster file."""
    public, secret = zmq.curve_keypair()
    return {"curve_public": public.decode(), "curve_secret": secret.decode()}


def init_folder(folder: Path, api: Path | None = None) -> list[str]:
    """Make what containers need and what is not there yet; the names of the files that were made or completed.

    keys.yaml and api-key: one key of the gateway, its digest and its secret. curve.env: the cluster's CurveZMQ pair as
    the environment of every process that speaks ZeroMQ; where an older version made it, the processes that it did not
    know get the same pair. cluster-token: the cluster's secret. Nothing that is there changes.
    Raises InvalidRequest for a curve.env of several pairs.

    api: the folder of keys.yaml and api-key, so that nobody but the gateway need have them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made, api = [], api or folder
    if not (api / "keys.yaml").exists():
        _write(api / "api-key", add_key(api / "keys.yaml", "compose", role=OPERATE) + "\n")
        made += ["keys.yaml", "api-key"]
    if _complete_curves(folder / "curve.env"):
        made.append("curve.env")
    if not (folder / TOKEN_FILE.name).exists():
        write_secret(folder / TOKEN_FILE.name, new_token())
        made.append(TOKEN_FILE.name)
    return made


def init_database(folder: Path) -> list[str]:
    """Make a password of PostgreSQL's user `polyphase`, if there is none: the names of the files that were made.

    password: for the server (POSTGRES_PASSWORD_FILE). pgpass: for clients (PGPASSFILE).
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "password").exists():
        _write(folder / "password", secrets.token_urlsafe(24))
    if (folder / "pgpass").exists():
        return []
    _write(folder / "pgpass", f"*:*:*:polyphase:{(folder / 'password').read_text().strip()}\n")
    return ["password", "pgpass"]


def _complete_curves(file: Path) -> bool:
    """Name the pair for every process that the file says nothing of; whether there was one."""
    text = read_text(file) if file.exists() else ""
    known = read_environment(text)
    missing = [(_variable(who, key), key) for who in _CURVED for key in _PAIR if _variable(who, key) not in known]
    if not missing:
        return False
    pair = {key: _only(file, key, known) for key in _PAIR}
    if not any(pair.values()):
        pair = curve_pair()
    elif not all(pair.values()):
        raise InvalidRequest(f"{file}: it has one half of a pair only")
    lines = [f"{name}='{pair[key]}'\n" for name, key in missing]  # Z85 has no quote
    _write(file, text + ("\n" if text and not text.endswith("\n") else "") + "".join(lines))
    return True


def _only(file: Path, key: str, known: Mapping[str, str]) -> str:
    """What all processes that are named have for it; empty when none is."""
    values = {known[name] for who in _CURVED if (name := _variable(who, key)) in known}
    if len(values) > 1:
        raise InvalidRequest(f"{file}: {key} is not the same for all processes, so those that it lacks cannot be added")
    return values.pop() if values else ""


def _variable(who: str, key: str) -> str:
    return f"POLYPHASE_{who}_{key.upper()}"


def _write(file: Path, text: str) -> None:
    """The whole file or nothing, readable by its owner only."""
    fresh = file.with_name(f"{file.name}.{os.getpid()}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(text)
    fresh.replace(file)


# MERGED host_key.py
# Where the key of a suite on one host is kept: in the data folder, beside the cluster's secret.


CURVE_KEY_NAME = "curve-key"


def curve_key_file(data_dir: Path) -> Path:
    """The file; processes get its path, so that the key is in no environment."""
    return data_dir.resolve() / CURVE_KEY_NAME


def keep_curve_key(cluster: Cluster, data_dir: Path) -> None:
    """Have the file, readable by its owner only, unless the cluster file has a pair: a new key if there is none.

    Raises InvalidRequest for a file that has none.
    """
    if cluster.curve_public:
        return
    file = curve_key_file(data_dir)
    if file.exists():
        file.chmod(0o600)
        read_pair(file)
        return
    data_dir.mkdir(parents=True, exist_ok=True)
    write_secret(file, new_key())
