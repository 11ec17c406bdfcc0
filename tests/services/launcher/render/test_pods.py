"""Pods: accelerators, probes, an orderly end, and what they may do."""

import pytest

from services.launcher.render.pods import ACCELERATORS, FOLDERS
from shared.cost.catalogue import Catalogue
from shared.files.yaml_file import read_yaml
from tests.services.launcher.render.rendering import (
    container,
    environment,
    of_kind,
    pod,
    rendered,
    shipped,
    unlike,
    workloads,
)


@pytest.mark.parametrize(
    ("name", "resource", "count", "label", "value"),
    [
        ("a100", "nvidia.com/gpu", "4", "nvidia.com/gpu.product", "NVIDIA-A100-SXM4-80GB"),
        ("mi300x", "amd.com/gpu", "1", "amd.com/gpu.product-name", "AMD_Instinct_MI300X_OAM"),
        ("ascend", "huawei.com/Ascend910", "1", "accelerator", "huawei-Ascend910"),
    ],
)
def test_an_instance_requests_its_accelerators(name: str, resource: str, count: str, label: str, value: str) -> None:
    wanted = container(rendered(), name)["resources"]
    assert wanted["limits"] == {resource: count}
    assert wanted["requests"][resource] == count
    node = pod(rendered(), name)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (expression,) = node["nodeSelectorTerms"][0]["matchExpressions"]
    assert expression["key"] == label
    assert value in expression["values"]
    assert pod(rendered(), name)["tolerations"][0]["key"] == resource


def test_options_may_change_the_labels_of_nodes() -> None:
    affinity = str(pod(rendered(selectors={"A100-SXM-80": {"pool": ("big",)}}), "a100")["affinity"])
    assert "'key': 'pool'" in affinity
    assert "nvidia.com/gpu.product" not in affinity
    assert "affinity" not in pod(rendered(selectors={"A100-SXM-80": {}}), "a100")


def test_images_depend_on_the_vendor() -> None:
    objects = rendered(image="p:1", images={"NVIDIA": "p:nv", "AMD": "p:amd"})
    images = {name: container(objects, name)["image"] for name in workloads(objects)}
    assert images == {**dict.fromkeys(images, "p:1"), "a100": "p:nv", "mi300x": "p:amd"}


def test_emulated_engines_request_no_accelerators() -> None:
    objects = rendered(shipped("emulated-mixed"))
    for name in workloads(objects):
        assert "gpu" not in str(pod(objects, name)["containers"][0]["resources"])
        assert "affinity" not in pod(objects, name)


def test_each_vendor_has_a_resource_and_labels_are_of_known_accelerators() -> None:
    catalogue, names = Catalogue.built_in(), read_yaml(ACCELERATORS)
    assert {catalogue.get(name).vendor for name in catalogue.names()} <= set(names["resources"])
    for name, labels in names["labels"].items():
        assert catalogue.get(name).name == name
        for product in labels.get("nvidia.com/gpu.product", []):
            assert catalogue.get(product).name == name  # as nvidia-smi prints it


def test_ranks_on_accelerators_have_shared_memory() -> None:
    for name in ("a100", "mi300x"):
        volumes = {each["name"]: each for each in pod(rendered(shared_memory="3Gi"), name)["volumes"]}
        assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "3Gi"}
    assert "shared-memory" not in str(pod(rendered(), "cpu"))


def test_probes_say_started_ready_and_alive() -> None:
    found = container(rendered(worker_start_s=900), "a100")
    start, ready, alive = (found[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness"))
    assert start["periodSeconds"] * start["failureThreshold"] == 900  # a model takes minutes
    assert [each["httpGet"]["path"] for each in (start, ready, alive)] == ["/health", "/ready", "/health"]
    assert alive["periodSeconds"] * alive["failureThreshold"] == 9  # launcher.hang_s
    start = container(rendered(), "gateway")["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] == 100  # launcher.start_s
    dashboard = container(rendered(), "dashboard")
    assert dashboard["readinessProbe"]["httpGet"]["path"] == "/_stcore/health"
    for name in workloads(rendered()):
        ports = {port["name"] for port in container(rendered(), name)["ports"]}
        assert "http" in ports


def test_without_hang_s_there_is_no_liveness_probe() -> None:
    objects = rendered(unlike(launcher={"hang_s": 0}))
    assert all("livenessProbe" not in container(objects, name) for name in workloads(objects))


def test_a_pod_has_longer_than_its_drain() -> None:
    objects = rendered(worker_drain_s=200, gateway_drain_s=50)
    drains = {
        name: float(value)
        for name in workloads(objects)
        for key, value in environment(objects, name).items()
        if key.endswith("_DRAIN_S")
    }
    assert drains == {"a100": 200, "mi300x": 200, "cpu": 200, "ascend": 7, "gateway": 50}  # the file's own stands
    for name, drain_s in drains.items():
        assert pod(objects, name)["terminationGracePeriodSeconds"] >= drain_s + 20
    assert container(objects, "gateway")["lifecycle"]["preStop"]["exec"]["command"][0] == "sleep"


def test_one_pod_of_each_group_may_be_away() -> None:
    objects = rendered()
    budgets = of_kind(objects, "PodDisruptionBudget")
    assert set(budgets) == set(workloads(objects))
    for name, each in workloads(objects).items():
        assert budgets[name]["spec"]["maxUnavailable"] == 1
        assert budgets[name]["spec"]["selector"] == each["spec"]["selector"]


def test_a_changed_setting_replaces_pods() -> None:
    def mark(name: str, **changes: object) -> str:
        found = workloads(rendered(unlike(**changes)))[name]
        return str(found["spec"]["template"]["metadata"]["annotations"])

    assert mark("gateway") == mark("gateway")
    assert mark("gateway") != mark("gateway", gateway={"processes": 3, "port": 9000})
    assert mark("cpu") == mark("cpu", gateway={"processes": 3, "port": 9000})


def test_pods_have_no_unneeded_privileges() -> None:
    objects = rendered(postgres={"enabled": True})
    for name in workloads(objects):
        found = pod(objects, name)
        assert found["securityContext"]["runAsNonRoot"] is True
        assert found["automountServiceAccountToken"] is False
        for box in (*found["containers"], *found.get("initContainers", [])):
            assert box["securityContext"]["allowPrivilegeEscalation"] is False
            assert box["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            if name != "postgres":
                assert box["securityContext"]["readOnlyRootFilesystem"] is True
                assert {"/tmp", "/data"} <= {mount["mountPath"] for mount in box["volumeMounts"]}


def test_folders_of_programs_are_on_volumes() -> None:
    mounted = {mount["mountPath"] for mount in container(rendered(), "a100")["volumeMounts"]}
    for path in FOLDERS.values():
        assert any(path == folder or path.startswith(f"{folder}/") for folder in mounted), path


def test_models_are_on_a_volume_of_each_instance_or_on_one_for_all() -> None:
    each_its_own = workloads(rendered(models={"size": "50Gi", "storage_class": "fast"}))["a100"]["spec"]
    (claim,) = each_its_own["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "50Gi"
    assert claim["spec"]["storageClassName"] == "fast"
    shared = rendered(models={"claim": "weights"})
    assert "volumeClaimTemplates" not in workloads(shared)["a100"]["spec"]
    for name in ("a100", "gateway", "predictor"):
        volumes = {volume["name"]: volume for volume in pod(shared, name)["volumes"]}
        assert volumes["models"]["persistentVolumeClaim"]["claimName"] == "weights"


def test_kv_on_a_disk_has_a_volume_and_memory_for_what_is_to_be_written() -> None:
    disk = {"host_kv_bytes": 8 << 30, "disk_kv_bytes": 100 << 30, "disk_kv_folder": "/nvme/kv"}
    gpus = {"id": "gpus", "role": "prefill", "accelerator": "A100-SXM-80", "tensor_parallel": 2}
    objects = rendered(unlike(instances=[gpus | disk]))
    volumes = {volume["name"]: volume for volume in pod(objects, "gpus")["volumes"]}
    assert volumes["kv"] == {"name": "kv", "emptyDir": {"sizeLimit": "201Gi"}}
    box = container(objects, "gpus")
    assert {"name": "kv", "mountPath": "/nvme/kv"} in box["volumeMounts"]
    assert box["resources"]["requests"]["memory"] == "23Gi"  # two ranks with 0.25 + 1 + 8 + 0.25, and 4
    assert "'kv'" not in str(pod(rendered(), "a100"))


def test_metrics_of_every_service_are_found_once() -> None:
    objects = rendered()
    (monitor,) = of_kind(objects, "ServiceMonitor").values()
    wanted = monitor["spec"]["selector"]["matchLabels"]
    scraped = [
        each for each in of_kind(objects, "Service").values() if wanted.items() <= each["metadata"]["labels"].items()
    ]
    components = sorted(each["spec"]["selector"]["app.kubernetes.io/name"] for each in scraped)
    assert components == ["gateway", "monitor", "planner", "predictor", "scheduler", "worker"]
    assert all("http" in [port["name"] for port in each["spec"]["ports"]] for each in scraped)
    assert not of_kind(rendered(monitors=False), "ServiceMonitor")


def test_clients_reach_gateways_only() -> None:
    found = of_kind(rendered(), "NetworkPolicy")
    open_to_all = [name for name, each in found.items() if any("from" not in rule for rule in each["spec"]["ingress"])]
    assert open_to_all == ["gateway"]
    assert not of_kind(rendered(network_policies=False), "NetworkPolicy")
