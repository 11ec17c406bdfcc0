"""What would fail is said before anything starts, all at once, with the file, the key and what to do."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.launcher.cluster_file import Cluster
from services.launcher.cluster_keys import add_key, curve_pair
from services.launcher.model_source import PROJECT
from services.launcher.plan import make_plan
from services.launcher.preflight import preflight
from shared.errors import InvalidRequest
from tests.shared.model.configs import LLAMA, REFUSED, SERVED, STORED

P: dict[str, Any] = {"id": "p", "role": "prefill", "engine": "emulated", "accelerator": "A10"}
CPU = {**P, "engine": "vllm", "accelerator": "cpu"}


def faults(tmp_path: Path, **changes: Any) -> list[str]:
    """What preflight says of a cluster that is fine but for these changes; one a line."""
    content = {"name": "c", "model": str(PROJECT / "models" / "demo"), "instances": [P], **changes}
    cluster = Cluster.model_validate(content)
    plan = make_plan(cluster, tmp_path, content.get("control", ""), "file.yaml")
    try:
        preflight(cluster, plan, "file.yaml")
    except InvalidRequest as error:
        return error.message.splitlines()
    return []


def test_a_sound_file_passes(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    add_key(keys, "ann")
    assert not faults(tmp_path)
    assert not faults(tmp_path, instances=[CPU], gateway={"host": "0.0.0.0", "api_keys_file": str(keys)})
    assert not faults(tmp_path, database_url="postgresql://user:word@db/name", **curve_pair())


def test_nixl_that_is_not_installed_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.launcher.preflight.find_spec", lambda _: None)
    (said,) = faults(tmp_path, instances=[{**CPU, "kv_transport": "nixl"}])
    assert said.startswith("file.yaml: instances.p.kv_transport: NIXL is not installed")
    assert not faults(tmp_path, instances=[{**P, "kv_transport": "nixl"}])  # an emulated engine moves no KV


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "/no/such/model"}, "model: there is no folder /no/such/model"),
        ({"gateway": {"host": "0.0.0.0"}}, "gateway.host: listening on 0.0.0.0 needs API keys: `polyphase keys add"),
        ({"gateway": {"api_keys_file": "/no/keys.yaml"}}, "gateway.api_keys_file: keys file /no/keys.yaml: "),
        ({"database_url": "no url"}, "database_url: this is no database URL: sqlite:///PATH or postgresql"),
        ({"database_url": "mysql://h/d"}, "database_url: database URL must start with sqlite: or postgresql:"),
        ({"database_url": "sqlite:////etc/hostname/x.db"}, "database_url: /etc/hostname is not a folder"),
        ({"database_url": "sqlite:////proc"}, "database_url: /proc is not writable"),
        ({"instances": [{**P, "accelerator": "A1O"}]}, "instances.p.accelerator: unknown accelerator 'A1O'; did you"),
        ({"instances": [{**P, "emulated_model": "Lama"}]}, "instances.p.emulated_model: "),
        ({"instances": [{**P, "rates_file": "/no/file"}]}, "instances.p.rates_file: there is no file /no/file"),
        ({"instances": [{**CPU, "weights": "/no/int8"}]}, "instances.p.weights: there is no folder /no/int8"),
        (
            {"instances": [CPU], "lora": {"adapters": {"sql": "/no/sql"}}},
            "lora.adapters.sql: adapter sql: /no/sql has no adapter_config.json",
        ),
        ({"instances": [{**CPU, "tensor_parallel": 3}]}, "instances.p.tensor_parallel: the model's 4 attention heads"),
        (
            {"instances": [{**CPU, "accelerator": "A10", "tensor_parallel": 2, "env": {"CUDA_VISIBLE_DEVICES": "3"}}]},
            "instances.p.tensor_parallel: 2 accelerators are needed, but CUDA_VISIBLE_DEVICES is '3'",
        ),
        (
            {"instances": [{**CPU, "pipeline_parallel": 9}]},
            "instances.p.pipeline_parallel: 9 stages cannot share the 6 layers of the model",
        ),
        (
            {"instances": [{**CPU, "pipeline_parallel": 2, "pipeline_layers": [2, 2]}]},
            "instances.p.pipeline_layers: must add up to the 6 layers of the model, got 4",
        ),
        (
            {
                "instances": [
                    {**CPU, "accelerator": "A10", "pipeline_parallel": 2, "env": {"CUDA_VISIBLE_DEVICES": "3"}}
                ]
            },
            "instances.p.pipeline_parallel: 2 accelerators are needed, but CUDA_VISIBLE_DEVICES is '3'",
        ),
        ({"instances": [{**P, "id": "gateway"}]}, "instances: 'gateway' is the name of another process"),
        ({"policies": {"placement": "best"}}, "policies.placement: unknown placement policy 'best'; known: "),
        ({"policies": {"split": {"name": "full", "x": 1}}}, "policies.split: split policy 'full' has no param"),
        ({"policies": {"role_flip": "never"}}, "policies.role_flip: unknown role flip policy 'never'"),
        ({"policies": {"step_budget": 3}}, "policies.step_budget: expected a policy's name, or {name: …, and its"),
        ({"policies": {"splitt": "full"}}, "policies.splitt: no kind of policy 'splitt'; known: placement, split"),
        (
            {"policies": {"prefill_order": {"name": "sjf", "window": 0}}},
            "policies.prefill_order: sjf: window must be at least 1, not 0",
        ),
        ({"curve_public": "a", "curve_secret": "b"}, "curve_public, curve_secret: they are not a pair: `polyphase"),
        (
            {**curve_pair(), "curve_public": curve_pair()["curve_public"]},
            "curve_public, curve_secret: they are not a pair: `polyphase",
        ),
        ({"dashboard": {"login": True}}, "dashboard.login: a login needs API keys"),
    ],
)
def test_a_fault_is_said_with_file_and_key(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    lines = faults(tmp_path, **changes)
    assert len(lines) == 1
    assert lines[0].startswith(f"file.yaml: {said}")


def test_a_keys_file_without_a_key_opens_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("[]")
    gateway = {"host": "0.0.0.0", "api_keys_file": str(file)}
    assert "has no key, and the gateway listens on 0.0.0.0" in faults(tmp_path, gateway=gateway)[0]


def test_many_faults_are_said_at_once_and_alike_ones_once(tmp_path: Path) -> None:
    many = {**P, "accelerator": "nothing", "count": 8}
    lines = faults(tmp_path, model="/no/model", instances=[many], policies={"split": "x", "role_flip": "y"})
    assert [line.split(": ")[1] for line in lines] == [
        "model",
        "policies.split",
        "policies.role_flip",
        "instances.p.accelerator",
    ]


def test_several_hosts_need_keys_and_addresses(tmp_path: Path) -> None:
    lines = faults(tmp_path, hosts={"a": "127.0.0.1", "b": "b"}, control="a")
    assert [line.partition(", ")[0].partition(" is ")[0] for line in lines] == [
        "file.yaml: hosts.b: 'b'",
        "file.yaml: hosts: several hosts need curve_public and curve_secret: `polyphase keys curve` creates them",
        "file.yaml: hosts: several hosts need cluster_token: `polyphase keys token` creates one",
    ]
    (line,) = faults(tmp_path, hosts={"a": "127.0.0.1", "b": "10.0.0.2"}, control="a", **curve_pair())
    assert "`polyphase keys token` creates one" in line
    assert not faults(tmp_path, hosts={"a": "127.0.0.1"}, control="a")


def test_a_host_answers_for_its_own_part_only(tmp_path: Path) -> None:
    there = {**P, "id": "there", "host": "b", "accelerator": "nothing"}
    hosts = {"hosts": {"a": "127.0.0.1", "b": "127.0.0.2"}, "control": "a", **curve_pair(), "cluster_token": "t" * 20}
    assert not faults(tmp_path, instances=[{**P, "host": "a"}, there], **hosts)


def folder(path: Path, config: dict[str, Any]) -> str:
    """A model's folder with this config.json, and what else one has."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return str(path)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_served_is_named_before_anything_starts(tmp_path: Path, name: str) -> None:
    config, kind, keys = REFUSED[name]
    model = folder(tmp_path / "model", config)
    (line,) = faults(tmp_path, model=model, instances=[CPU, {**CPU, "id": "d", "role": "decode"}])
    assert line.startswith(f"file.yaml: model: the model has {kind}, which cannot be served: ")
    assert f"(config.json: {keys})" in line
    assert not faults(tmp_path, model=model)  # an emulated engine takes only its tokenizer


def test_kv_that_the_checkpoint_stores_quantised_is_named_with_the_remedy(tmp_path: Path) -> None:
    quantised = {**LLAMA, "quantization_config": STORED["modelopt, nested"][0]}
    model = folder(tmp_path / "model", quantised)
    kept = {"engine_args": {"kv_cache_dtype": "bfloat16"}}
    (line,) = faults(tmp_path, model=model, instances=[CPU, {**CPU, **kept, "id": "d", "role": "decode"}])
    assert line.startswith(
        "file.yaml: instances.p.engine_args: the checkpoint has its KV stored in nvfp4 (config.json: "
    )
    assert "set `engine_args: {kv_cache_dtype: bfloat16}`" in line


def test_heads_of_a_model_that_also_sees_are_its_text_models(tmp_path: Path) -> None:
    model = folder(tmp_path / "model", SERVED["Gemma-3"])
    (line,) = faults(tmp_path, model=model, instances=[{**CPU, "tensor_parallel": 3}])
    assert "instances.p.tensor_parallel: the model's 32 attention heads cannot be shared by 3" in line
