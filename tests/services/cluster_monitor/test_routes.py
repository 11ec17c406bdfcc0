"""What a console reads: the verdict, the history over a restart, what instances tell of themselves."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from services.cluster_monitor.app import create_app
from services.cluster_monitor.history import LEAST_S, Grid
from services.cluster_monitor.routes import TargetGroup, targets
from services.cluster_monitor.settings import MonitorSettings, ScrapeTarget
from shared.domain.instance import InstanceLoad, InstanceState, Role
from shared.errors import InvalidRequest
from shared.wire.api.worker import InstanceDetails, PrefixCache, StepCosts, Steps
from tests.ports import free_address, free_port
from tests.services.cluster_monitor.conftest import Cluster, Start
from tests.services.control_plane import request, running, sqlite, until
from tests.services.fake_worker import make_info

NEWS = "/schedulers/s0/news"


def outcome(job_id: str, **changes: Any) -> dict[str, Any]:
    base = {"job_id": job_id, "slo": "chat", "ended_s": time.time(), "ttft_s": 0.5, "tpot_s": 0.05}
    more = {"ttft_target_s": 1, "tpot_target_s": 0.06, "itl_target_s": 0.25, "longest_gap_s": 0.1, "gaps": 19}
    more |= {"prompt_tokens": 100, "output_tokens": 20}
    spent = {"seconds": {"queue": 0.1, "prefill": 0.3, "decode": 1.0, "reply": 0.1}, "whole_s": 1.5, "transfers": 1}
    return {**base, **more, **spent, **changes}


async def verdict(cluster: Cluster) -> dict[str, Any]:
    cluster.state.judge._last = None  # no older than this
    found: dict[str, Any] = await cluster.get("/verdict")
    return found


async def test_a_healthy_cluster_then_late_tokens_then_a_death(cluster: Cluster) -> None:
    worker, _, _ = await cluster.workers(p0=Role.PREFILL, d0=Role.DECODE, d1=Role.DECODE)
    assert (await verdict(cluster))["level"] == "idle"
    await cluster.news(*(outcome(f"a{n}") for n in range(10)), gateways={"gateway-0": 0.1})
    good = await verdict(cluster)
    assert (good["level"], good["requests"], good["problems"]) == ("good", 10, [])
    chain = {link["stage"]: link for link in good["chain"]}
    assert chain["decode"]["share"] == pytest.approx(1.0 / 1.5)
    assert chain["decode"]["p50_s"] == pytest.approx(1.0, rel=0.05)
    assert good["counts"]["decode"] == {
        "ready": 2,
        "expected": 2,
        "dead": 0,
        "unresponsive": 0,
        "draining": 0,
        "starting": 0,
        "missing": 0,
    }
    await cluster.news(*(outcome(f"b{n}", tpot_s=0.3) for n in range(10)))
    late = await verdict(cluster)
    assert late["headline"] == "Degraded: TPOT met by 50 % (target 60 ms)"
    assert late["problems"][0]["stage"] == "decode"
    await cluster.news(*(outcome(f"c{n}", longest_gap_s=2.0, gaps_over=1) for n in range(20)))
    paused = await verdict(cluster)
    assert "ITL met by 50 % (target 0.25 s)" in paused["headline"]
    await cluster.stack.aclose()
    await until(lambda: not any(record.alive for record in cluster.state.registry.all()), "all dead")
    down = await verdict(cluster)
    assert down["level"] == "down"
    assert {one["what"] for one in down["problems"]} == {"role_empty", "instances_dead", "tpot_missed", "itl_missed"}
    assert worker is not None


async def test_what_failed_has_not_missed_a_target_as_well(cluster: Cluster) -> None:
    await cluster.workers(d0=Role.DECODE)
    await cluster.news(*(outcome(f"a{n}") for n in range(8)))
    await cluster.news(*(outcome(f"b{n}", phase="failed", code="deadline_exceeded") for n in range(4)))
    found = await verdict(cluster)
    assert [one["what"] for one in found["problems"]] == ["errors"]
    assert found["headline"] == "Degraded: 33 % of requests failed (4 of 12)"


async def test_the_window_is_as_long_as_it_is_said_to_be(cluster: Cluster) -> None:
    found = await verdict(cluster)
    assert 60.0 <= found["window_s"] < 70.0
    assert round(found["time_s"] - found["window_s"], 3) % 10.0 == 0.0
    assert found["headline"].startswith(f"Idle: nothing asked for in the last {found['window_s']:.0f} s")


async def test_who_is_in_the_file_and_never_came_is_missing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster: Cluster = await start(expected_instances={"d0": "decode", "d1": "decode"})
    await cluster.workers(d0=Role.DECODE)
    assert (await verdict(cluster))["counts"]["decode"]["starting"] == 1
    monkeypatch.setattr(cluster.state.judge, "_started", cluster.state.judge._started - 100.0)
    found = await verdict(cluster)
    assert found["headline"].startswith("Degraded: 1 of 2 decode instances never came")
    assert found["problems"][0]["instances"] == ["d1"]


async def test_of_those_that_left_only_names_of_the_file_are_remembered(start: Start) -> None:
    cluster: Cluster = await start(expected_instances={"d0": "decode"})
    workers = await cluster.workers(d0=Role.DECODE, pod0=Role.DECODE, pod1=Role.DECODE)
    for worker in workers:
        await cluster.client.leave(worker.info)
    assert cluster.state.judge._left == {"d0"}


async def test_refusals_failures_and_predictions_are_counted(cluster: Cluster) -> None:
    await cluster.workers(d0=Role.DECODE)
    refused = {
        "job_id": "refused:1",
        "slo": "chat",
        "ended_s": time.time(),
        "phase": "refused",
        "code": "busy",
        "count": 30,
    }
    await cluster.news(refused, refused, *(outcome(f"a{n}", predicted="classifier") for n in range(10)))
    await cluster.news(*(outcome(f"b{n}", predicted="none") for n in range(30)))
    await cluster.news(
        *(outcome(f"c{n}", failed=True, phase="failed", code="peer_lost", ttft_s=None) for n in range(2))
    )
    problems = {one["what"]: one for one in (await verdict(cluster))["problems"]}
    assert problems["refusals"]["text"] == "42 % of requests refused (30 of 72)"
    assert "30 busy" in problems["refusals"]["cause"]
    assert "2 peer_lost" in problems["errors"]["cause"]
    assert problems["predictor_fallback"]["value"] == 0.75
    assert (await cluster.client.slo())[0].requests == 42  # those that never were jobs are none


async def test_gateways_and_schedulers_that_fall_silent_and_those_that_leave(cluster: Cluster) -> None:
    await cluster.workers(d0=Role.DECODE)
    await cluster.news(gateways={"gateway-0": 0.0, "gateway-1": 12.0})
    found = await verdict(cluster)
    assert found["headline"] == "Degraded: 1 of 2 gateways silent for 12 s"
    await cluster.news(gateways={"gateway-0": 0.0, "gateway-1": 12.5}, left=["gateway-1"])
    assert (await verdict(cluster))["problems"] == []
    await cluster.news(gateways={"gateway-0": 0.0, "gateway-1": 13.0})  # told by one that has not heard of it
    assert (await verdict(cluster))["problems"] == []
    peers = cluster.state.judge.peers
    peers._schedulers["s0"] -= 11.0
    assert (await verdict(cluster))["problems"][0]["what"] == "scheduler_gone"
    await cluster.news(leaving=True)
    assert (await verdict(cluster))["problems"] == []


async def test_history_outlives_the_monitor(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    # Pages are of the end of a point: each point has its whole length, and a rate says how many there were.
    page_end = SimpleNamespace(time=lambda: (time.time() // LEAST_S + 1) * LEAST_S - 0.001)
    monkeypatch.setattr("services.cluster_monitor.routes.time", page_end)
    first: Cluster = await start(load_sample_s=0.05)
    await first.worker("d0", Role.DECODE)
    await first.wait_ready("d0", Role.DECODE)
    fields = {"free_blocks": 250, "running": 4, "waiting": 2}
    refused = {"job_id": "r", "slo": "batch", "ended_s": time.time(), "phase": "refused", "code": "busy", "count": 3}
    await first.news(
        outcome("a"), outcome("b", ttft_s=2.0, longest_gap_s=0.4, gaps_over=1), outcome("c", phase="cancelled"), refused
    )
    await until(lambda: first.state.registry.get("d0").load.time_s > 0, "a heartbeat")
    await until(lambda: first.state.judge is not None and first.store.ready.is_set(), "the database")

    async def seen() -> bool:
        page = await first.get("/history/instances?minutes=5&points=30")
        return "ready" in page["instances"].get("d0", {}).get("state", ())

    await until(seen, "d0 in the database", 30.0)
    await first.stop()

    second: Cluster = await start(load_sample_s=0.05)
    await until(lambda: second.store.ready.is_set(), "the database")
    await second.news(outcome("d"))
    worker = await second.worker("p0", Role.PREFILL)
    worker.load = InstanceLoad(**fields)
    await until(lambda: second.seen("p0") and second.seen("p0").load.running == 4, "its load")

    def number(name: str, columns: dict[str, Any]) -> int:
        return round(sum(rate or 0.0 for rate in columns[name]) * LEAST_S)

    async def written() -> dict[str, Any] | None:
        found: dict[str, Any] = await second.get("/history?minutes=5&points=30")
        series = found["series"]
        return found if number("requests_per_s", series) >= 7 and any(series["running"][-3:]) else None

    page = await until(written, "requests and loads in the database", 30.0)
    assert (page["step_s"], len(page["time_s"])) == (LEAST_S, 30)
    series, chat = page["series"], page["classes"]["chat"]
    assert number("requests_per_s", series) == 7
    assert (number("requests_per_s", chat), number("cancelled_per_s", chat), number("refused_per_s", series)) == (
        4,
        1,
        3,
    )
    assert number("output_tokens_per_s", chat) == 80
    met = [value for value in chat["attainment"] if value is not None]
    assert min(met) < 1.0
    assert page["targets"] == {"ttft_s": 1.0, "tpot_s": 0.06, "itl_s": 0.25}
    assert max(value for value in chat["gap_p90_s"] if value is not None) == pytest.approx(0.4, rel=0.05)
    assert min(value for value in chat["itl_attainment"] if value is not None) < 1.0
    known = [value for value in chat["stage_decode_s"] if value is not None]
    assert known[-1] == pytest.approx(1.0)
    assert any(value and value > 0.05 for value in series["kv_used_prefill"] if value is not None)
    assert series["running"][0] is None  # nobody was there to see it

    instances = (await second.get("/history/instances?minutes=5&points=30"))["instances"]
    assert set(instances) == {"d0", "p0"}
    assert instances["p0"]["role"][-1] == "prefill" or instances["p0"]["role"][-2] == "prefill"
    assert "decode" in instances["d0"]["role"]
    assert {"ready", "dead"} & set(instances["d0"]["state"])  # the last of ten seconds, in which it may have left
    one = (await second.get("/history/instances?minutes=5&points=30&instance=p0"))["instances"]
    assert set(one) == {"p0"}
    assert any(value for value in one["p0"]["running"] if value is not None)
    assert (await request(second.transport, "GET", "/history/instances?instance=nobody")).status_code == 404


async def test_flips_and_deaths_are_marks(cluster: Cluster) -> None:
    await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL)
    await cluster.client.flip("p0", who="anna")
    await cluster.stack.aclose()
    await until(lambda: cluster.state.events.newest(10, 0.0, (), "p1"), "p1 has died")
    await until(lambda: any(e.kind == "death" for e in cluster.state.events.newest(10)), "a death")
    marks = (await cluster.get("/history"))["marks"]
    assert ("flip", "p0", "prefill → decode by anna") in [(m["kind"], m["instance_id"], m["text"]) for m in marks]
    assert "death" in {mark["kind"] for mark in marks}


@pytest.mark.parametrize(
    "query", ["/history?minutes=4", "/history?minutes=1441", "/history?points=1", "/history/instances?points=x"]
)
async def test_windows_that_are_not_kept_are_a_400(cluster: Cluster, query: str) -> None:
    answer = await request(cluster.transport, "GET", query)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("minutes", "points", "step_s", "number"),
    [
        (5, 120, 10, 30),
        (60, 120, 30, 120),
        (60, 60, 60, 60),
        (180, 120, 120, 90),
        (1440, 120, 720, 120),
        (1440, 2, 43200, 2),
    ],
)
def test_points_are_whole_steps_of_rows(minutes: int, points: int, step_s: int, number: int) -> None:
    grid = Grid.up_to(1_000_003.0, minutes, points)
    assert (grid.step_s, len(grid.times)) == (step_s, number)
    assert grid.from_s % step_s == 0
    assert grid.to_s - step_s <= 1_000_003.0 < grid.to_s
    assert step_s % grid.level((10, 60, 600)) in (0, step_s % 600)
    assert grid.at(1_000_003.0) == number - 1


@asynccontextmanager
async def instance_http(port: int, answers: dict[str, Any]) -> AsyncIterator[None]:
    """An HTTP server that answers some paths; others never."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        if path in answers:
            body = json.dumps(answers[path]).encode()
            head = (
                b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            )
            writer.write(head % len(body) + body)
            writer.close()
        else:
            await reader.read()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()


DETAILS = InstanceDetails(
    instance_id="d0",
    started_s=1.0,
    uptime_s=5.0,
    versions={"python": "3.12"},
    steps=Steps(0, []),
    rates=StepCosts(None, None),
    link=None,
    codecs={},
    prefixes=PrefixCache(0, 64, 0, 0),
    preemptions=0,
)


async def test_what_an_instance_tells_of_itself(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    info = make_info("d0", free_address(), http=f"http://127.0.0.1:{port}")
    await cluster.worker("d0", Role.DECODE, info=info)
    await cluster.wait_ready("d0", Role.DECODE)
    away = await request(cluster.transport, "GET", "/instances/d0/details")
    assert (away.status_code, away.json()["error"]["code"]) == (503, "unavailable")
    async with instance_http(port, {"/details": msgspec.to_builtins(DETAILS), "/log?lines=2": {"lines": ["a", "b"]}}):
        told = await cluster.get("/instances/d0/details")
        assert (told["uptime_s"], told["known"]["instance_id"], told["restarts"]) == (5.0, "d0", 0)
        assert await cluster.get("/instances/d0/log?lines=2") == {"lines": ["a", "b"]}
        with monkeypatch.context() as patch:
            patch.setattr("services.cluster_monitor.routes.INSTANCE_TIMEOUT_S", 0.3)
            hanging = await request(cluster.transport, "GET", "/instances/d0/log?lines=3")
        assert (hanging.status_code, hanging.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert (await request(cluster.transport, "GET", "/instances/x/details")).status_code == 404
    assert (await request(cluster.transport, "GET", "/instances/d0/log?lines=0")).status_code == 400
    await cluster.stack.aclose()
    await until(lambda: not cluster.state.registry.get("d0").alive, "d0 has died")
    dead = await request(cluster.transport, "GET", "/instances/d0/log")
    assert dead.status_code == 503
    assert "d0 is dead (connection lost)" in dead.json()["error"]["message"]


async def test_events_of_one_instance_and_of_a_time(cluster: Cluster) -> None:
    await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL)
    found = await cluster.get("/events?instance=p0")
    assert {event["instance_id"] for event in found} == {"p0"}
    assert await cluster.get(f"/events?before={found[-1]['time_s']}&instance=p0") == []
    last = await cluster.get(f"/events?before={found[0]['time_s'] + 1}&instance=p0&limit=1")
    assert last == found[:1]
    with pytest.raises(InvalidRequest):
        await cluster.client.flip("p0", operation_id="x y")
    await cluster.client.flip("p0", operation_id="op-1")
    refused = await request(cluster.transport, "POST", "/instances/p1/flip", {"operation_id": "op-2"})
    assert refused.status_code == 409  # the last of its role
    (event,) = await cluster.get("/events?kind=operation_refused")
    assert (event["operation_id"], event["instance_id"]) == ("op-2", "p1")


async def test_what_became_of_plans_is_told_once(cluster: Cluster) -> None:
    event = {"event_id": "plan-1:plan_proposed", "kind": "plan_proposed", "text": "one more", "subject": "plan-1"}
    for _ in range(2):
        await cluster.client.report_event(event)
    (told,) = await cluster.get("/events?kind=plan_proposed")
    assert (told["subject"], told["text"]) == ("plan-1", "one more")
    with pytest.raises(InvalidRequest, match="only the monitor itself reports death"):
        await cluster.client.report_event({**event, "kind": "death"})


async def test_a_change_of_the_verdict_is_an_event(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.cluster_monitor.situation.STEADY", 1)
    monkeypatch.setattr("services.cluster_monitor.situation.FRESH_S", 0.0)
    await cluster.workers(d0=Role.DECODE)
    await cluster.news(gateways={"gateway-0": 60.0})
    await until(lambda: cluster.state.events.newest(5, 0.0, ()), "events")

    def kinds() -> list[str]:
        return [event.kind for event in cluster.state.events.newest(50)]

    await until(lambda: {"verdict", "gateway_gone"} <= set(kinds()), "told of")
    await cluster.news(gateways={"gateway-0": 0.0})
    await until(lambda: "gateway_returned" in kinds() and kinds().count("verdict") == 2, "told of its return")


GATEWAYS = [ScrapeTarget(service="gateway", process=f"gateway-{n}", url=f"http://10.0.0.1:80{n}") for n in range(2)]


def record(name: str, http: str) -> Any:
    return cast(Any, SimpleNamespace(instance_id=name, info=SimpleNamespace(http=http)))


def test_each_process_is_a_target_and_the_monitor_speaks_for_itself() -> None:
    records = [record("d0", "http://10.0.0.2:8401"), record("a1", "https://10.0.0.3:8401")]
    assert targets(GATEWAYS, records, "monitor:8200") == [
        TargetGroup(["10.0.0.1:800"], {"service": "gateway", "process": "gateway-0"}),
        TargetGroup(["10.0.0.1:801"], {"service": "gateway", "process": "gateway-1"}),
        TargetGroup(["monitor:8200"], {"service": "monitor", "process": "monitor"}),
        TargetGroup(
            ["10.0.0.3:8401"], {"service": "worker", "process": "a1", "instance_id": "a1", "__scheme__": "https"}
        ),
        TargetGroup(["10.0.0.2:8401"], {"service": "worker", "process": "d0", "instance_id": "d0"}),
    ]


def test_monitors_that_it_was_told_of_are_all() -> None:
    told = [ScrapeTarget(service="monitor", process=name, url=f"http://{name}:8200") for name in ("one", "standby")]
    assert [group.targets for group in targets(told, (), "one:8200")] == [["one:8200"], ["standby:8200"]]


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
        return MonitorSettings(monitor_id=name, lease_s=5.0, database_url=sqlite(tmp_path), **addresses)

    first, other = create_app(settings("one")), create_app(settings("two"))
    async with running(first) as acting:
        await until(lambda: first.state.leadership.state is not None, "it acts", timeout_s=20)
        async with running(other) as standby:
            told = await request(acting, "GET", "/sd/prometheus")
            assert [group["labels"]["process"] for group in told.json()] == ["monitor"]
            refused = await request(standby, "GET", "/sd/prometheus")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "standby")
