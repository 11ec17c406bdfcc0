"""Whom the monitor tells Prometheus to scrape."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from services.cluster_monitor.app import create_app
from services.cluster_monitor.routes import targets
from services.cluster_monitor.settings import MonitorSettings, ScrapeTarget
from shared.domain.instance import InstanceState, Role
from tests.ports import free_address
from tests.services.cluster_monitor.conftest import Cluster
from tests.services.control_plane import request, running, sqlite, until

GATEWAYS = [ScrapeTarget(service="gateway", process=f"gateway-{n}", url=f"http://10.0.0.1:80{n}") for n in range(2)]


def record(name: str, http: str) -> Any:
    return cast(Any, SimpleNamespace(instance_id=name, info=SimpleNamespace(http=http)))


def test_each_process_is_a_target_and_the_monitor_speaks_for_itself() -> None:
    records = [record("d0", "http://10.0.0.2:8401"), record("a1", "https://10.0.0.3:8401")]
    assert targets(GATEWAYS, records, "monitor:8200") == [
        {"targets": ["10.0.0.1:800"], "labels": {"service": "gateway", "process": "gateway-0"}},
        {"targets": ["10.0.0.1:801"], "labels": {"service": "gateway", "process": "gateway-1"}},
        {"targets": ["monitor:8200"], "labels": {"service": "monitor", "process": "monitor"}},
        {
            "targets": ["10.0.0.3:8401"],
            "labels": {"service": "worker", "process": "a1", "instance_id": "a1", "__scheme__": "https"},
        },
        {"targets": ["10.0.0.2:8401"], "labels": {"service": "worker", "process": "d0", "instance_id": "d0"}},
    ]


def test_monitors_that_it_was_told_of_are_all() -> None:
    told = [ScrapeTarget(service="monitor", process=name, url=f"http://{name}:8200") for name in ("one", "standby")]
    assert [group["targets"] for group in targets(told, (), "one:8200")] == [["one:8200"], ["standby:8200"]]


def test_targets_come_back_from_the_environment() -> None:
    settings = MonitorSettings(scrape=tuple(GATEWAYS))
    (said,) = [value for name, value in settings.to_environment().items() if name.endswith("SCRAPE")]
    assert MonitorSettings.model_validate_json(f'{{"scrape": {said}}}').scrape == tuple(GATEWAYS)


async def test_dead_instances_are_told_of_and_forgotten_ones_are_not(cluster: Cluster) -> None:
    async def told() -> list[str]:
        groups = (await request(cluster.transport, "GET", "/sd/prometheus")).json()
        return [group["labels"]["process"] for group in groups]

    await cluster.workers(p0=Role.PREFILL, d0=Role.DECODE)
    assert await told() == ["monitor", "d0", "p0"]
    await cluster.stack.aclose()
    for name in ("d0", "p0"):
        await cluster.wait_state(name, InstanceState.DEAD)
    assert await told() == ["monitor", "d0", "p0"]
    await cluster.client.forget("d0")
    assert await told() == ["monitor", "p0"]


async def test_of_several_monitors_the_one_that_acts_tells(tmp_path: Path) -> None:
    def settings(name: str) -> MonitorSettings:
        addresses = {"heartbeat_address": free_address(), "broadcast_address": free_address()}
        return MonitorSettings(monitor_id=name, lease_s=0.6, database_url=sqlite(tmp_path), **addresses)

    first, other = create_app(settings("one")), create_app(settings("two"))
    async with running(first) as acting:
        await until(lambda: first.state.turns.state is not None, "it acts", timeout_s=20)
        async with running(other) as standby:
            told = await request(acting, "GET", "/sd/prometheus")
            assert [group["labels"]["process"] for group in told.json()] == ["monitor"]
            refused = await request(standby, "GET", "/sd/prometheus")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "standby")
