"""From a cluster file to manifests: the same processes as those of `polyphase up`, which find one another."""

import re
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from gateway.settings import GatewaySettings
from predictor.settings import PredictorSettings
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.settings import SchedulerSettings
from services.launcher.cli import app
from services.launcher.render.manifests import as_text, write
from services.launcher.render.options import RenderOptions
from services.planner.settings import PlannerSettings
from services.worker.settings import WorkerSettings
from shared.errors import InvalidRequest
from shared.runtime.settings import ServiceSettings
from tests.services.launcher.render.rendering import (
    SECRET,
    TOKEN,
    UNLIKE,
    container,
    environment,
    hosts,
    of_kind,
    pod,
    rendered,
    shipped,
    unlike,
    workloads,
)

KINDS: dict[str, type[ServiceSettings]] = {
    "monitor": MonitorSettings,
    "scheduler": SchedulerSettings,
    "gateway": GatewaySettings,
    "predictor": PredictorSettings,
    "planner": PlannerSettings,
    "a100": WorkerSettings,
    "mi300x": WorkerSettings,
    "ascend": WorkerSettings,
    "cpu": WorkerSettings,
}


def load(name: str, monkeypatch: pytest.MonkeyPatch, ordinal: int = 0, **options: Any) -> Any:
    for key, value in environment(rendered(**options), name, ordinal).items():
        monkeypatch.setenv(key, value)
    return KINDS[name].load()


def test_all_processes_of_the_file_are_there() -> None:
    counts = {name: each["spec"]["replicas"] for name, each in workloads(rendered()).items()}
    control = {"monitor": 1, "scheduler": 2, "gateway": 3, "predictor": 2, "planner": 1, "dashboard": 1}
    assert counts == {**control, "a100": 3, "mi300x": 1, "ascend": 1, "cpu": 2}


@pytest.mark.parametrize("name", KINDS)
def test_each_process_accepts_its_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(name, monkeypatch)
    assert settings.curve_public
    assert settings.curve_secret == SECRET
    assert container(rendered(), name)["command"][:3] == ["python3", "-P", "-m"]


@pytest.mark.parametrize(
    ("name", "ordinal", "expected"),
    [
        ("a100", 0, {"tensor_parallel": 4, "instance_id": "a100-0", "host": "0.0.0.0", "advertise_host": "10.1.2.3"}),
        ("a100", 2, {"instance_id": "a100-2"}),
        ("mi300x", 0, {"instance_id": "mi300x"}),  # as the file has it, without an index
        ("cpu", 0, {"threads": 2}),
        ("scheduler", 1, {"scheduler_id": "scheduler-1"}),
        ("gateway", 2, {"gateway_id": "gateway-2"}),
    ],
)
def test_settings_of_the_file_and_names_of_pods_reach_the_processes(
    name: str, ordinal: int, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load(name, monkeypatch, ordinal)
    assert {key: getattr(settings, key) for key in expected} == expected


def test_an_instance_has_the_ports_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load("a100", monkeypatch)
    assert settings.address(settings.rpc_port) == f"tcp://10.1.2.3:{settings.rpc_port}"
    ports = {port["containerPort"] for port in container(rendered(), "a100")["ports"]}
    assert ports == {settings.http_port, settings.rpc_port, *(settings.kv_port + rank for rank in range(4))}


@pytest.mark.parametrize("source", ["unlike", "laptop", "emulated-mixed"])
def test_each_address_is_that_of_a_process(source: str) -> None:
    objects = rendered(None if source == "unlike" else shipped(source))
    known = hosts(objects)
    count = 0
    for name in workloads(objects):
        own = {port["containerPort"] for port in container(objects, name)["ports"]}
        for key, value in environment(objects, name).items():
            if not key.startswith("POLYPHASE_"):
                continue
            for host, port in re.findall(r"([\w.-]+):(\d{4,5})\b", value):
                count += 1
                assert int(port) in (own if host == "0.0.0.0" else known[host]), (name, key, value)
    assert count > 20
    assert "127.0.0.1" not in as_text(objects.objects).replace("X: 127.0.0.1:1\n", "")


def test_gateways_know_every_scheduler_and_the_dashboard_every_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = load("gateway", monkeypatch)
    assert gateway.slo["gold"].ttft_s == 1.0
    hosts = [each.partition(":20")[0] for each in gateway.schedulers]
    assert hosts == ["tcp://scheduler-0.scheduler", "tcp://scheduler-1.scheduler"]
    urls = yaml.safe_load(environment(rendered(), "dashboard")["POLYPHASE_DASHBOARD_GATEWAY_URLS"])
    assert urls == [f"http://gateway-{index}.gateway-pods:9000" for index in range(3)]
    assert "0.0.0.0" in container(rendered(), "dashboard")["command"]


def test_manifests_contain_nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN_OF_MINE", "of-this-machine")
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    text = as_text(rendered(shipped("laptop")).objects)
    assert "of-this-machine" not in text
    assert "OMP_NUM_THREADS" not in text
    assert str(Path(__file__).parents[4]) not in text
    assert "/app/models/demo" in text


SECRET_KEYS = ["cluster-token", "curve-public", "curve-secret", "database-url", "hf-token", "keys.yaml", "mi300x-x"]


def test_manifests_name_secrets_and_do_not_contain_them() -> None:
    text = as_text(rendered().objects)
    assert not any(secret in text for secret in (SECRET, TOKEN, "pass-word", "hf-in-clear"))
    assert not of_kind(rendered(), "Secret")
    assert rendered().secret_keys == SECRET_KEYS


@pytest.mark.parametrize(
    ("key", "users"),
    [
        ("database-url", {"monitor", "scheduler", "planner"}),
        ("keys.yaml", {"gateway", "dashboard"}),
        ("hf-token", {"mi300x"}),
        ("cluster-token", set(workloads(rendered())) - {"gateway"}),
    ],
)
def test_pods_have_only_the_secrets_that_they_use(key: str, users: set[str]) -> None:
    assert {name for name in workloads(rendered()) if f"'key': '{key}'" in str(pod(rendered(), name))} == users


PLANTED = {
    "AWS_SECRET_ACCESS_KEY": "planted-1",
    "AWS_ACCESS_KEY_ID": "planted-2",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=planted-3",
    "HTTPS_PROXY": "http://user:planted-4@proxy:3128",
    "HF_ENDPOINT": "https://planted-5@mirror/hf",
    "GOOGLE_APPLICATION_CREDENTIALS_JSON": "planted-6",
    "SOMETHING_UNHEARD_OF": "planted-7",
    "VLLM_API_KEY": "planted-8",
    "HF_TOKEN": "planted-9",
    "DB_PASSWD": "planted-10",
    "POLYPHASE_WORKER_ENGINE_ARGS": '{"hf_token": "planted-11"}',
    "POLYPHASE_WORKER_MODEL": "https://user:planted-12@mirror/model",
}
HARMLESS = {"CUDA_VISIBLE_DEVICES": "harmless-1", "NCCL_DEBUG": "harmless-2", "HF_HOME": "/harmless-3"}
HARMLESS |= {"MINE": "harmless-4"}  # as an option says


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    file = tmp_path / "keys.yaml"
    file.write_text("- {name: a}\n")
    return str(file)


def test_secret_variables_are_in_the_secret_and_harmless_ones_are_plain(keys_file: str) -> None:
    first, *others = UNLIKE["instances"]
    parts: dict[str, Any] = {part: {"env": PLANTED} for part in ("scheduler", "monitor", "planner", "predictor")}
    parts["gateway"] = {"env": PLANTED, "api_keys_file": keys_file}
    cluster = unlike(instances=[{**first, "env": {**PLANTED, **HARMLESS}}, *others[1:]], **parts)
    objects = rendered(cluster, with_secrets=True, plain=("MINE",))
    values = of_kind(objects, "Secret")["polyphase"]["stringData"]
    shown = as_text([each for each in objects.objects if each["kind"] != "Secret"])
    assert "planted-" not in shown
    assert all(value in shown for value in HARMLESS.values())
    variables = {each["name"]: each.get("valueFrom", {}) for each in container(objects, "a100")["env"]}
    for name, value in PLANTED.items():
        assert values[variables[name]["secretKeyRef"]["key"]] == value


def test_the_secret_has_the_values_of_the_file(keys_file: str) -> None:
    cluster = unlike(gateway={"api_keys_file": keys_file})
    values = of_kind(rendered(cluster, with_secrets=True), "Secret")["polyphase"]["stringData"]
    expected = {
        "curve-secret": SECRET,
        "database-url": "postgresql://us:pass-word@db/polyphase",
        "keys.yaml": "- {name: a}\n",
        "hf-token": "hf-in-clear",
        "cluster-token": TOKEN,
    }
    assert expected.items() <= values.items()


def test_a_secret_of_all_groups_has_one_value() -> None:
    first, second, *others = UNLIKE["instances"]
    both = [{**first, "env": {"HF_TOKEN": "a"}}, {**second, "env": {"HF_TOKEN": "b"}}]
    with pytest.raises(InvalidRequest, match="one hf-token for all"):
        rendered(unlike(instances=[*both, *others]), with_secrets=True)


def test_values_that_the_secret_lacks_are_named() -> None:
    with pytest.raises(InvalidRequest) as error:
        rendered(shipped("laptop"), with_secrets=True)
    for needed in ("polyphase keys curve", "polyphase keys token", "database_url: postgresql://", "polyphase keys add"):
        assert needed in str(error.value)


def test_a_rendered_database_has_a_password_and_its_clients_the_url() -> None:
    objects = rendered(postgres={"enabled": True})
    found = environment(objects, "monitor")
    assert found["POLYPHASE_MONITOR_DATABASE_URL"] == "postgresql://polyphase@postgres/polyphase"
    assert "PGPASSWORD" in found
    migrate = pod(objects, "monitor")["initContainers"][0]
    assert {each["name"] for each in migrate["env"]} == {"POLYPHASE_DATABASE_URL", "PGPASSWORD"}
    assert "postgres" in of_kind(objects, "StatefulSet")
    assert "postgres-password" in objects.secret_keys


@pytest.mark.parametrize("name", ["monitor", "scheduler", "planner"])
def test_the_schema_is_upgraded_before_a_process_writes(name: str) -> None:
    migrate = pod(rendered(), name)["initContainers"][0]
    assert migrate["command"][:2] == ["polyphase", "migrate"]
    assert migrate["env"][0]["valueFrom"]["secretKeyRef"]["key"] == "database-url"
    assert "initContainers" not in pod(rendered(), "gateway")


EMULATED = {"engine": "emulated", "accelerator": "A10"}


def alone(**fields: Any) -> dict[str, Any]:
    return {"instances": [{"id": "x", "role": "prefill", **fields}]}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model": "/some/where/model"}, "file.yaml: model: /some/where/model is a folder of this machine"),
        (
            {**alone(), "lora": {"adapters": {"sql": "/models/sql", "poems": "/home/me/poems"}}},
            "file.yaml: lora.adapters.poems: /home/me/poems is a folder of this machine",
        ),
        (
            alone(weights="/home/me/int8"),
            "file.yaml: instances.x.weights: /home/me/int8 is a folder of this machine: name it as pods find it",
        ),
        (alone(id="Big"), "id 'Big': Kubernetes allows"),
        (alone(id="gateway"), "'gateway' is the name of another part"),
        (alone(id="worker"), "'worker' is the name of another part"),
        (alone(accelerator="GTX"), "instances.x.accelerator: "),
        (
            alone(pipeline_parallel=2, stage_accelerators=["A10", "A40"]),
            "instances.x.stage_accelerators: a pod runs on one node",
        ),
        (alone(data_parallel=2), "instances.x.data_parallel: the ranks of an instance are on one host"),
        (alone(rates_file="/tmp/rates"), "WORKER_RATES_FILE: /tmp/rates is on this machine only"),
        ({"predictor": {"checkpoint": "/home/me/lengths"}}, "CHECKPOINT: /home/me/lengths is on this machine"),
        ({"predictor": {"beside": "prefill"}}, "predictor.beside: pods have no predictor beside an instance"),
        (  # all pods of a StatefulSet have the same environment
            {
                "network": {"between": {"gbps": 10}},
                "instances": [
                    {"id": "p", "count": 2, "role": "prefill", **EMULATED, "node": "n0"},
                    {"id": "d", "role": "decode", **EMULATED, "node": "n1"},
                ],
            },
            "EMULATED_LINKS differs from that of p-0",
        ),
    ],
)
def test_parts_that_pods_cannot_have_are_named(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(error)):
        rendered(unlike(**changes))


def test_a_model_may_be_named_as_pods_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("cpu", monkeypatch, model="/models/mine").model == "/models/mine"


def test_written_to_a_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.yaml").write_text("mine")
    write(rendered(), tmp_path)
    assert (tmp_path / "60-a100.yaml").exists()
    write(rendered(shipped("laptop")), tmp_path)
    assert not (tmp_path / "60-a100.yaml").exists()  # what is no more is not applied either
    assert (tmp_path / "60-prefill-0.yaml").exists()
    assert (tmp_path / "notes.yaml").read_text() == "mine"


def test_the_command(tmp_path: Path, keys_file: str) -> None:
    result = CliRunner().invoke(app, ["render", "kubernetes", "laptop", "--namespace", "mine", "--image", "r/p:1"])
    assert result.exit_code == 0, result.output
    objects = [each for each in yaml.safe_load_all(result.stdout) if each]
    assert {each["metadata"].get("namespace", "mine") for each in objects} == {"mine"}
    assert "r/p:1" in result.stdout
    assert "create secret generic polyphase" in result.stderr
    keys = ("name", "model", "curve_public", "curve_secret", "cluster_token", "database_url")
    content = {**{key: UNLIKE[key] for key in keys}, **alone(), "gateway": {"api_keys_file": keys_file}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(content))
    words = [str(tmp_path / "c.yaml"), "--with-secrets", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["render", "kubernetes", *words])
    assert result.exit_code == 0, result.output
    assert stat.S_IMODE((tmp_path / "out" / "10-secret.yaml").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("namespace: Mine", "namespace"),
        ("nonsense: 1", "nonsense: unknown key"),
        ("[1]", "expected a mapping"),
        ("images: {NVIDIA: [", "options.yaml"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, text: str, error: str) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=re.escape(error)):
        RenderOptions.read(file)
