"""What a worker's settings refuse, and what follows from them."""

import os
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from services.cluster_monitor.edge import Kv
from services.worker.__main__ import _prepare_environment
from services.worker.settings import WorkerSettings


def settings(**changes: Any) -> WorkerSettings:
    values = {
        "instance_id": "p0",
        "model": "org/m",
        "rpc_port": 7000,
        "http_port": 7001,
        "kv_port": 7002,
        "monitor_url": "",
        "heartbeat_address": "",
        "broadcast_address": "",
    }
    return WorkerSettings(**{**values, **changes})


def test_each_rank_of_each_stage_has_a_port() -> None:
    made = settings(tensor_parallel=2, pipeline_parallel=3)
    assert made.ranks == 6
    assert made.kv_endpoints == tuple(f"kv://127.0.0.1:{7002 + rank}" for rank in range(6))


def test_the_transport_is_the_scheme_of_the_kv_addresses() -> None:
    assert settings(kv_transport="tcp").kv_endpoints == ("kv://127.0.0.1:7002",)
    assert settings(kv_transport="nixl").kv_endpoints == ("nixl://127.0.0.1:7002",)


def test_the_monitor_registers_the_addresses_of_every_transport() -> None:
    for transport in get_args(WorkerSettings.model_fields["kv_transport"].annotation):
        TypeAdapter(list[Kv]).validate_python(list(settings(kv_transport=transport).kv_endpoints))


@pytest.mark.parametrize("degree", ["tensor_parallel", "pipeline_parallel", "threads"])
def test_one_rank_of_one_thread_computes_in_the_engines_thread(degree: str) -> None:
    assert settings().computes_here
    assert not settings(**{degree: 2}).computes_here


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"engine_args": {"pipeline_parallel_size": 2}}, "it is a setting of its own, `pipeline_parallel`"),
        ({"engine_args": {"async_scheduling": True}}, "it is a setting of its own, `async_scheduling`"),
        ({"engine_args": {"data_parallel_size": 2}}, "it is a setting of its own, `data_parallel`"),
        ({"data_parallel": 2, "data_parallel_rank": 2}, "data_parallel_rank: 2: must be below the 2"),
        ({"pipeline_layers": [3, 1]}, "pipeline_layers: 2 stages, not the 1 of `pipeline_parallel`"),
        ({"pipeline_parallel": 3, "pipeline_layers": [3, 1]}, "pipeline_layers: 2 stages, not the 3"),
        ({"pipeline_parallel": 2, "pipeline_layers": [4, 0]}, "greater than 0"),
        ({"pipeline_parallel": 0}, "greater than 0"),
        ({"kv_transport": "zeromq"}, "KV over ZeroMQ was removed: use `tcp`"),
    ],
)
def test_engines_that_make_no_sense_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        settings(**changes)


@pytest.mark.parametrize("more", [{"emulated_prefix_cache": False}, {"pipeline_parallel": 2}])
def test_an_emulated_engine_without_a_prefix_cache_has_no_host_tier(more: dict[str, Any]) -> None:
    assert settings(engine="emulated", host_kv_bytes=1 << 30).host_kv_bytes == 1 << 30
    with pytest.raises(ValidationError, match="host_kv_bytes: this emulated engine has no prefix cache"):
        settings(engine="emulated", host_kv_bytes=1 << 30, **more)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"disk_kv_bytes": 1, "disk_kv_folder": "/d"}, "disk_kv_bytes: the disk gets .*: set `host_kv_bytes`, too"),
        ({"disk_kv_bytes": 1, "host_kv_bytes": 1}, "disk_kv_bytes: set `disk_kv_folder`, too"),
        ({"disk_kv_folder": "/d", "host_kv_bytes": 1}, "disk_kv_folder: nothing is kept there"),
        (
            {"disk_kv_bytes": 1, "disk_kv_folder": "d", "host_kv_bytes": 1},
            "disk_kv_folder: 'd' must be an absolute path",
        ),
    ],
)
def test_a_disk_tier_needs_a_folder_and_a_host_tier(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        settings(**changes)
    assert settings(disk_kv_bytes=1, disk_kv_folder="/d", host_kv_bytes=1).disk_kv_folder == "/d"


def test_an_emulated_engine_may_have_a_pipeline() -> None:
    assert settings(engine="emulated", pipeline_parallel=2).pipeline_parallel == 2


def test_settings_come_back_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings(pipeline_parallel=2, pipeline_layers=(3, 1))
    for key, value in given.to_environment().items():
        monkeypatch.setenv(key, value)
    assert WorkerSettings.load() == given


def test_the_engine_is_told_which_stage_has_which_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("VLLM_PP_LAYER_PARTITION", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    _prepare_environment(settings(pipeline_parallel=2))
    assert "VLLM_PP_LAYER_PARTITION" not in os.environ
    _prepare_environment(settings(pipeline_parallel=2, pipeline_layers=(3, 1)))
    assert os.environ["VLLM_PP_LAYER_PARTITION"] == "3,1"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
