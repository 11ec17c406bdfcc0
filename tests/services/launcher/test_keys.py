"""API keys and CurveZMQ pairs."""

import stat
import subprocess
from pathlib import Path

import pytest
import zmq

from gateway.auth import KeyRing, load_keys
from services.launcher.cluster_keys import add_key, curve_pair, init_database, init_folder
from services.launcher.container import read_environment
from shared.errors import Conflict, InvalidRequest
from shared.runtime.keys import read_token
from shared.wire.sockets import Curve, Sockets


def test_the_gateway_accepts_a_new_key(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "keys.yaml"
    first, second = add_key(file, "ann", 2.5, 5), add_key(file, "bob")
    ring = KeyRing(load_keys(file))
    ann, bob = ring.identify(f"Bearer {first}"), ring.identify(f"Bearer {second}")
    assert ann is not None
    assert bob is not None
    assert (ann.name, ann.requests_per_s, ann.burst, bob.name) == ("ann", 2.5, 5, "bob")


def test_the_secret_is_not_in_the_file_and_nobody_else_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    secret = add_key(file, "ann")
    assert secret not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_name_is_given_once(tmp_path: Path) -> None:
    add_key(tmp_path / "k", "ann")
    before = (tmp_path / "k").read_text()
    with pytest.raises(Conflict, match="ann"):
        add_key(tmp_path / "k", "ann")
    assert (tmp_path / "k").read_text() == before


def test_bad_input_leaves_the_file_alone(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        add_key(tmp_path / "k", "ann", -1.0)
    assert not (tmp_path / "k").exists()
    (tmp_path / "k").write_text("- {name: x, digest: short}")
    with pytest.raises(InvalidRequest):
        add_key(tmp_path / "k", "ann")


def test_a_folder_for_containers_is_made_once(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert init_folder(folder) == ["keys.yaml", "api-key", "curve.env", "cluster-token"]
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert init_folder(folder) == []
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in folder.iterdir())
    secret = (folder / "api-key").read_text().strip()
    assert KeyRing(load_keys(folder / "keys.yaml")).identify("", secret) is not None
    assert len(read_token(folder / "cluster-token")) == 43


def test_a_folder_of_an_older_version_is_completed_with_its_own_pair(tmp_path: Path) -> None:
    init_folder(tmp_path)
    file = tmp_path / "curve.env"
    whole = file.read_text()
    older = "# ours\n" + "".join(line for line in whole.splitlines(keepends=True) if "PREDICTOR" not in line)
    file.write_text(older.rstrip("\n"))
    others = {other: other.read_bytes() for other in tmp_path.iterdir() if other != file}
    assert init_folder(tmp_path) == ["curve.env"]
    completed = file.read_text()
    assert completed.startswith(older)
    assert read_environment(completed) == read_environment(whole)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert init_folder(tmp_path) == []
    assert file.read_text() == completed
    assert {other: other.read_bytes() for other in others} == others


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (
            "POLYPHASE_GATEWAY_CURVE_PUBLIC='a'\nPOLYPHASE_GATEWAY_CURVE_SECRET='b'\nPOLYPHASE_WORKER_CURVE_PUBLIC='c'\n",
            "differs between processes",
        ),
        ("POLYPHASE_GATEWAY_CURVE_PUBLIC='a'\n", "only one half of a CurveZMQ pair"),
    ],
)
def test_a_curve_file_that_cannot_be_completed_is_left_alone(tmp_path: Path, said: str, error: str) -> None:
    file = tmp_path / "curve.env"
    file.write_text(said)
    with pytest.raises(InvalidRequest, match=error):
        init_folder(tmp_path)
    assert file.read_text() == said


def test_a_shell_reads_the_curve_file(tmp_path: Path) -> None:
    init_folder(tmp_path)
    script = f". {tmp_path}/curve.env; printf '%s' \"$POLYPHASE_WORKER_CURVE_SECRET\""
    secret = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert len(secret) == 40
    assert (tmp_path / "curve.env").read_text().count(secret) == 6


def test_a_curve_pair_works() -> None:
    pair = curve_pair()
    sockets = Sockets(Curve(pair["curve_public"], pair["curve_secret"]))
    try:
        server = sockets.bind(zmq.PAIR, "tcp://127.0.0.1:*")
        client = sockets.unconnected(zmq.PAIR)
        client.connect(server.getsockopt_string(zmq.LAST_ENDPOINT))
        client.send(b"hello")
        assert server.poll(5_000)
        assert server.recv() == b"hello"
    finally:
        sockets.close()


def test_the_gateways_keys_may_be_in_a_folder_of_their_own(tmp_path: Path) -> None:
    assert init_folder(tmp_path / "keys", tmp_path / "api") == ["keys.yaml", "api-key", "curve.env", "cluster-token"]
    assert sorted(file.name for file in (tmp_path / "api").iterdir()) == ["api-key", "keys.yaml"]
    assert sorted(file.name for file in (tmp_path / "keys").iterdir()) == ["cluster-token", "curve.env"]


def test_a_password_is_made_once_for_server_and_clients(tmp_path: Path) -> None:
    assert init_database(tmp_path) == ["password", "pgpass"]
    password = (tmp_path / "password").read_text()
    assert (tmp_path / "pgpass").read_text() == f"*:*:*:polyphase:{password}\n"
    assert init_database(tmp_path) == []
    assert (tmp_path / "password").read_text() == password
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in tmp_path.iterdir())


def test_a_key_for_the_dashboard_says_what_its_holder_may(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    add_key(file, "anna", role="operate")
    assert [key.role for key in load_keys(file)] == ["operate"]
    with pytest.raises(InvalidRequest, match="must be one of look, operate"):
        add_key(file, "ben", role="admin")
