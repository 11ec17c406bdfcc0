from contextlib import suppress
from typing import Any

import zmq
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import func, select

from services.cluster_monitor.settings import MonitorSettings, ScrapeTarget
from shared.domain.instance import InstanceState, Role
from shared.store.tables import flips, instances, loads, slo_windows
from shared.wire.sockets import Sockets
from tests.services.cluster_monitor.conftest import Cluster, Start
from tests.services.control_plane import text, until

SCRAPE = ScrapeTarget(service="gateway", process="gateway-0", url="http://10.0.0.1:80")


async def sample(cluster: Cluster, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(await text(cluster.transport, "/metrics")):
        for found in family.samples:
            if found.name == name and labels.items() <= found.labels.items():
                return found.value
    return 0.0


def outcome(**changes: Any) -> dict[str, Any]:
    base = {"slo": "chat", "ended_s": 1.0, "ttft_s": 0.5, "tpot_s": 0.05, "ttft_target_s": 1, "tpot_target_s": 0.1}
    return {**base, **changes}


async def test_garbage_on_the_sockets_is_dropped_and_counted(cluster: Cluster) -> None:
    await cluster.workers(p0=Role.PREFILL)
    sockets = Sockets()
    hostile = sockets.unconnected(zmq.PUB)
    hostile.connect(cluster.settings.heartbeat_address)
    to_broadcast = sockets.unconnected(zmq.DEALER)
    to_broadcast.connect(cluster.settings.broadcast_address)

    async def dropped(cause: str) -> float:
        return await sample(cluster, "polyphase_wire_dropped_total", socket="heartbeat", cause=cause)

    async def counted() -> bool:
        hostile.send(b"\xff not msgpack")
        hostile.send_multipart([b"one", b"two"])
        with suppress(zmq.Again):  # while the other side has hung up on it
            to_broadcast.send(b"\x00" * 100, zmq.NOBLOCK)
        return await dropped("garbage") > 2

    await until(counted, "all of it counted")
    hostile.close()
    to_broadcast.close()
    sockets.close()
    sequence = cluster.views[-1].sequence
    await until(lambda: cluster.views[-1].sequence > sequence, "still broadcasting")
    assert cluster.seen("p0").state is InstanceState.READY


async def test_metrics_name_roles_and_states(cluster: Cluster) -> None:
    await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    await cluster.client.flip("p0")
    assert await sample(cluster, "polyphase_instances", role="decode", state="ready") == 2
    assert await sample(cluster, "polyphase_instances", role="prefill", state="dead") == 0
    assert await sample(cluster, "polyphase_operations_total", kind="flip", result="succeeded") == 1
    assert await sample(cluster, "polyphase_flip_seconds_count") == 1
    assert await sample(cluster, "polyphase_detections_total", state="ready") >= 3


async def test_slo_outcomes_become_attainment(cluster: Cluster) -> None:
    gap = {"itl_target_s": 0.25, "gaps": 150}
    body = [
        outcome(longest_gap_s=0.9, gaps_over=1, **gap),
        outcome(ttft_s=2.0, longest_gap_s=0.1, **gap),
        outcome(tpot_s=0.5, longest_gap_s=0.9, gaps_over=2, **gap),
        outcome(failed=True, ttft_s=None),
    ]
    assert await cluster.news(*body) == {"outcomes": 4, "demand": 0}
    by_window = {report.window_s: report for report in await cluster.client.slo()}
    assert set(by_window) == {60.0, 300.0}
    report = by_window[60.0]
    assert (report.requests, report.attainment) == (4, 0.25)
    assert (report.ttft_attainment, report.tpot_attainment) == (0.5, 0.5)
    assert report.ttft_s["p50"] == 0.5
    assert (report.itl_attainment, report.itl_target_s) == (0.5, None)  # the last one named none
    assert report.longest_gap_s == {"p50": 0.9, "p90": 0.9, "p99": 0.9, "max": 0.9}
    assert await sample(cluster, "polyphase_slo_attainment_ratio", slo="chat", window_s="60", target="itl") == 0.5
    assert await sample(cluster, "polyphase_slo_longest_gap_seconds", slo="chat", window_s="60", of="max") == 0.9
    assert await sample(cluster, "polyphase_slo_attainment_ratio", slo="chat", window_s="60", target="all") == 0.25
    assert (await cluster.client.cluster()).slo[0].slo == "chat"


async def test_an_outcome_that_is_delivered_twice_counts_once(cluster: Cluster) -> None:
    for taken in (2, 0, 1):  # the answer to the first was lost; another scheduler heard of j1, too
        body = [outcome(job_id="j1"), outcome(job_id="j2" if taken != 1 else "j3")]
        assert await cluster.news(*body) == {"outcomes": taken, "demand": 0}
    assert (await cluster.client.slo())[0].requests == 3


async def test_a_dead_database_hinders_nothing(start: Start, tmp_path: Any) -> None:
    (tmp_path / "folder.db").mkdir()
    cluster: Cluster = await start(database_url=f"sqlite:///{tmp_path}/folder.db")
    await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL)
    assert (await cluster.client.flip("p0")).result == "succeeded"
    assert len(await cluster.client.flips()) == 1
    await until(lambda: cluster.store.queued > 0, "rows wait")


async def test_history_reaches_the_database(start: Start) -> None:
    cluster: Cluster = await start(load_sample_s=0.1, slo_sample_s=0.1)
    await until(cluster.store.ready.is_set, "the tables are there")
    await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL)
    await cluster.client.flip("p0", who="tester")
    await cluster.news(outcome())
    wanted = {instances: 2, loads: 4, flips: 1, slo_windows: 2}

    async def counts() -> list[int]:
        async with cluster.store._engine.connect() as connection:
            return [
                (await connection.execute(select(func.count()).select_from(table))).scalar_one() for table in wanted
            ]

    async def all_there() -> bool:
        return all(found >= least for found, least in zip(await counts(), wanted.values(), strict=True))

    await until(all_there, "rows of every table")


async def test_the_audit_outlives_the_monitor(start: Start) -> None:
    first: Cluster = await start()
    await first.workers(p0=Role.PREFILL, p1=Role.PREFILL)
    done = await first.client.flip("p0")
    await until(lambda: not first.store.queued, "audited in the database")
    await first.stop()
    second: Cluster = await start()
    await until(lambda: second.state.operation_log.newest(9), "audit read back")
    assert await second.client.flips() == [done]


def test_settings_survive_the_environment(monkeypatch: Any) -> None:
    settings = MonitorSettings(slo_windows_s=(5.0, 10.0), silence_s=2.0, http_port=1234, scrape=(SCRAPE,))
    for key, value in settings.to_environment().items():
        monkeypatch.setenv(key, value)
    assert MonitorSettings.load() == settings
