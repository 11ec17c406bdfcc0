"""Every object is one that a Kubernetes API server would take: no unknown key, no wrong type."""

import copy
import re
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from services.launcher.render.manifests import as_text
from tests.services.launcher.render.rendering import Rendered, read, rendered, shipped

SERVICE_MONITOR = yaml.safe_load((Path(__file__).parent / "service_monitor_schema.yaml").read_text())
LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
CASES = {
    "laptop": lambda: rendered(shipped("laptop")),
    "emulated-mixed": lambda: rendered(shipped("emulated-mixed")),
    "unlike": rendered,
    "all options": lambda: rendered(
        with_secrets=False,
        postgres={"enabled": True, "storage_class": "fast"},
        models={"claim": "weights"},
        pull_secrets=("registry",),
        runtime_class="nvidia",
        selectors={"A100-SXM-80": {"pool": ("big", "bigger")}},
        resources={"gateway": {"limits": {"memory": "8Gi"}}},
        monitor_labels={"release": "prometheus"},
    ),
}


@pytest.mark.parametrize("version", ["1.28", "1.37"])
@pytest.mark.parametrize("case", CASES)
def test_the_published_schemas_take_them(case: str, version: str) -> None:
    objects = read(as_text(CASES[case]().objects))  # as they are written and read
    assert len(objects) > 20
    for each in objects:
        if each["kind"] == "ServiceMonitor":
            jsonschema.validate(each, SERVICE_MONITOR)
        else:
            kubernetes_validate.validate(each, version, strict=True)


def test_the_schemas_would_notice() -> None:
    bad = copy.deepcopy(next(each for each in rendered().objects if each["kind"] == "StatefulSet"))
    bad["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(jsonschema.ValidationError, match="livenesProbe"):
        kubernetes_validate.validate(bad, "1.37", strict=True)


def _labels(objects: Rendered) -> list[dict[str, str]]:
    found = []
    for each in objects.objects:
        found.append(each["metadata"].get("labels", {}))
        if "template" in each.get("spec", {}):
            found.append(each["spec"]["template"]["metadata"]["labels"])
    return found


@pytest.mark.parametrize("case", CASES)
def test_names_and_labels_are_ones_that_are_allowed(case: str) -> None:
    """Which the schemas do not say."""
    objects = CASES[case]()
    seen = [(each["kind"], each["metadata"]["name"]) for each in objects.objects]
    assert len(seen) == len(set(seen))
    for _, name in seen:
        assert NAME.fullmatch(name)
    for labels in _labels(objects):
        for key, value in labels.items():
            assert LABEL.fullmatch(value)
            assert LABEL.fullmatch(key.rpartition("/")[2])
    for each in objects.objects:
        ports = [port["name"] for port in each.get("spec", {}).get("ports", []) if "name" in port]
        assert all(len(name) <= 15 for name in ports)
