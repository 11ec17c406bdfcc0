"""From a cluster file to manifests: whoever is started there is who `polyphase up` starts, and finds the others."""

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


def test_everything_of_the_file_is_there() -> None:
    counts = {name: each["spec"]["replicas"] for name, each in workloads(rendered()).items()}
    control = {"monitor": 1, "scheduler": 2, "gateway": 3, "predictor": 2, "planner": 1, "dashboard": 1}
    assert counts == {**control, "a100": 3, "mi300x": 1, "ascend": 1, "cpu": 2}


@pytest.mark.parametrize("name", KINDS)
def test_each_process_accepts_its_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(name, monkeypatch)
    assert settings.curve_public
    assert settings.curve_secret == SECRET
    assert container(rendered(), name)["command"][:3] == ["python3", "-P", "-m"]


def test_what_the_file_says_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("gateway", monkeypatch).slo["gold"].ttft_s == 1.0
    assert load("a100", monkeypatch).tensor_parallel == 4
    assert load("cpu", monkeypatch).threads == 2


def test_each_pod_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [load("a100", monkeypatch, index).instance_id for index in range(3)] == ["a100-0", "a100-1", "a100-2"]
    assert load("mi300x", monkeypatch).instance_id == "mi300x"  # as the file has it
    assert load("scheduler", monkeypatch, 1).scheduler_id == "scheduler-1"
    assert load("gateway", monkeypatch, 2).gateway_id == "gateway-2"


def test_instances_say_where_their_pod_is(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load("a100", monkeypatch)
    assert settings.address(settings.rpc_port) == f"tcp://10.1.2.3:{settings.rpc_port}"
    assert settings.host == "0.0.0.0"
    ports = {port["containerPort"] for port in container(rendered(), "a100")["ports"]}
    assert ports == {settings.http_port, settings.rpc_port, *(settings.kv_port + rank for rank in range(4))}


@pytest.mark.parametrize("source", ["unlike", "laptop", "emulated-mixed"])
def test_every_address_is_somebodys(source: str) -> None:
    objects = rendered(None if source == "unlike" else shipped(source))
    known = hosts(objects)
    asked = 0
    for name in workloads(objects):
        own = {port["containerPort"] for port in container(objects, name)["ports"]}
        for key, value in environment(objects, name).items():
            if not key.startswith("POLYPHASE_"):
                continue
            for host, port in re.findall(r"([\w.-]+):(\d{4,5})\b", value):
                asked += 1
                assert int(port) in (own if host == "0.0.0.0" else known[host]), (name, key, value)
    assert asked > 20
    assert "127.0.0.1" not in as_text(objects.objects).replace("X: 127.0.0.1:1\n", "")


def test_gateways_know_every_scheduler_and_the_dashboard_every_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    schedulers = load("gateway", monkeypatch).schedulers
    assert [each.partition(":20")[0] for each in schedulers] == [
        "tcp://scheduler-0.scheduler",
        "tcp://scheduler-1.scheduler",
    ]
    urls = yaml.safe_load(environment(rendered(), "dashboard")["POLYPHASE_DASHBOARD_GATEWAY_URLS"])
    assert urls == [f"http://gateway-{index}.gateway-pods:9000" for index in range(3)]
    assert "0.0.0.0" in container(rendered(), "dashboard")["command"]


def test_nothing_of_this_machine_is_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN_OF_MINE", "do-not-tell")
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    text = as_text(rendered(shipped("laptop")).objects)
    assert "do-not-tell" not in text
    assert "OMP_NUM_THREADS" not in text
    assert str(Path(__file__).parents[4]) not in text
    assert "/app/models/demo" in text


def test_secrets_are_named_and_not_told() -> None:
    text = as_text(rendered().objects)
    for secret in (SECRET, TOKEN, "pass-word", "hf-in-clear"):
        assert secret not in text
    assert not of_kind(rendered(), "Secret")
    wanted = ["cluster-token", "curve-public", "curve-secret", "database-url", "hf-token", "keys.yaml", "mi300x-x"]
    assert rendered().secret_keys == wanted
    for name in KINDS:
        refs = [
            each["valueFrom"]["secretKeyRef"]
            for each in container(rendered(), name)["env"]
            if "secretKeyRef" in each.get("valueFrom", {})
        ]
        assert refs
        assert all(ref["name"] == "polyphase" and ref["key"] in wanted for ref in refs)


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
HARMLESS = {
    "CUDA_VISIBLE_DEVICES": "harmless-1",
    "NCCL_DEBUG": "harmless-2",
    "HF_HOME": "/harmless-3",
    "MINE": "harmless-4",
}


def test_a_planted_secret_is_in_no_manifest_and_harmless_variables_are_plain(tmp_path: Path) -> None:
    (first, *others) = UNLIKE["instances"]
    parts = {part: {"env": PLANTED} for part in ("gateway", "scheduler", "monitor", "planner", "predictor")}
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: a}\n")
    parts["gateway"]["api_keys_file"] = str(keys)  # type: ignore[assignment]
    cluster = unlike(instances=[{**first, "env": {**PLANTED, **HARMLESS}}, *others[1:]], **parts)
    objects = rendered(cluster, with_secrets=True, plain=("MINE",))
    hidden = [each for each in objects.objects if each["kind"] == "Secret"]
    shown = as_text([each for each in objects.objects if each["kind"] != "Secret"])
    assert "planted-" not in shown
    for value in HARMLESS.values():
        assert value in shown
    for value in PLANTED.values():
        assert value in hidden[0]["stringData"].values()
    variables = {each["name"]: each.get("valueFrom", {}) for each in container(objects, "a100")["env"]}
    for name, value in PLANTED.items():
        assert hidden[0]["stringData"][variables[name]["secretKeyRef"]["key"]] == value


def test_a_secret_that_all_share_has_one_value() -> None:
    first, second, *others = UNLIKE["instances"]
    both = [{**first, "env": {"HF_TOKEN": "a"}}, {**second, "env": {"HF_TOKEN": "b"}}]
    with pytest.raises(InvalidRequest, match="one hf-token for all"):
        rendered(unlike(instances=[*both, *others]), with_secrets=True)


def test_only_who_uses_a_secret_has_it() -> None:
    def has(name: str, key: str) -> bool:
        return f"'key': '{key}'" in str(pod(rendered(), name))

    assert {name for name in workloads(rendered()) if has(name, "database-url")} == {"monitor", "scheduler", "planner"}
    assert {name for name in workloads(rendered()) if has(name, "keys.yaml")} == {"gateway", "dashboard"}
    assert {name for name in workloads(rendered()) if has(name, "hf-token")} == {"mi300x"}
    assert {name for name in workloads(rendered()) if not has(name, "cluster-token")} == {"gateway"}


def test_asked_for_they_are_told(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: a}\n")
    cluster = unlike(gateway={"api_keys_file": str(keys)})
    said = of_kind(rendered(cluster, with_secrets=True), "Secret")["polyphase"]["stringData"]
    assert said["curve-secret"] == SECRET
    assert said["database-url"] == "postgresql://us:pass-word@db/polyphase"
    assert said["keys.yaml"] == "- {name: a}\n"
    assert said["hf-token"] == "hf-in-clear"
    assert said["cluster-token"] == TOKEN


def test_what_the_secret_would_lack_is_named() -> None:
    with pytest.raises(InvalidRequest) as error:
        rendered(shipped("laptop"), with_secrets=True)
    for needed in ("polyphase keys curve", "polyphase keys token", "database_url: postgresql://", "polyphase keys add"):
        assert needed in str(error.value)


def test_a_database_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = rendered(postgres={"enabled": True})
    found = environment(objects, "monitor")
    assert found["POLYPHASE_MONITOR_DATABASE_URL"] == "postgresql://polyphase@postgres/polyphase"
    assert "PGPASSWORD" in found
    migrate = pod(objects, "monitor")["initContainers"][0]
    assert {each["name"] for each in migrate["env"]} == {"POLYPHASE_DATABASE_URL", "PGPASSWORD"}
    assert "postgres" in of_kind(objects, "StatefulSet")
    assert "postgres-password" in objects.secret_keys


def test_the_schema_comes_before_whoever_writes() -> None:
    for name in ("monitor", "scheduler", "planner"):
        migrate = pod(rendered(), name)["initContainers"][0]
        assert migrate["command"][:2] == ["polyphase", "migrate"]
        assert migrate["env"][0]["valueFrom"]["secretKeyRef"]["key"] == "database-url"
    assert "initContainers" not in pod(rendered(), "gateway")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "/some/where/model"}, "file.yaml: model: /some/where/model is a folder of this machine"),
        ({"instances": [{"id": "Big", "role": "prefill"}]}, "id 'Big': Kubernetes allows"),
        ({"instances": [{"id": "gateway", "role": "prefill"}]}, "'gateway' is the name of another part"),
        ({"instances": [{"id": "worker", "role": "prefill"}]}, "'worker' is the name of another part"),
        ({"instances": [{"id": "x", "role": "prefill", "accelerator": "GTX"}]}, "instances.x.accelerator: "),
        (
            {
                "instances": [
                    {"id": "x", "role": "prefill", "pipeline_parallel": 2, "stage_accelerators": ["A10", "A40"]}
                ]
            },
            "instances.x.stage_accelerators: a pod runs on one node",
        ),
        (
            {"predictor": {"checkpoint": "/home/me/lengths"}},
            "PREDICTOR_CHECKPOINT: /home/me/lengths is on this machine",
        ),
        (
            {"instances": [{"id": "x", "role": "prefill", "rates_file": "/tmp/rates"}]},
            "WORKER_RATES_FILE: /tmp/rates is on this machine only",
        ),
        ({"predictor": {"beside": "prefill"}}, "predictor.beside: pods have no predictor beside an instance"),
    ],
)
def test_what_cannot_be_there_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        rendered(unlike(**changes))


def test_instances_that_differ_are_no_stateful_set() -> None:
    node = {"engine": "emulated", "accelerator": "A10"}
    entries = [
        {"id": "p", "count": 2, "role": "prefill", **node, "node": "n0"},
        {"id": "d", "role": "decode", **node, "node": "n1"},
    ]
    network = {"between": {"gbps": 10}}
    with pytest.raises(InvalidRequest, match="EMULATED_LINKS differs from that of p-0"):
        rendered(unlike(instances=entries, network=network))


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


def test_the_command(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["render", "kubernetes", "laptop", "--namespace", "mine", "--image", "r/p:1"])
    assert said.exit_code == 0, said.output
    objects = [each for each in yaml.safe_load_all(said.stdout) if each]
    assert {each["metadata"].get("namespace", "mine") for each in objects} == {"mine"}
    assert "r/p:1" in said.stdout
    assert "create secret generic polyphase" in said.stderr
    file = tmp_path / "c.yaml"
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: a}\n")
    kept = {
        key: UNLIKE[key] for key in ("name", "model", "curve_public", "curve_secret", "cluster_token", "database_url")
    }
    instances = [{"id": "d", "role": "decode"}]
    whole = yaml.safe_dump({**kept, "gateway": {"api_keys_file": str(keys)}, "instances": instances})
    file.write_text(whole)
    said = CliRunner().invoke(
        app, ["render", "kubernetes", str(file), "--with-secrets", "--out", str(tmp_path / "out")]
    )
    assert said.exit_code == 0, said.output
    assert stat.S_IMODE((tmp_path / "out" / "10-secret.yaml").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("namespace: Mine", "namespace"),
        ("nonsense: 1", "nonsense: unknown key"),
        ("[1]", "expected a mapping"),
        ("images: {NVIDIA: [", "options.yaml"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        RenderOptions.read(file)
