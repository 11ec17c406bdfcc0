"""compose.yaml: each service's environment is one that its process accepts; who has which keys; how a service ends."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import GatewaySettings
from predictor.settings import PredictorSettings
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.settings import SchedulerSettings
from services.launcher.container import name_container
from services.planner.settings import PlannerSettings
from services.worker.settings import WorkerSettings
from shared.cost.catalogue import Catalogue
from shared.runtime.settings import ServiceSettings

FILE = Path(__file__).parents[1] / "compose.yaml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())["services"]
NVIDIA, ROCM = [f"gpu-{index}" for index in range(8)], [f"rocm-{index}" for index in range(8)]
GPUS = [*NVIDIA, *ROCM]
SETTINGS: dict[str, type[ServiceSettings]] = {
    "monitor": MonitorSettings,
    "scheduler": SchedulerSettings,
    "predictor": PredictorSettings,
    "planner": PlannerSettings,
    "prefill": WorkerSettings,
    "decode": WorkerSettings,
    "gateway": GatewaySettings,
    **dict.fromkeys(GPUS, WorkerSettings),
}
OURS = [name for name in SERVICES if name in SETTINGS or name in ("keys", "migrate", "dashboard")]


def environment(name: str) -> dict[str, str]:
    found = SERVICES[name].get("environment", {})
    return {key: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value)) for key, value in found.items()}


def mounts(name: str) -> set[str]:
    return {each.partition(":")[0] for each in SERVICES[name].get("volumes", [])}


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = environment(name)
    name_container(found, "localhost")  # as the containers' entry does
    for key, value in found.items():
        monkeypatch.setenv(key, value)
    return SETTINGS[name].load()


@pytest.mark.parametrize("name", SETTINGS)
def test_the_process_accepts_its_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(name, monkeypatch)
    assert any(volume.startswith("keys:/keys") for volume in SERVICES[name]["volumes"])


def test_who_asks_the_predictor_finds_it() -> None:
    port = environment("predictor")["POLYPHASE_PREDICTOR_RPC_ADDRESS"].rpartition(":")[2]
    assert json.loads(environment("gateway")["POLYPHASE_GATEWAY_PREDICTORS"]) == [f"tcp://predictor:{port}"]
    port = environment("predictor")["POLYPHASE_PREDICTOR_PORT"]
    assert json.loads(environment("scheduler")["POLYPHASE_SCHEDULER_PREDICTOR_URLS"]) == [f"http://predictor:{port}"]


def test_secrets_are_where_they_are_used_and_nowhere_else() -> None:
    assert {name for name in SERVICES if "api-keys" in mounts(name)} == {"keys", "gateway", "dashboard"}
    writers = {"monitor", "scheduler", "planner"}
    assert {name for name in SERVICES if "database-keys" in mounts(name)} == {"keys", "postgres", "migrate", *writers}
    assert {name for name in OURS if "keys" not in mounts(name)} <= {"migrate", "dashboard"}
    for name in SERVICES:
        assert all(volume.endswith(":ro") for volume in SERVICES[name].get("volumes", []) if "keys:" in volume) or (
            name == "keys"
        )
    for name in (*OURS, "postgres"):
        secrets = {key for key in environment(name) if key.endswith(("PASSWORD", "SECRET", "TOKEN"))}
        assert secrets <= {"HF_TOKEN"}


def test_the_token_of_the_hub_is_given_to_those_that_load_the_model() -> None:
    given = {name: environment(name)["HF_TOKEN"] for name in SERVICES if "HF_TOKEN" in environment(name)}
    assert given == dict.fromkeys(("gateway", "predictor", "prefill", "decode", *GPUS), "")


def test_a_database_with_its_schema_comes_before_whoever_writes() -> None:
    for name in ("monitor", "scheduler", "planner"):
        assert SERVICES[name]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"
        assert environment(name)["PGPASSFILE"] == "/database-keys/pgpass"
        (url,) = (value for key, value in environment(name).items() if key.endswith("_DATABASE_URL"))
        assert url == environment("migrate")["POLYPHASE_DATABASE_URL"] == "postgresql://polyphase@postgres/polyphase"
    assert "database" in mounts("postgres")


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_scaled_service_has_ids_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "POLYPHASE_WORKER_INSTANCE_ID" not in environment(name)
    assert not {"container_name", "hostname", "ports"} & set(SERVICES[name])
    assert loaded(name, monkeypatch).instance_id == f"{name}-localhost"


@pytest.mark.parametrize("name", ["scheduler", "gateway"])
def test_scaled_schedulers_and_gateways_have_ids_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not {"container_name", "hostname"} & set(SERVICES[name])
    assert getattr(loaded(name, monkeypatch), f"{name}_id") == f"{name}-localhost"


@pytest.mark.parametrize("name", [*SETTINGS, "dashboard", "postgres"])
def test_a_service_is_bounded_watched_and_started_again(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["logging"] == {"driver": "json-file", "options": {"max-size": "10m", "max-file": "5"}}
    assert service["mem_limit"]
    assert service["healthcheck"]["test"]
    if name != "postgres":
        assert environment(name)["POLYPHASE_HEALTH_URL"]
        assert service["init"] is True


@pytest.mark.parametrize("name", ["gateway", "prefill", "decode", *GPUS])
def test_there_is_time_for_what_has_begun(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drain_s, stop_s = loaded(name, monkeypatch).drain_s, float(environment(name)["POLYPHASE_STOP_S"])
    assert 0 < drain_s < stop_s - 5 < seconds(SERVICES[name]["stop_grace_period"]) - 5


@pytest.mark.parametrize("names", [NVIDIA, ROCM])
def test_each_gpu_has_an_instance_of_its_own(names: list[str]) -> None:
    catalogue, devices = Catalogue.built_in(), []
    for name in names:
        service, variables = SERVICES[name], environment(name)
        accelerator = catalogue.get(variables["POLYPHASE_WORKER_ACCELERATOR"])
        devices += [variables[accelerator.visible_by]]
        assert variables["POLYPHASE_WORKER_INSTANCE_ID"] == name
        assert service["build"]["target"] == "gpu"
        assert service["shm_size"] == "8gb"
    assert devices == [str(index) for index in range(8)]


@pytest.mark.parametrize("name", GPUS)
def test_each_instance_has_its_own_devices_kv_and_degrees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number = name.rpartition("-")[2]
    given = {"DEVICES": "2,3,6,7", "KV_BYTES": "3221225472", "TENSOR_PARALLEL": "2", "PIPELINE_PARALLEL": "2"}
    said = {key: str(value) for key, value in SERVICES[name]["environment"].items()}
    for key, value in given.items():
        assert sum(f"${{POLYPHASE_GPU_{number}_{key}:-" in text for text in said.values()) == 1
        said = {k: re.sub(rf"\$\{{POLYPHASE_GPU_{number}_{key}:-[^}}]*\}}", value, text) for k, text in said.items()}
    assert "2,3,6,7" in (said.get("CUDA_VISIBLE_DEVICES"), said.get("HIP_VISIBLE_DEVICES"))
    for key in ("KV_CACHE_BYTES", "TENSOR_PARALLEL", "PIPELINE_PARALLEL"):
        monkeypatch.setitem(SERVICES[name]["environment"], f"POLYPHASE_WORKER_{key}", said[f"POLYPHASE_WORKER_{key}"])
    made = loaded(name, monkeypatch)
    assert (made.kv_cache_bytes, made.ranks) == (3 << 30, 4)


def test_amds_devices_are_handed_in_and_may_be_opened() -> None:
    for name in NVIDIA:
        (reserved,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
        assert reserved == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        assert "devices" not in SERVICES[name]
    for name in ROCM:
        assert SERVICES[name]["devices"] == ["/dev/kfd", "/dev/dri"]
        assert SERVICES[name]["group_add"][0] == "video"
        assert "rocm" in SERVICES[name]["build"]["args"]["VLLM_IMAGE"]
        assert "deploy" not in SERVICES[name]


@pytest.mark.parametrize(
    ("profile", "instances"), [("cpu", 2), ("gpu", 2), ("gpu4", 4), ("gpu8", 8), ("rocm", 2), ("rocm8", 8)]
)
def test_each_profile_is_a_whole_suite(profile: str, instances: int) -> None:
    chosen = {name for name, service in SERVICES.items() if profile in service["profiles"]}
    assert {"keys", "postgres", "migrate", "monitor", "scheduler", "predictor", "planner"} <= chosen
    assert {"gateway", "dashboard"} <= chosen
    workers = [name for name in chosen if SETTINGS.get(name) is WorkerSettings]
    assert len(workers) == instances
    assert {environment(name)["POLYPHASE_WORKER_ROLE"] for name in workers} == {"prefill", "decode"}


def test_only_the_api_and_the_dashboard_are_published_and_on_loopback() -> None:
    published = {name: SERVICES[name]["ports"] for name in OURS if "ports" in SERVICES[name]}
    assert set(published) == {"gateway", "dashboard"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert "ports" not in SERVICES["postgres"]


@pytest.mark.parametrize("profile", ["cpu", "gpu", "gpu8", "rocm"])
def test_compose_takes_the_file(profile: str) -> None:
    compose = shutil.which("docker-compose")
    words = [compose] if compose else ["docker", "compose"]
    if not compose and (
        not shutil.which("docker") or subprocess.run([*words, "version"], capture_output=True).returncode
    ):
        pytest.skip("neither docker-compose nor `docker compose` is here")
    done = subprocess.run(
        [*words, "--profile", profile, "config", "-q"], cwd=FILE.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
