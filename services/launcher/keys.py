"""`polyphase keys`: API keys of the gateway, and the cluster's CurveZMQ pair."""

import os
from dataclasses import asdict
from pathlib import Path

import yaml
import zmq

from gateway.auth import create_key, load_keys
from shared.errors import Conflict, InvalidRequest

_CURVED = ("MONITOR", "SCHEDULER", "GATEWAY", "WORKER", "PREDICTOR")


def add_key(file: Path, name: str, requests_per_s: float = 0.0, burst: int = 0) -> str:
    """Make a key and keep its digest in `file`; the secret is returned and kept nowhere.

    Raises Conflict when the name is taken, InvalidRequest when the file is not one of keys.
    """
    if requests_per_s < 0 or burst < 0:
        raise InvalidRequest("rate and burst must be 0 or more")
    known = load_keys(file) if file.exists() else ()
    if any(key.name == name for key in known):
        raise Conflict(f"{file} has a key named {name!r} already")
    secret, key = create_key(name, requests_per_s, burst)
    text = yaml.safe_dump([asdict(each) for each in (*known, key)], sort_keys=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    _write(file, text)
    return secret


def curve_pair() -> dict[str, str]:
    """A new pair, as the keys of a cluster file."""
    public, secret = zmq.curve_keypair()
    return {"curve_public": public.decode(), "curve_secret": secret.decode()}


def init_folder(folder: Path) -> list[str]:
    """Make what containers need and what is not there yet; the names of the files that were made.

    keys.yaml and api-key: one key of the gateway, its digest and its secret. curve.env: the cluster's CurveZMQ pair as
    the environment of every process that speaks ZeroMQ.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    if not (folder / "keys.yaml").exists():
        _write(folder / "api-key", add_key(folder / "keys.yaml", "compose") + "\n")
        made += ["keys.yaml", "api-key"]
    if not (folder / "curve.env").exists():
        pair = curve_pair()  # Z85 has no quote
        lines = [f"POLYPHASE_{who}_{key.upper()}='{value}'\n" for who in _CURVED for key, value in pair.items()]
        _write(folder / "curve.env", "".join(lines))
        made.append("curve.env")
    return made


def _write(file: Path, text: str) -> None:
    """The whole file or nothing, readable by its owner only."""
    fresh = file.with_name(f"{file.name}.{os.getpid()}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(text)
    fresh.replace(file)
