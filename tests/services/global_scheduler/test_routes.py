"""Searching requests, whose they are, and what is known of one under way."""

import time
from typing import Any

import pytest

from shared.domain.job import LengthPrediction, Phase, Slo
from shared.domain.kv import TransferOutcome, TransferReport
from shared.domain.route import Reason
from shared.errors import NotFound
from shared.store.reading import read_request, read_timeline
from shared.timeline import Decision, RequestTimeline, Span, SpanRecord
from shared.wire.api.scheduler import StoredRequest
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.messages import Refused
from shared.wire.rpc_client import RpcClients
from tests.ports import free_port
from tests.services.control_plane import request, until
from tests.services.global_scheduler.conftest import Scheduler, Start, of_timeline, report
from tests.services.global_scheduler.test_reports import json_sink


async def search(scheduler: Scheduler, query: str) -> Any:
    answer = await request(scheduler.transport, "GET", f"/requests/search?{query}")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def found(scheduler: Scheduler, query: str) -> list[str]:
    return [row["job_id"] for row in (await search(scheduler, query))["rows"]]


async def written(scheduler: Scheduler) -> None:
    await until(lambda: scheduler.state.store.ready.is_set() and not scheduler.state.store.queued, "written")


@pytest.fixture
async def filled(scheduler: Scheduler) -> Scheduler:
    now = time.time()
    reports = [
        report("chat-1", arrived_s=now - 100, caller="anna", slo="chat", ttft_s=0.2, tpot_s=0.05),
        report("chat-2", arrived_s=now - 90, caller="bert", slo="chat", ttft_s=3.0, slo_met=False),
        report("batch-1", arrived_s=now - 80, caller="anna", slo="batch", ttft_s=1.0, tpot_s=0.5, decode_instance="d1"),
        report("chat-3", Phase.FAILED, arrived_s=now - 70, slo="chat", outcome="peer_lost", ttft_s=None, slo_met=None),
        report("chat-4", Phase.DECODE, arrived_s=now - 60, slo="chat", outcome="", ttft_s=None, slo_met=None),
    ]
    await scheduler.client.report(reports, timeout_s=5)
    await written(scheduler)
    return scheduler


@pytest.mark.parametrize(
    ("query", "jobs"),
    [
        ("", ["chat-4", "chat-3", "batch-1", "chat-2", "chat-1"]),
        ("job=chat", ["chat-4", "chat-3", "chat-2", "chat-1"]),
        ("job=chat-2", ["chat-2"]),
        ("job=hat", []),
        ("caller=anna", ["batch-1", "chat-1"]),
        ("slo=batch", ["batch-1"]),
        ("instance=d1", ["batch-1"]),
        ("instance=p0&caller=bert", ["chat-2"]),
        ("outcome=peer_lost", ["chat-3"]),
        ("phase=decode", ["chat-4"]),
        ("missed=true", ["chat-2"]),
        ("missed=false", ["batch-1", "chat-1"]),
        ("order=slowest_ttft", ["chat-2", "batch-1", "chat-1"]),
        ("order=slowest_tpot&slo=batch", ["batch-1"]),
        ("order=longest&limit=2", ["chat-1", "chat-2"]),
        ("offset=1&limit=2", ["chat-3", "batch-1"]),
    ],
)
async def test_what_is_found(filled: Scheduler, query: str, jobs: list[str]) -> None:
    assert await found(filled, query) == jobs


async def test_pages_and_times(filled: Scheduler) -> None:
    page = await search(filled, "limit=2")
    assert (len(page["rows"]), page["more"]) == (2, True)
    assert (await search(filled, "limit=3&offset=2"))["more"] is False
    middle = (await search(filled, "job=batch-1"))["rows"][0]["arrived_s"]
    assert await found(filled, f"since={middle}&until={middle + 0.001}") == ["batch-1"]
    assert (await search(filled, "job=chat-1"))["rows"][0]["caller"] == "anna"
    assert "timeline" not in page["rows"][0]
    for bad in ("limit=0", "order=best", "missed=perhaps", "since=-1", "phase=x"):
        answer = await request(filled.transport, "GET", f"/requests/search?{bad}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request"), bad


async def test_the_timeline_of_a_job_under_way(scheduler: Scheduler) -> None:
    so_far = RequestTimeline("j", 100.0, 10, spans=[SpanRecord(Span.INTAKE, 100.0, 100.1)])
    so_far.decisions.append(Decision(100.1, "placement", "p0", (Reason("placement:single", {"chosen": "p0"}),)))
    await scheduler.client.report([report("j", Phase.PREFILL, **of_timeline(so_far, Phase.PREFILL))], timeout_s=5)
    told = await scheduler.admin.timeline("j")
    assert (told.outcome, told.ended_s, len(told.spans)) == ("", 0.0, 1)
    assert told.decisions[0].chosen == "p0"
    await written(scheduler)
    assert await read_request(scheduler.state.engine, StoredRequest, "j") is not None
    assert await read_timeline(scheduler.state.engine, "j") is None  # it is written once, at the end
    with pytest.raises(NotFound):
        await scheduler.admin.timeline("other")


async def test_what_the_monitor_is_told(start: Start) -> None:
    port = free_port()
    scheduler: Scheduler = await start(monitor_url=f"http://127.0.0.1:{port}")
    scheduler.state.reports._classes["chat"] = Slo("chat", 1.5, 0.15)
    timeline = RequestTimeline("a", 100.0, 100, 20, 100.5, 102.0, 102.1, "stop")
    timeline.spans = [
        SpanRecord(Span.QUEUE, 100.0, 100.2, "p0"),
        SpanRecord(Span.LOST, 100.2, 100.3, "p0"),
        SpanRecord(Span.QUEUE, 100.3, 100.4, "p1", 2),
        SpanRecord(Span.DECODE, 100.5, 102.0, "d0", 2),
    ]
    timeline.transfers = [TransferReport(TransferOutcome.PULLED, 10), TransferReport(TransferOutcome.RECOMPUTED, 10)]
    said = LengthPrediction(1, 100, 200, 0.6, "classifier", model="m1", classified=1)
    client = SchedulerClient(RpcClients(scheduler.sockets), [scheduler.settings.rpc_address], "gateway-7")
    async with json_sink(port) as taken:
        await client.report(
            [
                report("a", slo="chat", **of_timeline(timeline), asked=True, prediction=said),
                report("b", Phase.FAILED, slo="chat", outcome="overloaded", asked=True),
            ],
            timeout_s=5,
        )
        assert await client.refused([Refused("key-1", "chat", "busy", 4)], timeout_s=5)
        await until(lambda: len(taken.get("outcomes", [])) == 3, "all told")
        assert "gateway-7" in taken["gateways"][-1]
        await client.leave(timeout_s=5)
        await until(lambda: "gateway-7" in taken.get("left", []), "its leave is told", 10.0)
    assert taken["gateways"][-1] == {}
    a, b, refused = taken["outcomes"]
    assert a["seconds"] == pytest.approx({"queue": 0.3, "lost": 0.1, "decode": 1.5})
    assert a["whole_s"] == pytest.approx(2.1)
    assert (a["transfers"], a["transfers_failed"], a["predicted"], a["output_tokens"]) == (2, 1, "classifier", 20)
    assert (b["phase"], b["code"], b["predicted"]) == ("refused", "overloaded", "none")
    told = refused["job_id"], refused["phase"], refused["code"], refused["count"]
    assert told == ("refused:key-1", "refused", "busy", 4)


async def test_an_id_may_be_as_the_client_sent_it(filled: Scheduler) -> None:
    await filled.client.report([report("odd=2F=231-aa")], timeout_s=5)
    await written(filled)
    assert await found(filled, "job=odd/%231") == await found(filled, "job=odd=2F=231") == ["odd=2F=231-aa"]
