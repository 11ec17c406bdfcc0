import asyncio
import functools
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.global_scheduler.forward import DeliveryQueue, ForwardMetrics, post_all
from services.global_scheduler.reports import outcome_of
from shared.domain.estimated import PromptSize, RouteKind
from shared.domain.instance import Role
from shared.domain.job import LOST, JobView, LengthPrediction, Loss, Phase, Slo
from shared.domain.kv import TransferOutcome, TransferReport
from shared.domain.prompt import PrefixDelta
from shared.errors import EngineFailed, InstancesLost, NotFound
from shared.policy.demand import DemandCounter
from shared.store.reading import read_timeline
from shared.timeline import RequestTimeline, Span, SpanRecord
from shared.wire.api import LostInstance
from shared.wire.clients.http import JsonClient
from shared.wire.messages import JobReport
from tests.ports import free_port
from tests.services.control_plane import request, text, until
from tests.services.global_scheduler.conftest import Scheduler, Start, of_timeline, report


@asynccontextmanager
async def json_sink(port: int) -> AsyncIterator[dict[str, list[Any]]]:
    """An HTTP server that keeps the JSON lists posted to it, by path, or by their names in what is posted."""
    taken: dict[str, list[Any]] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                sizes = [line.split(":")[1] for line in lines if line.lower().startswith("content-length")]
                body = await reader.readexactly(int(sizes[0]))
                told = json.loads(body)
                lists = told if isinstance(told, dict) else {lines[0].split()[1]: told}
                for name, rows in lists.items():
                    taken.setdefault(name, []).extend(rows if isinstance(rows, list) else [rows])
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield taken
    finally:
        server.close()


async def test_reports_are_served_from_memory_and_reach_the_database(scheduler: Scheduler) -> None:
    await scheduler.client.report([report("j1", Phase.QUEUED), report("j2", Phase.DECODE)], timeout_s=5)
    await scheduler.client.report([report("j1", Phase.PREFILL)], timeout_s=5)
    assert [(r.job_id, r.phase) for r in await scheduler.admin.requests()] == [("j2", "decode"), ("j1", "prefill")]
    assert [r.job_id for r in await scheduler.admin.requests(phase="decode")] == ["j2"]
    with pytest.raises(NotFound, match="yet"):
        await scheduler.admin.timeline("j1")
    await scheduler.client.report([report("j1")], timeout_s=5)
    assert (await scheduler.admin.request("j1")).slo_met is True
    timeline = await scheduler.admin.timeline("j1")
    assert (timeline.job_id, timeline.prompt_tokens) == ("j1", 100)

    async def stored() -> bool:
        if not scheduler.state.store.ready.is_set():
            return False
        kept = await read_timeline(scheduler.state.engine, "j1")
        return kept is not None and msgspec.json.decode(kept, type=RequestTimeline) == timeline

    await until(stored, "j1 in the database")
    listed = await request(scheduler.transport, "GET", "/requests?source=database&limit=10")
    assert {row["job_id"] for row in listed.json()} == {"j1", "j2"}


async def test_a_report_that_was_overtaken_changes_nothing(scheduler: Scheduler) -> None:
    await scheduler.client.report([report("j"), report("j", Phase.DECODE), report("j")], timeout_s=5)
    assert (await scheduler.admin.request("j")).phase == "completed"


async def test_what_left_the_memory_is_read_from_the_database(start: Start) -> None:
    scheduler: Scheduler = await start(ring_jobs=3)
    await scheduler.client.report([report(f"j{n}") for n in range(5)], timeout_s=5)
    assert [r.job_id for r in await scheduler.admin.requests()] == ["j4", "j3", "j2"]
    await until(lambda: scheduler.state.store.ready.is_set() and not scheduler.state.store.queued, "written")
    assert (await scheduler.admin.request("j0")).job_id == "j0"
    assert (await scheduler.admin.timeline("j0")).job_id == "j0"
    for call in (scheduler.admin.request, scheduler.admin.timeline):
        with pytest.raises(NotFound, match="nobody"):
            await call("nobody")


async def test_bad_queries_are_a_400(scheduler: Scheduler) -> None:
    for path in ("/requests?phase=dancing", "/requests?limit=0", "/requests?limit=x", "/requests?source=disk"):
        answer = await request(scheduler.transport, "GET", path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request"), path


async def test_a_dead_database_hinders_nothing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "folder.db").mkdir()
    scheduler: Scheduler = await start(database_url=f"sqlite:///{tmp_path}/folder.db", queue_rows=5)
    await scheduler.hear(p0=Role.PREFILL, d0=Role.DECODE)
    assert await scheduler.client.place(JobView("j", 10, 10), timeout_s=2)
    await scheduler.client.report([report(f"j{n}") for n in range(20)], timeout_s=2)
    assert (await scheduler.admin.timeline("j3")).job_id == "j3"
    metrics = await text(scheduler.transport, "/metrics")
    assert 'polyphase_store_dropped_total{cause="queue_full"} 15.0' in metrics
    answer = await request(scheduler.transport, "GET", "/requests/unknown")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")


async def test_outcomes_and_lengths_are_forwarded_with_the_targets_of_their_class(start: Start) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    scheduler: Scheduler = await start(monitor_url=url, predictor_urls=(url,))
    await scheduler.hear(p0=Role.PREFILL, d0=Role.DECODE)
    slo = Slo("chat", ttft_s=1.5, tpot_s=0.15)
    await scheduler.client.place(JobView("j1", 10, 10, slo=slo), timeout_s=5)
    said = LengthPrediction(1, 100, 200, 0.6, "observed", model="m1", classified=2)
    async with json_sink(port) as taken:
        await scheduler.client.report(
            [
                report("j1", slo="chat", max_tokens=64, prediction=said),
                report("j2", Phase.FAILED, slo="chat", outcome="peer_lost", slo_met=False),
                report("j3", Phase.CANCELLED, slo="chat"),
                report("j4", Phase.DECODE),
            ],
            timeout_s=5,
        )
        await until(lambda: taken.get("outcomes") and taken.get("/v1/observations"), "both forwarded")
    assert [(o["ttft_target_s"], o["phase"], o["failed"], o["code"]) for o in taken["outcomes"]] == [
        (1.5, "completed", False, "stop"),
        (1.5, "failed", True, "peer_lost"),
        (1.5, "cancelled", False, "stop"),
    ]
    assert taken["/v1/observations"] == [
        {
            "prompt_tokens": 100,
            "output_tokens": 20,
            "max_tokens": 64,
            "model": "m1",
            "classified": 2,
            "expected_tokens": 150.0,
        }
    ]


async def test_lengths_go_to_every_replica_and_wait_for_the_one_that_is_away(start: Start) -> None:
    ports = [free_port(), free_port()]
    urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
    scheduler: Scheduler = await start(monitor_url="", predictor_urls=urls)
    async with json_sink(ports[1]) as there:
        await scheduler.client.report([report("j1")], timeout_s=5)
        await until(lambda: "/v1/observations" in there, "one has it")
        async with json_sink(ports[0]) as back:
            await until(lambda: "/v1/observations" in back, "the other has it, too")
    (seen,) = there["/v1/observations"]
    assert (seen["prompt_tokens"], seen["output_tokens"]) == (100, 20)
    assert back == there


async def test_outcomes_wait_for_a_monitor_that_is_away(start: Start) -> None:
    port = free_port()
    scheduler: Scheduler = await start(monitor_url=f"http://127.0.0.1:{port}")
    for first in range(0, 600, 100):  # 563 were lost in one outage once
        await scheduler.client.report([report(f"j{first + n}") for n in range(100)], timeout_s=5)

    async def shows(line: str) -> bool:
        return line in await text(scheduler.transport, "/metrics")

    await until(lambda: shows('polyphase_scheduler_forward_waiting{to="monitor"} 600.0'), "all wait")
    async with json_sink(port) as taken:
        await until(lambda: shows('polyphase_scheduler_forwarded_total{to="monitor"} 600.0'), "all delivered")
        assert [one["job_id"] for one in taken["outcomes"]] == [f"j{n}" for n in range(600)]
    assert not await shows("polyphase_scheduler_forward_dropped_total{")


async def test_of_too_many_that_wait_the_oldest_are_dropped_and_counted() -> None:
    port, registry = free_port(), CollectorRegistry()
    async with JsonClient(f"http://127.0.0.1:{port}") as client:
        waiting = DeliveryQueue("predictor", ForwardMetrics(registry), capacity=10)
        for number in range(15):
            waiting.add({"number": number})
        await post_all(waiting, client, "/v1/observations")
        for number in range(15, 18):
            waiting.add({"number": number})
        async with json_sink(port) as taken:
            await post_all(waiting, client, "/v1/observations")
    assert [one["number"] for one in taken["/v1/observations"]] == list(range(8, 18))
    counts = generate_latest(registry).decode()
    assert 'polyphase_scheduler_forward_dropped_total{cause="full",to="predictor"} 8.0' in counts


async def test_metrics_of_placements(scheduler: Scheduler) -> None:
    await scheduler.hear(p0=Role.PREFILL, d0=Role.DECODE)
    await scheduler.client.place(JobView("j", 10, 10), timeout_s=5)
    metrics = await text(scheduler.transport, "/metrics")
    assert 'polyphase_scheduler_chosen_total{instance_id="p0",role="prefill"} 1.0' in metrics
    assert "polyphase_scheduler_decision_seconds_count 1.0" in metrics


async def test_series_of_instances_that_are_gone_are_bounded(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.global_scheduler.placer.GONE_SERIES", 2)

    async def chosen() -> list[str]:
        metrics = (await text(scheduler.transport, "/metrics")).splitlines()
        return [line.split('"')[1] for line in metrics if line.startswith("polyphase_scheduler_chosen_total")]

    for number in range(8):
        await scheduler.hear(**{f"p{number}": Role.PREFILL, "d0": Role.DECODE})
        await scheduler.client.place(JobView(f"j{number}", 10, 10), timeout_s=5)
        named = await chosen()
        assert f"p{number}" in named
        assert len(named) <= 2 + 2 * 2 + 1


async def test_the_setting_bounds_what_is_known_of_prefix_caches(start: Start) -> None:
    bounded: Scheduler = await start(prefix_blocks=100)
    placer = bounded.state.placer
    assert placer.apply_prefixes("p0", PrefixDelta(1, 0, added=list(range(500)), starts=True))
    assert len(placer.decider.prefixes) == 100


def ended(timeline: RequestTimeline) -> JobReport:
    return JobReport("j", "gateway-0", Phase.COMPLETED, 10.0, 100, slo="chat", **of_timeline(timeline))


def test_time_before_the_first_token_is_told_by_itself() -> None:
    spans = [
        SpanRecord(Span.QUEUE, 10.0, 11.0),
        SpanRecord(Span.PREFILL, 11.0, 13.0),
        SpanRecord(Span.DECODE, 14.0, 20.0),
    ]
    spans.append(SpanRecord(Span.TRANSFER, 12.5, 14.0))  # beside the prefill, and beyond it
    told = outcome_of(
        ended(RequestTimeline("j", 10.0, first_token_s=13.0, ended_s=20.0, spans=spans)), Slo("chat"), 21.0
    )
    assert told.seconds == {"queue": 1.0, "prefill": 2.0, "decode": 6.0, "transfer": 1.5}
    assert told.before_first == {"queue": 1.0, "prefill": 2.0, "transfer": 0.5}


def test_without_a_first_token_all_of_it_was_before() -> None:
    spans = [SpanRecord(Span.PLACEMENT, 10.0, 13.0)]
    told = outcome_of(ended(RequestTimeline("j", 10.0, ended_s=13.0, spans=spans)), Slo("chat"), 21.0)
    assert told.before_first == pytest.approx({"placement": 3.0})


def test_the_times_of_a_job_that_was_lost_with_its_gateway_are_those_of_its_last_report() -> None:
    timeline = RequestTimeline("j", 10.0, spans=[SpanRecord(Span.PLACEMENT, 10.0, 13.0)])
    last = JobReport("j", "gateway-0", Phase.PREFILL, 10.0, 100, slo="chat", **of_timeline(timeline, Phase.PREFILL))
    assert last.sums is None
    lost = msgspec.structs.replace(last, phase=Phase.FAILED, outcome=LOST)
    assert outcome_of(lost, Slo("chat"), 21.0).seconds == {"placement": 3.0}


def test_faults_of_transfers_are_told_by_their_codes() -> None:
    errors = ("unreachable: tcp://h:1: refused", "unreachable: h:2", "?")
    moved = [TransferReport(TransferOutcome.RECOMPUTED, error=error) for error in errors]
    moved += [TransferReport(TransferOutcome.PULLED, wire_bytes=500), TransferReport(TransferOutcome.LOCAL)]
    told = outcome_of(ended(RequestTimeline("j", 10.0, transfers=moved)), Slo("chat"), 21.0)
    assert (told.transfers, told.transfers_failed) == (4, 3)
    assert told.transfer_bytes == 500
    assert told.transfer_faults == {"unreachable": 2, "unknown": 1}


def test_the_losses_of_a_request_that_was_refused_for_them_are_told() -> None:
    losses = [Loss(3, "d0", 1), Loss(3, "d1", 1)]
    refused = JobReport("j", "g", Phase.FAILED, 10.0, 100, outcome=InstancesLost.code, losses=losses)
    assert outcome_of(refused, Slo("chat"), 21.0).losses == [LostInstance(3, "d0"), LostInstance(3, "d1")]
    failed = JobReport("j", "g", Phase.FAILED, 10.0, 100, outcome=EngineFailed.code, losses=losses)
    assert not outcome_of(failed, Slo("chat"), 21.0).losses


@pytest.fixture
def counts_through_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler leaves seconds out in which it stood still: a busy machine may have it stand still here."""
    patient = functools.partial(DemandCounter, pause_s=300.0)
    monkeypatch.setattr("services.global_scheduler.monitor_reporter.DemandCounter", patient)


@pytest.mark.usefixtures("counts_through_pauses")
async def test_first_placements_are_told_by_the_second(start: Start) -> None:
    port = free_port()
    scheduler: Scheduler = await start(monitor_url=f"http://127.0.0.1:{port}")
    await scheduler.hear(p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    async with json_sink(port) as taken:
        await until(lambda: taken.get("demand"), "a second told", timeout_s=30)
        assert {row["requests"] for row in taken["demand"]} == {0}
        said = LengthPrediction(1, 100, 200, 0.9, "classifier")
        slo = Slo("chat", 0.5, 0.1)
        for number in range(3):
            await scheduler.client.place(JobView(f"j{number}", 100, 500, slo, said), timeout_s=5)
        await scheduler.client.place(
            JobView("j0", 100, 500, slo, said), exclude=("p0",), timeout_s=5
        )  # it failed there
        await scheduler.client.report([report("j1", Phase.DECODE)], timeout_s=5)
        await scheduler.client.place(JobView("j1", 130, 470, slo, said), timeout_s=5)  # it goes on elsewhere

        def told() -> bool:
            rows = taken["demand"]
            return bool(sum(row["requests"] for row in rows) >= 3 and rows[-1]["requests"] == 0)

        await until(told, "all told, and a second after them", timeout_s=30)
    rows = taken["demand"]
    assert sum(row["requests"] for row in rows) == 3
    assert sum(row["prompt_tokens"] for row in rows) == 300.0
    assert 3 * 100 < sum(row["output_tokens"] for row in rows) < 3 * 200
    assert sum(row["per_ttft"] for row in rows) == 6.0
    assert sum(row["split_least"] for row in rows) == 3.0  # split: full
    assert {row["source"] for row in rows} == {"scheduler-0"}
    seconds = [row["second"] for row in rows]
    assert seconds == list(range(seconds[0], seconds[0] + len(seconds)))


@pytest.mark.usefixtures("counts_through_pauses")
async def test_a_quiet_scheduler_tells_of_several_seconds_at_once(start: Start) -> None:
    port = free_port()
    await start(monitor_url=f"http://127.0.0.1:{port}")
    async with json_sink(port) as taken:
        await until(lambda: len(taken.get("demand", ())) >= 4, "four seconds told", timeout_s=60)
    assert len(taken["revision"]) <= len(taken["demand"]) / 2 + 1  # each message tells of its policies


async def test_predictions_are_compared_with_their_outcomes(start: Start) -> None:
    scheduler = await start(placement="adaptive", split="adaptive", dispatch="adaptive")
    await scheduler.hear(p0=Role.PREFILL, d0=Role.DECODE)
    now = time.time()
    route = await scheduler.client.place(JobView("j1", 100, 50), timeout_s=5)
    estimated = route.estimated
    assert estimated is not None
    assert estimated.decodes == "d0"
    ttft_s = 0.5 + 2.0 * estimated.ttft_s  # half a second before its placement
    made = {"arrived_s": now - 0.5, "placed_s": now, "estimated": estimated, "ttft_s": ttft_s}
    await scheduler.client.report([report("j1", **made, tpot_s=estimated.tpot_s)], timeout_s=5)
    lost = report("j2", **made, tpot_s=9.0, losses=[Loss(3, "d0", 1)])
    short = report("j3", **made, tpot_s=9.0, output_tokens=2)
    await scheduler.client.report([lost, short, report("j4")], timeout_s=5)

    row = await scheduler.admin.request("j1")
    assert row.predicted_ttft_s == pytest.approx(0.5 + estimated.ttft_s, abs=1e-3)
    assert row.predicted_tpot_s == estimated.tpot_s
    known = await scheduler.admin.predictions()
    by_instance = {one.instance_id: one for one in known.instances}
    ttft, tpot = by_instance[estimated.computes].ttft, by_instance["d0"].tpot
    assert ttft is not None
    assert ttft.count == 2
    assert ttft.bias == pytest.approx(-0.5, abs=0.01)
    assert tpot is not None
    assert tpot.count == 1
    assert tpot.median == pytest.approx(0.0)
    (kind,) = known.kinds
    assert (kind.route, kind.prompt) == (estimated.kind, PromptSize.SHORT)
    said = await text(scheduler.transport, "/metrics")
    assert 'polyphase_scheduler_prediction_error_ratio_count{prompt="short"' in said
    assert f'polyphase_scheduler_instance_prediction_error_ratio{{instance_id="{estimated.computes}"' in said


async def test_fixed_policies_predict_where_they_name_both_instances(start: Start) -> None:
    scheduler = await start(split="none", dispatch="random")
    await scheduler.hear(p0=Role.PREFILL, d0=Role.DECODE)
    whole = await scheduler.client.place(JobView("j1", 100, 50), timeout_s=5)
    assert whole.decode is not None
    assert whole.estimated is not None
    assert whole.estimated.kind is RouteKind.WHOLE
    assert whole.estimated.ttft_s > 0.0
    again = await scheduler.client.place(JobView("j1", 100, 50, begun=True), timeout_s=5)
    assert again.estimated is None
