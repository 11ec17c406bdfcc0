"""API keys, the cluster token and CurveZMQ keys: files, environments and who gets them."""

import asyncio
import os
import stat
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway.auth import KeyRing, load_keys
from gateway.settings import GatewaySettings
from services.launcher import cluster_keys, operate, state_file
from services.launcher.cluster_file import Cluster
from services.launcher.cluster_keys import add_key, curve_pair, init_database, init_folder
from services.launcher.container import TOKEN_FILE, read_environment, token_environment
from services.launcher.plan import make_plan
from services.launcher.state_file import SuiteState
from shared.domain.cluster import ClusterDelta
from shared.errors import Conflict, InvalidRequest
from shared.runtime.keys import read_pair, read_token
from shared.wire.broadcast import ClusterFeed, ClusterPublisher, Publisher, Subscriber
from shared.wire.sockets import Sockets
from tests.ports import free_address

TOKEN = "a-secret-of-the-cluster"
OTHER = "a-secret-of-another-one"


def cluster(**changes: Any) -> Cluster:
    instances = [{"id": "p", "role": "prefill", "engine": "emulated"}, {"id": "d", "role": "decode"}]
    return Cluster.model_validate({"name": "one host", "model": "m", "instances": instances, **changes})


def readable_by_owner_only(*files: Path) -> bool:
    return all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_gateway_accepts_a_new_key_that_is_not_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "keys.yaml"
    first, second = add_key(file, "ann", 2.5, 5), add_key(file, "bob", role="operate")
    ring = KeyRing(load_keys(file))
    ann, bob = ring.identify(f"Bearer {first}"), ring.identify(f"Bearer {second}")
    assert ann is not None
    assert bob is not None
    assert (ann.name, ann.requests_per_s, ann.burst, bob.name, bob.role) == ("ann", 2.5, 5, "bob", "operate")
    assert first not in file.read_text()
    assert readable_by_owner_only(file)


@pytest.mark.parametrize(
    ("name", "options", "text", "error", "message"),
    [
        ("x", {}, None, Conflict, "already has a key named 'x'"),
        ("ann", {"requests_per_s": -1.0}, None, InvalidRequest, "at least 0, got -1"),
        ("ann", {"role": "admin"}, None, InvalidRequest, "must be one of look, operate"),
        ("ann", {}, "- {name: x, digest: short}", InvalidRequest, "digest"),
    ],
)
def test_bad_input_leaves_the_file_as_it_is(
    tmp_path: Path, name: str, options: dict[str, Any], text: str | None, error: type[Exception], message: str
) -> None:
    file = tmp_path / "keys.yaml"
    add_key(file, "x")
    if text is not None:
        file.write_text(text)
    before = file.read_text()
    with pytest.raises(error, match=message):
        add_key(file, name, **options)
    assert file.read_text() == before


@pytest.mark.parametrize("api", ["keys", "api"])
def test_a_folder_for_containers_is_filled_once(tmp_path: Path, api: str) -> None:
    """The gateway's keys may be in a folder of their own."""
    folder = tmp_path / "keys"
    assert init_folder(folder, tmp_path / api) == ["keys.yaml", "api-key", "curve.env", "cluster-token"]
    before = [contents(folder), contents(tmp_path / api)]
    assert {"curve.env", "cluster-token"} <= set(before[0])
    assert {"api-key", "keys.yaml"} <= set(before[1])
    assert init_folder(folder, tmp_path / api) == []
    assert [contents(folder), contents(tmp_path / api)] == before
    assert readable_by_owner_only(*folder.iterdir(), *(tmp_path / api).iterdir())
    secret = (tmp_path / api / "api-key").read_text().strip()
    assert KeyRing(load_keys(tmp_path / api / "keys.yaml")).identify("", secret) is not None
    assert len(read_token(folder / "cluster-token")) == 43


def test_a_folder_of_an_older_version_is_completed_with_its_own_pair(tmp_path: Path) -> None:
    init_folder(tmp_path)
    file = tmp_path / "curve.env"
    whole = file.read_text()
    older = "# ours\n" + "".join(line for line in whole.splitlines(keepends=True) if "PREDICTOR" not in line)
    before = contents(tmp_path)
    file.write_text(older.rstrip("\n"))
    assert init_folder(tmp_path) == ["curve.env"]
    completed = file.read_text()
    assert completed.startswith(older)
    assert read_environment(completed) == read_environment(whole)
    assert readable_by_owner_only(file)
    assert init_folder(tmp_path) == []
    assert contents(tmp_path) == {**before, "curve.env": completed.encode()}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "POLYPHASE_GATEWAY_CURVE_PUBLIC='a'\nPOLYPHASE_GATEWAY_CURVE_SECRET='b'\nPOLYPHASE_WORKER_CURVE_PUBLIC='c'\n",
            "differs between processes",
        ),
        ("POLYPHASE_GATEWAY_CURVE_PUBLIC='a'\n", "only one half of a CurveZMQ pair"),
    ],
)
def test_a_curve_file_that_cannot_be_completed_is_left_as_it_is(tmp_path: Path, text: str, error: str) -> None:
    file = tmp_path / "curve.env"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=error):
        init_folder(tmp_path)
    assert file.read_text() == text


def test_a_shell_reads_the_curve_file(tmp_path: Path) -> None:
    init_folder(tmp_path)
    script = f". {tmp_path}/curve.env; printf '%s' \"$POLYPHASE_WORKER_CURVE_SECRET\""
    secret = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert len(secret) == 40
    assert (tmp_path / "curve.env").read_text().count(secret) == 6


def test_a_password_is_created_once_for_server_and_clients(tmp_path: Path) -> None:
    assert init_database(tmp_path) == ["password", "pgpass"]
    password = (tmp_path / "password").read_text()
    assert (tmp_path / "pgpass").read_text() == f"*:*:*:polyphase:{password}\n"
    assert init_database(tmp_path) == []
    assert (tmp_path / "password").read_text() == password
    assert readable_by_owner_only(*tmp_path.iterdir())


Keep = Callable[[Cluster, Path], None]
KEPT = [
    (cluster_keys.keep_token, "cluster-token", "cluster-token: a cluster token is 16 to 512"),
    (cluster_keys.keep_curve_key, "curve-key", "curve-key cannot be used: .*remove it"),
]


@pytest.mark.parametrize(("keep", "name", "error"), KEPT, ids=["token", "curve"])
def test_a_secret_of_the_data_folder_is_created_once_for_its_owner(
    tmp_path: Path, keep: Keep, name: str, error: str
) -> None:
    keep(cluster(), tmp_path / "data")
    file = tmp_path / "data" / name
    created = file.read_text()
    assert readable_by_owner_only(file)
    file.chmod(0o644)
    keep(cluster(), tmp_path / "data")
    assert file.read_text() == created
    assert readable_by_owner_only(file)
    keep(cluster(), tmp_path / "other")
    assert (tmp_path / "other" / name).read_text() != created
    file.write_text("short\n")
    with pytest.raises(InvalidRequest, match=error) as refused:
        keep(cluster(), tmp_path / "data")
    assert "short" not in refused.value.message


def test_secrets_of_the_cluster_file_take_precedence(tmp_path: Path) -> None:
    named = cluster(cluster_token=TOKEN, **curve_pair())
    cluster_keys.keep_token(cluster(), tmp_path)
    cluster_keys.keep_token(named, tmp_path)
    cluster_keys.keep_curve_key(named, tmp_path)
    assert cluster_keys.kept_token(tmp_path) == TOKEN
    assert TOKEN not in repr(named)
    assert not cluster_keys.curve_key_file(tmp_path).exists()
    assert not any(spec.settings.curve_file for spec in make_plan(named, tmp_path).processes if spec.settings)


def test_processes_get_the_paths_of_secrets_and_no_environment_has_the_secrets(tmp_path: Path) -> None:
    named = cluster(cluster_token=TOKEN)
    cluster_keys.keep_token(named, tmp_path)
    cluster_keys.keep_curve_key(named, tmp_path)
    key = cluster_keys.curve_key_file(tmp_path)
    for process in make_plan(named, tmp_path).processes:
        assert TOKEN not in repr(process)
        assert not any(key.read_text().strip() in value for value in process.env.values())
        token_variables = {name for name in process.env if name.endswith("CLUSTER_TOKEN_FILE")}
        assert len(token_variables) == (0 if isinstance(process.settings, GatewaySettings) else 1), process.name
        if process.settings is not None:
            assert process.settings.curve_pair() == read_pair(key)
            assert not token_variables or process.settings.token() == TOKEN


def running_suite(folder: Path) -> None:
    me = psutil.Process()
    urls = ("http://api", "http://monitor", ("http://scheduler",), "", "")
    state_file.write(folder, SuiteState(me.pid, me.create_time(), "m", *urls, (), (), planner_url="http://planner"))


def test_a_token_of_the_environment_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster_keys.keep_token(cluster(cluster_token=TOKEN), tmp_path)
    assert operate.token(tmp_path, "http://monitor") == ""  # no suite runs there
    running_suite(tmp_path)
    assert operate.token(tmp_path, "http://monitor") == operate.token(tmp_path, "http://planner") == TOKEN
    assert operate.token(tmp_path, "http://elsewhere") == ""  # it is not sent to the monitor of another suite
    (tmp_path / "elsewhere").write_text(OTHER + "\n")
    monkeypatch.setenv("POLYPHASE_CLUSTER_TOKEN_FILE", str(tmp_path / "elsewhere"))
    assert operate.token(tmp_path, "http://monitor") == OTHER
    monkeypatch.setenv("POLYPHASE_CLUSTER_TOKEN", TOKEN)
    assert operate.token(tmp_path, "http://anywhere") == TOKEN
    monkeypatch.setenv("POLYPHASE_CLUSTER_TOKEN", "tiny")
    with pytest.raises(InvalidRequest, match="POLYPHASE_CLUSTER_TOKEN: a cluster token is"):
        operate.token(tmp_path, "http://anywhere")
    monkeypatch.delenv("POLYPHASE_CLUSTER_TOKEN")
    monkeypatch.setenv("POLYPHASE_CLUSTER_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(InvalidRequest, match=r"none: cannot be read: No such file"):
        cluster_keys.token_of_environment()


def test_a_containers_process_gets_the_volumes_token_unless_it_has_its_own() -> None:
    found = token_environment({"POLYPHASE_MONITOR_CLUSTER_TOKEN": TOKEN, "POLYPHASE_WORKER_CLUSTER_TOKEN_FILE": "/x"})
    assert "POLYPHASE_MONITOR_CLUSTER_TOKEN_FILE" not in found
    assert "POLYPHASE_WORKER_CLUSTER_TOKEN_FILE" not in found
    assert found["POLYPHASE_PLANNER_CLUSTER_TOKEN_FILE"] == str(TOKEN_FILE)


def test_writing_a_secret_does_not_follow_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (tmp_path / f"cluster-token.{os.getpid()}").symlink_to(target)
    cluster_keys.write_secret(tmp_path / "cluster-token", TOKEN)
    assert not target.exists()
    assert read_token(tmp_path / "cluster-token") == TOKEN


async def test_strangers_neither_send_to_the_suite_nor_receive_from_it(tmp_path: Path) -> None:
    """Heartbeats of a false instance, broadcasts of a false monitor, and a stranger that subscribes to broadcasts."""
    cluster_keys.keep_curve_key(cluster(), tmp_path)
    worker = next(spec.settings for spec in make_plan(cluster(), tmp_path).processes if spec.name == "d")
    assert worker is not None
    heartbeats, broadcasts, false_broadcasts = free_address(), free_address(), free_address()
    received: dict[str, list[float]] = {"heartbeats": [], "broadcasts": [], "overheard": [], "false": []}

    def feed(stack: ExitStack, sockets: Sockets, address: str, into: str) -> None:
        def add(delta: ClusterDelta) -> bool:
            received[into].append(delta.time_s)
            return True

        stack.enter_context(closing(ClusterFeed(sockets, address, add)))

    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(closing(sockets)) for sockets in (Sockets.from_settings(worker), Sockets()))
        stack.enter_context(closing(Subscriber(ours, heartbeats, int, received["heartbeats"].append)))
        senders = [stack.enter_context(closing(Publisher(sockets, heartbeats))) for sockets in (ours, theirs)]
        monitors = [
            stack.enter_context(closing(ClusterPublisher(sockets, address)))
            for sockets, address in ((ours, broadcasts), (theirs, false_broadcasts))
        ]
        feed(stack, ours, broadcasts, "broadcasts")
        feed(stack, theirs, broadcasts, "overheard")
        feed(stack, ours, false_broadcasts, "false")
        async with asyncio.timeout(20):
            while len(received["heartbeats"]) < 50 or len(received["broadcasts"]) < 50:
                for number, sender in enumerate(senders):
                    sender.publish(number)
                for monitor in monitors:
                    monitor.whole(ClusterDelta(1, 1.0, whole=True))
                    monitor.change(ClusterDelta(2 + len(received["broadcasts"]), 1.0))
                await asyncio.sleep(0.01)
    assert set(received["heartbeats"]) == {0}
    assert not received["overheard"]
    assert not received["false"]
