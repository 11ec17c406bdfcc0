"""Where the launcher keeps the cluster's secret, who is given it, and to whom the command shows it."""

import os
import stat
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway.settings import GatewaySettings
from services.launcher import cluster_keys, operate, state_file
from services.launcher.cluster_file import Cluster
from services.launcher.container import TOKEN_FILE, token_environment
from services.launcher.plan import make_plan
from services.launcher.state_file import SuiteState
from shared.errors import InvalidRequest
from shared.runtime.keys import read_token

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
