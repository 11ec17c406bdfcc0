"""API keys, the cluster token and CurveZMQ keys: files, environments and who gets them."""

import asyncio
import os
import stat
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from gateway.auth import KeyRing, load_keys
from gateway.settings import GatewaySettings
from services.launcher import cluster_keys, operate, state_file
from services.launcher.cluster_file import Cluster
from services.launcher.cluster_keys import add_key, curve_pair, init_database, init_folder
from services.launcher.container import TOKEN_FILE, read_environment, token_environment
from services.launcher.plan import make_plan
from services.launcher.state_file import SuiteState
from shared.domain.cluster import ClusterDelta
from shared.errors import Conflict, InvalidRequest, NotConnected
from shared.runtime.keys import read_pair, read_token
from shared.wire.broadcast import ClusterFeed, ClusterPublisher, Publisher, Subscriber
from shared.wire.messages import DRAIN, DrainReply, DrainRequest
from shared.wire.rpc_client import RpcClient
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Curve, Sockets
from tests.ports import free_address


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


TOKEN = "a-secret-of-the-cluster"
OTHER = "a-secret-of-another-one"


def cluster(**changes: Any) -> Cluster:
    instance = {"id": "p", "role": "prefill", "engine": "emulated"}
    return Cluster.model_validate({"name": "c", "model": "demo", "instances": [instance], **changes})


def suite(folder: Path) -> None:
    me = psutil.Process()
    urls = ("http://api", "http://monitor", ("http://scheduler",), "", "")
    state_file.write(folder, SuiteState(me.pid, me.create_time(), "m", *urls, (), (), planner_url="http://planner"))


def test_one_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    cluster_keys.keep_token(cluster(), tmp_path / "data")
    file = tmp_path / "data" / "cluster-token"
    first = read_token(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    cluster_keys.keep_token(cluster(), tmp_path / "data")
    assert cluster_keys.kept_token(tmp_path / "data") == first
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    cluster_keys.keep_token(cluster(), tmp_path / "other")
    assert cluster_keys.kept_token(tmp_path / "other") != first


def test_the_cluster_files_own_stands(tmp_path: Path) -> None:
    cluster_keys.keep_token(cluster(), tmp_path)
    named = cluster(cluster_token=TOKEN)
    cluster_keys.keep_token(named, tmp_path)
    assert cluster_keys.kept_token(tmp_path) == TOKEN
    assert TOKEN not in repr(named)


def test_a_file_that_has_none_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "cluster-token").write_text("short\n")
    with pytest.raises(InvalidRequest, match="cluster-token: a cluster token is 16 to 512") as refused:
        cluster_keys.keep_token(cluster(), tmp_path)
    assert "short" not in refused.value.message


def test_processes_are_told_of_the_file_and_the_secret_is_in_no_environment(tmp_path: Path) -> None:
    named = cluster(cluster_token=TOKEN)
    cluster_keys.keep_token(named, tmp_path)
    plan = make_plan(named, tmp_path)
    for process in plan.processes:
        assert TOKEN not in repr(process)
        said = {key for key in process.env if key.endswith("CLUSTER_TOKEN_FILE")}
        assert len(said) == (0 if isinstance(process.settings, GatewaySettings) else 1), process.name
        if process.settings is not None and said:
            assert process.settings.token() == TOKEN


def test_the_environment_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite(tmp_path)
    cluster_keys.keep_token(cluster(cluster_token=TOKEN), tmp_path)
    assert operate.token(tmp_path, "http://monitor") == TOKEN
    (tmp_path / "elsewhere").write_text(OTHER + "\n")
    monkeypatch.setenv("POLYPHASE_CLUSTER_TOKEN_FILE", str(tmp_path / "elsewhere"))
    assert operate.token(tmp_path, "http://monitor") == OTHER
    monkeypatch.setenv("POLYPHASE_CLUSTER_TOKEN", TOKEN)
    assert operate.token(tmp_path, "http://anywhere") == TOKEN
    monkeypatch.setenv("POLYPHASE_CLUSTER_TOKEN", "tiny")
    with pytest.raises(InvalidRequest, match="POLYPHASE_CLUSTER_TOKEN: a cluster token is"):
        operate.token(tmp_path, "http://anywhere")


def test_a_strangers_monitor_is_not_shown_it(tmp_path: Path) -> None:
    cluster_keys.keep_token(cluster(cluster_token=TOKEN), tmp_path)
    assert operate.token(tmp_path, "http://monitor") == ""  # nothing runs there
    suite(tmp_path)
    assert operate.token(tmp_path, "http://planner") == TOKEN
    assert operate.token(tmp_path, "http://elsewhere") == ""


def test_a_file_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYPHASE_CLUSTER_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(InvalidRequest, match=r"none: cannot be read: No such file"):
        cluster_keys.token_of_environment()


def test_a_containers_process_is_told_of_the_volumes_but_for_its_own() -> None:
    found = token_environment({"POLYPHASE_MONITOR_CLUSTER_TOKEN": TOKEN, "POLYPHASE_WORKER_CLUSTER_TOKEN_FILE": "/x"})
    assert "POLYPHASE_MONITOR_CLUSTER_TOKEN_FILE" not in found
    assert "POLYPHASE_WORKER_CLUSTER_TOKEN_FILE" not in found
    assert found["POLYPHASE_PLANNER_CLUSTER_TOKEN_FILE"] == str(TOKEN_FILE)


def test_writing_does_not_follow_what_lies_in_its_way(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (tmp_path / f"cluster-token.{os.getpid()}").symlink_to(target)
    cluster_keys.write_secret(tmp_path / "cluster-token", TOKEN)
    assert not target.exists()
    assert read_token(tmp_path / "cluster-token") == TOKEN


def two_instances(**changes: Any) -> Cluster:
    instances = [{"id": "p", "role": "prefill", "engine": "emulated"}, {"id": "d", "role": "decode"}]
    return Cluster.model_validate({"name": "one host", "model": "m", "instances": instances, **changes})


def test_a_key_is_made_once_and_its_owner_alone_can_read_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    cluster_keys.keep_curve_key(two_instances(), data)
    file = cluster_keys.curve_key_file(data)
    made = file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    cluster_keys.keep_curve_key(two_instances(), data)
    assert file.read_text() == made
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_with_a_pair_in_the_cluster_file_there_is_no_other_key(tmp_path: Path) -> None:
    cluster_keys.keep_curve_key(two_instances(**curve_pair()), tmp_path)
    assert not cluster_keys.curve_key_file(tmp_path).exists()
    plan = make_plan(two_instances(**curve_pair()), tmp_path)
    assert not any(spec.settings.curve_file for spec in plan.processes if spec.settings)


def test_a_file_that_is_no_key_is_named(tmp_path: Path) -> None:
    cluster_keys.curve_key_file(tmp_path).write_text("short\n")
    with pytest.raises(InvalidRequest, match=r"curve-key cannot be used: .*remove it"):
        cluster_keys.keep_curve_key(two_instances(), tmp_path)
    with pytest.raises(InvalidRequest, match="No such file"):
        read_pair(tmp_path / "missing")


def test_every_process_gets_the_key_and_its_environment_the_path_alone(tmp_path: Path) -> None:
    cluster_keys.keep_curve_key(two_instances(), tmp_path)
    secret = cluster_keys.curve_key_file(tmp_path).read_text().strip()
    for spec in make_plan(two_instances(), tmp_path).processes:
        if spec.settings is not None:
            assert spec.settings.curve_pair() == read_pair(cluster_keys.curve_key_file(tmp_path))
        assert not any(secret in value for value in spec.env.values())


@asynccontextmanager
async def suite_and_stranger(folder: Path) -> AsyncIterator[tuple[Sockets, Sockets]]:
    cluster_keys.keep_curve_key(two_instances(), folder)
    worker = next(spec.settings for spec in make_plan(two_instances(), folder).processes if spec.name == "d")
    assert worker is not None
    ours, theirs = Sockets.from_settings(worker), Sockets()
    try:
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()


async def test_a_process_without_the_key_cannot_drain(tmp_path: Path) -> None:
    drained: list[DrainRequest] = []

    async def drain(request: DrainRequest, _: ServerCall) -> DrainReply:
        drained.append(request)
        return DrainReply(True, 0.0, 0)

    async with suite_and_stranger(tmp_path) as (ours, theirs):
        address = free_address()
        async with RpcServer(ours, address, {DRAIN: drain}):
            stranger, friend = RpcClient(theirs, address), RpcClient(ours, address)
            try:
                with pytest.raises(NotConnected):
                    await stranger.call(DRAIN, DrainRequest(1.0), timeout_s=20)
                assert not drained
                await friend.call(DRAIN, DrainRequest(1.0), timeout_s=20)
                assert len(drained) == 1
            finally:
                stranger.close()
                friend.close()


async def test_a_process_without_the_key_is_not_heard_and_hears_nothing(tmp_path: Path) -> None:
    """Heartbeats to a monitor, and broadcasts of one: instances obey neither, nor does a stranger get them."""
    async with suite_and_stranger(tmp_path) as (ours, theirs):
        heartbeats, broadcasts = free_address(), free_address()
        beats: list[int] = []
        heard: list[float] = []
        overheard: list[float] = []
        subscriber = Subscriber(ours, heartbeats, int, beats.append)
        publishers = Publisher(ours, heartbeats), Publisher(theirs, heartbeats)
        monitor = ClusterPublisher(ours, broadcasts)
        feeds = [
            ClusterFeed(sockets, broadcasts, lambda delta, into=into: not into.append(delta.time_s))  # type: ignore[misc]
            for sockets, into in ((ours, heard), (theirs, overheard))
        ]
        try:
            async with asyncio.timeout(20):
                while len(beats) < 50 or len(heard) < 50:
                    for number, publisher in enumerate(publishers):
                        publisher.publish(number)
                    monitor.whole(ClusterDelta(1, 1.0, whole=True))
                    monitor.change(ClusterDelta(2 + len(heard), 1.0))
                    await asyncio.sleep(0.01)
            assert set(beats) == {0}
            assert not overheard
        finally:
            subscriber.close()
            monitor.close()
            for publisher in publishers:
                publisher.close()
            for feed in feeds:
                feed.close()


async def test_a_false_monitor_is_not_obeyed(tmp_path: Path) -> None:
    """Where a stranger listens in the place of the monitor, the suite's processes do not connect to it."""
    async with suite_and_stranger(tmp_path) as (ours, theirs):
        address, listening = free_address(), free_address()
        obeyed: list[float] = []
        false = ClusterPublisher(theirs, address)
        true = ClusterPublisher(ours, listening)
        heard: list[float] = []
        feeds = [
            ClusterFeed(ours, where, lambda delta, into=into: not into.append(delta.time_s))  # type: ignore[misc]
            for where, into in ((address, obeyed), (listening, heard))
        ]
        try:
            async with asyncio.timeout(20):
                while len(heard) < 50:
                    for each in (false, true):
                        each.whole(ClusterDelta(1, 1.0, whole=True))
                        each.change(ClusterDelta(2 + len(heard), 1.0))
                    await asyncio.sleep(0.01)
            assert not obeyed
        finally:
            false.close()
            true.close()
            for feed in feeds:
                feed.close()
