"""Whom Prometheus is to scrape of what a host runs."""

import json
from pathlib import Path
from typing import Any

from services.cluster_monitor.settings import MonitorSettings
from services.launcher import addresses
from services.launcher.cluster_file import Cluster
from services.launcher.plan import make_plan


def cluster(**changes: Any) -> Cluster:
    instance = {"engine": "emulated", "accelerator": "A100-SXM-80"}
    instances = [{"id": "p0", "role": "prefill", **instance}, {"id": "d", "role": "decode", "count": 2, **instance}]
    return Cluster.model_validate({"name": "t", "model": "m", "instances": instances, **changes})


def test_every_process_with_metrics_is_a_target_under_its_own_port(tmp_path: Path) -> None:
    plan = make_plan(cluster(gateway={"processes": 2}, scheduler={"count": 2}), tmp_path)
    found = {each.process: each for each in addresses.targets_of(plan.processes)}
    assert set(found) == {spec.name for spec in plan.processes} - {"dashboard"}
    assert len({each.url for each in found.values()}) == len(found)
    assert tuple(found[name].url for name in ("gateway-0", "gateway-1")) == plan.gateway_urls
    services = {each.service for each in found.values()}
    assert services == {"gateway", "scheduler", "monitor", "predictor", "planner", "worker"}


def test_the_monitor_is_told_of_those_that_do_not_register(tmp_path: Path) -> None:
    plan = make_plan(cluster(), tmp_path)
    (monitor,) = [spec.settings for spec in plan.processes if isinstance(spec.settings, MonitorSettings)]
    elsewhere = [each for each in addresses.targets_of(plan.processes) if each.service not in ("monitor", "worker")]
    assert list(monitor.scrape) == elsewhere


def test_the_file_has_the_labels_of_the_monitor_and_goes_with_the_suite(tmp_path: Path) -> None:
    plan = make_plan(cluster(), tmp_path)
    addresses.write_targets(tmp_path, plan.processes)
    groups = {each["labels"]["process"]: each for each in json.loads((tmp_path / addresses.TARGETS_FILE).read_text())}
    (worker,) = [spec for spec in plan.processes if spec.name == "p0"]
    address = worker.health_url.removeprefix("http://").removesuffix("/health")
    assert groups["p0"] == {"targets": [address], "labels": {"service": "worker", "process": "p0", "instance_id": "p0"}}
    assert groups["monitor"]["labels"] == {"service": "monitor", "process": "monitor"}
    addresses.remove_targets(tmp_path)
    assert list(tmp_path.iterdir()) == []
