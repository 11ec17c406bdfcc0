"""The devices of instances: the next free ones, those that the file names, and faults."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.launcher.cluster_file import Cluster, load_cluster
from services.launcher.cluster_keys import curve_pair
from services.launcher.devices import CUDA, HIP, Assignment, assign, visible_here
from services.launcher.model_source import PROJECT
from services.launcher.plan import make_plan
from services.launcher.preflight import preflight
from shared.cost.catalogue import Catalogue
from shared.errors import InvalidRequest
from tests.gpu.shared_device import cluster_on

GPU: dict[str, Any] = {"role": "decode", "engine": "vllm", "accelerator": "A10"}
KV = {"kv_cache_bytes": 1 << 30}
HOSTS = {"hosts": {"a": "10.0.0.1", "b": "10.0.0.2"}, "control": "a", **curve_pair(), "cluster_token": "t" * 20}


@pytest.fixture(autouse=True)
def a_machine_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in ("_nvidia", "_amd", "_ascend"):
        monkeypatch.setattr(f"services.launcher.devices.{count}", lambda: 0)
    for name in (*os.environ,):
        if "VISIBLE" in name or name == "CUDA_DEVICE_ORDER":
            monkeypatch.delenv(name)


def cluster(*instances: dict[str, Any], **changes: Any) -> Cluster:
    model = str(PROJECT / "models" / "demo")
    return Cluster.model_validate({"name": "c", "model": model, "instances": instances, **changes})


def assigned(*instances: dict[str, Any], count: int | None = None, here: str = "local", **changes: Any) -> Assignment:
    there = None if count is None else [str(number) for number in range(count)]
    return assign(cluster(*instances, **changes), here, lambda _: there)


def devices(found: Assignment, variable: str = CUDA) -> Mapping[str, str]:
    return {name: env[variable] for name, env in found.env.items()}


@pytest.mark.parametrize(
    ("instances", "expected"),
    [
        (  # in the order of the file
            [
                {"id": "p", "tensor_parallel": 2},
                {"id": "d", "count": 2},
                {"id": "q", "pipeline_parallel": 2, "tensor_parallel": 2},
            ],
            {"p": "0,1", "d-0": "2", "d-1": "3", "q": "4,5,6,7"},
        ),
        (  # the next free ones after those that the file names
            [{"id": "a"}, {"id": "b", "env": {CUDA: "0"}}, {"id": "c", "devices": [2]}, {"id": "d"}],
            {"a": "1", "c": "2", "d": "3"},
        ),
        (  # emulated and disabled instances get none
            [{"id": "e", "engine": "emulated"}, {"id": "o", "enabled": False}, {"id": "d"}],
            {"d": "0"},
        ),
        (  # two instances share a device if both name it and set the size of their KV
            [{**KV, "id": "p", "devices": [0]}, {**KV, "id": "d", "devices": [0]}, {"id": "e"}],
            {"p": "0", "d": "0", "e": "1"},
        ),
        ([{**KV, "id": "d", "devices": [1], "count": 2}], {"d-0": "1", "d-1": "1"}),
        ([{"id": "d", "devices": [4, 5, 6, 7], "count": 2, "tensor_parallel": 2}], {"d-0": "4,5", "d-1": "6,7"}),
    ],
)
def test_the_devices_of_each_instance(instances: Sequence[dict[str, Any]], expected: dict[str, str]) -> None:
    found = assigned(*({**GPU, **each} for each in instances), count=8)
    assert devices(found) == expected
    assert not found.faults
    assert {env["CUDA_DEVICE_ORDER"] for env in found.env.values()} == {"PCI_BUS_ID"}


def test_each_host_counts_for_itself() -> None:
    one, two = {**GPU, "id": "x", "host": "a", "count": 2}, {**GPU, "id": "y", "host": "b", "count": 2}
    assert devices(assigned(one, two, here="b", count=2, **HOSTS)) == {"x-0": "0", "x-1": "1", "y-0": "0", "y-1": "1"}
    assert not assigned(one, two, here="b", count=2, **HOSTS).faults
    assert assigned(one, two, here="b", count=1, **HOSTS).faults == (
        (
            "instances.y",
            "y-1 needs 1 device (tensor_parallel x pipeline_parallel), and host 'b' has 0 free of 1: run fewer "
            "instances there, or let two share a device: `devices: [0]` and `kv_cache_bytes` in both",
        ),
    )


@pytest.mark.parametrize(
    ("accelerator", "variable"),
    [("A10", CUDA), ("MI300X", HIP), ("Ascend-910B", "ASCEND_RT_VISIBLE_DEVICES"), ("nobody-knows", CUDA)],
)
def test_each_vendor_has_its_variable(accelerator: str, variable: str) -> None:
    found = assigned({**GPU, "id": "d", "accelerator": accelerator})
    assert devices(found, variable) == {"d": "0"}


@pytest.mark.parametrize("accelerator", ["cpu", "EPYC-9654", "Gaudi3", "TPU-v5e", "Trainium2"])
def test_accelerators_without_numbers_get_no_devices(accelerator: str) -> None:
    assert not assigned({**GPU, "id": "d", "accelerator": accelerator}).env
    (fault,) = assigned({**GPU, "id": "d", "accelerator": accelerator, "devices": [0]}).faults
    assert fault == ("instances.d.devices", f"accelerator {accelerator!r} has no numbered devices: leave it out")


def test_the_cluster_of_the_gpu_check_shares_one_device(tmp_path: Path) -> None:
    made = cluster_on("H100-SXM")
    plan = make_plan(made, tmp_path)
    preflight(made, plan, "c.yaml")
    assert devices(plan.devices) == {"prefill-0": "0", "decode-0": "0"}
    assert not make_plan(cluster_on("cpu"), tmp_path).devices.env


@pytest.mark.parametrize(
    ("instances", "key", "message"),
    [
        (
            [{"id": "p", "devices": [0], **KV}, {"id": "d", "devices": [0]}],
            "instances.d.devices",
            "device 0 of host 'local' is also assigned to p: to share it, set `kv_cache_bytes` in both",
        ),
        (
            [{"id": "p", "env": {CUDA: "1"}}, {"id": "d", "devices": [1], **KV}],
            "instances.d.devices",
            "device 1 of host 'local' is also assigned to p: choose another, or let them share it: `devices: [1]` and",
        ),
        (
            [{"id": "p", "env": {CUDA: "0,1"}, "tensor_parallel": 2}, {"id": "d", "env": {CUDA: "1"}}],
            f"instances.d.env.{CUDA}",
            "device 1 of host 'local' is also assigned to p: choose another",
        ),
        (
            [{"id": "d", "count": 2, "env": {CUDA: "0"}}],
            f"instances.d.env.{CUDA}",
            "device 0 of host 'local' is also assigned to d-0",
        ),
        (
            [{"id": "d", "devices": [0], "env": {CUDA: "0"}}],
            "instances.d.devices",
            f"env.{CUDA} already chooses the devices: leave one of the two out",
        ),
        (
            [{"id": "d", "devices": [0, 1, 2], "tensor_parallel": 2}],
            "instances.d.devices",
            "2 are needed (tensor_parallel x pipeline_parallel); got 3",
        ),
        (
            [{"id": "d", "devices": [0, 1, 2], "count": 2, "tensor_parallel": 2}],
            "instances.d.devices",
            "2 are needed (tensor_parallel x pipeline_parallel) for each of 2 instances: 4, or 2 that they share; got",
        ),
        ([{"id": "d", "devices": [7]}], "instances.d.devices", "there is no device 7: host 'local' has 4 (0 to 3)"),
        (
            [{"id": "d", "tensor_parallel": 8}],
            "instances.d",
            "d needs 8 devices (tensor_parallel x pipeline_parallel), and host 'local' has 4 free of 4",
        ),
    ],
)
def test_faulty_devices_are_named(instances: Sequence[dict[str, Any]], key: str, message: str) -> None:
    ((at, text),) = assigned(*({**GPU, **each} for each in instances), count=4).faults
    assert at == key
    assert text.startswith(message)


def test_an_entry_names_a_device_once() -> None:
    with pytest.raises(ValueError, match="device 3 is named twice"):
        cluster({**GPU, "id": "d", "devices": [3, 3]})


def test_devices_are_counted_among_those_that_the_launcher_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUDA, "4, 6,7")
    assert visible_here(CUDA) == ("4", "6", "7")
    found = assign(cluster({**GPU, "id": "p"}, {**GPU, "id": "d", "devices": [2]}), "local")
    assert devices(found) == {"p": "4", "d": "7"}
    assert not any("CUDA_DEVICE_ORDER" in env for env in found.env.values())  # the numbers are the environment's


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_launcher_that_sees_no_devices_assigns_none(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    monkeypatch.setenv(CUDA, hidden)
    ((_, text),) = assign(cluster({**GPU, "id": "d"}), "local").faults
    assert "host 'local' has 0 free of 0" in text


def test_the_variables_of_amd_and_cuda_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUDA, "2,3")
    found = assign(cluster({**GPU, "id": "d", "accelerator": "MI300X", "devices": [1]}), "local")
    assert dict(found.env["d"]) == {HIP: "3", CUDA: "3"}


def test_processes_get_their_devices_and_faults_their_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    model = PROJECT / "models" / "demo"
    head = f"name: c\nmodel: {model}\ninstance_defaults: {{accelerator: A10}}\ninstances:\n"
    file.write_text(f"{head}  - {{id: p, role: prefill, tensor_parallel: 2}}\n  - {{id: d, role: decode}}\n")
    read = load_cluster(file)
    plan = make_plan(read, tmp_path)
    env = {spec.name: spec.env for spec in plan.processes}
    assert (env["p"][CUDA], env["d"][CUDA]) == ("0,1", "2")
    assert CUDA not in env["gateway"]
    preflight(read, plan, "c.yaml")

    file.write_text(
        f"{head}  - {{id: p, role: prefill, devices: [0]}}\n"
        "  - id: d\n    role: decode\n    devices: [0]\n"
        f"  - id: e\n    role: decode\n    env: {{{CUDA}: '0'}}\n"
    )
    read = load_cluster(file)
    with pytest.raises(InvalidRequest) as refused:
        preflight(read, make_plan(read, tmp_path), str(file))
    assert [line.removeprefix(f"{file}:").partition(" is ")[0] for line in refused.value.message.splitlines()] == [
        "8: instances.d.devices: device 0 of host 'local'",
        f"11: instances.e.env.{CUDA}: device 0 of host 'local'",
    ]
    preflight(read, make_plan(read, tmp_path), str(file), places_instances=False)  # Ray chooses


@pytest.mark.parametrize(
    ("accelerator", "kv_gib", "fits"), [("A10", 10, True), ("A10", 12, False), ("A100-SXM-80", 30, True)]
)
def test_devices_have_room_for_all_of_their_instances(
    tmp_path: Path, accelerator: str, kv_gib: int, fits: bool
) -> None:
    kv = {"accelerator": accelerator, "kv_cache_bytes": kv_gib << 30, "devices": [0]}
    read = cluster({**GPU, **kv, "id": "p"}, {**GPU, **kv, "id": "d"})
    if fits:
        preflight(read, make_plan(read, tmp_path), "c.yaml")
        return
    with pytest.raises(
        InvalidRequest, match=r"instances\.d\.kv_cache_bytes: weights and KV of p, d need 24\.0 GiB on device"
    ):
        preflight(read, make_plan(read, tmp_path), "c.yaml")


def test_the_accelerators_without_a_variable() -> None:
    without = {each.name for each in Catalogue.built_in().all() if not each.visible_by}
    assert without == {"Gaudi2", "Gaudi3", "TPU-v5e", "Trainium2", "Xeon-8480", "EPYC-9654"}
