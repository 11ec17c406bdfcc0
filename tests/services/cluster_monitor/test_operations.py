"""Operations have an id and a deadline: none is carried out when nobody waits, and each can be asked for."""

import asyncio
import signal
import time
from pathlib import Path

import pytest

from services.cluster_monitor.settings import MonitorSettings
from services.launcher import operate
from shared.domain.instance import InstanceState, Role
from shared.errors import (
    Conflict,
    DeadlineExceeded,
    EngineFailed,
    NotFound,
    OutcomeUnknown,
    PolyphaseError,
    Unavailable,
)
from shared.wire.clients import monitor as monitor_client
from shared.wire.clients.monitor import MonitorClient
from tests.ports import free_address, free_port
from tests.services.cluster_monitor.conftest import Cluster, Start
from tests.services.cluster_monitor.test_processes import process
from tests.services.control_plane import request, sqlite, until
from tests.services.fake_worker import fake_worker, make_info


async def test_the_same_id_again_is_the_same_operation(cluster: Cluster) -> None:
    worker, *_ = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL)
    worker.drain_gate = asyncio.Event()
    first = asyncio.ensure_future(cluster.client.flip("p0", operation_id="mine"))
    await until(lambda: worker.calls, "draining")
    again = asyncio.ensure_future(cluster.client.flip("p0", operation_id="mine"))
    assert (await cluster.client.operation("mine"))["result"] == "running"
    worker.drain_gate.set()
    assert await first == await again == await cluster.client.flip("p0", operation_id="mine")
    assert worker.calls == ["drain", "flip", "resume"]
    assert (await cluster.client.operation("mine"))["result"] == "succeeded"
    with pytest.raises(Conflict, match="'mine' is a flip of p0"):
        await cluster.client.drain("p0", timeout_s=1, operation_id="mine")


async def test_a_failure_and_a_refusal_are_told_again_as_they_were(cluster: Cluster) -> None:
    worker, *_ = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    worker.fail_flip = True
    for _ in range(2):
        with pytest.raises(EngineFailed, match="stuck"):
            await cluster.client.flip("p0", operation_id="fails")
        with pytest.raises(Conflict, match="last ready decode"):
            await cluster.client.drain("d0", timeout_s=1, operation_id="refused")
    assert worker.calls == ["drain", "flip", "resume"]
    assert (await cluster.client.operation("refused"))["result"] == "refused"
    with pytest.raises(NotFound, match="never arrived"):
        await cluster.client.operation("nobody's")


async def test_what_arrives_after_its_deadline_is_not_begun(cluster: Cluster) -> None:
    worker, _ = await cluster.workers(d0=Role.DECODE, d1=Role.DECODE)
    late = {"operation_id": "late", "deadline_s": time.time() - 3}
    for what in ("drain", "flip", "resume"):
        answer = await request(cluster.transport, "POST", f"/instances/d0/{what}", {**late, "operation_id": what})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, DeadlineExceeded.code)
        assert "s after its deadline, and nothing was done" in answer.json()["error"]["message"]
        assert (await cluster.client.operation(what))["result"] == "expired"
    assert worker.calls == []
    assert cluster.state.registry.get("d0").state is InstanceState.READY


async def test_an_operation_ends_by_its_deadline(cluster: Cluster) -> None:
    worker, _ = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL)
    worker.drain_gate = asyncio.Event()
    body = {"operation_id": "op", "deadline_s": time.time() + 0.5, "drain_timeout_s": 60}
    answer = await request(cluster.transport, "POST", "/instances/p0/flip", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, DeadlineExceeded.code)
    assert worker.calls == ["drain", "resume"]
    await cluster.wait_ready("p0", Role.PREFILL)
    assert (await cluster.client.operation("op"))["result"] == "failed"


async def test_bad_terms_are_a_400(cluster: Cluster) -> None:
    for body in ({"operation_id": "a b"}, {"operation_id": "x" * 200}, {"deadline_s": "soon"}):
        answer = await request(cluster.transport, "POST", "/instances/p0/resume", body)
        assert answer.status_code == 400, body


async def test_an_operation_that_the_monitor_did_not_survive_is_unknown(start: Start) -> None:
    first: Cluster = await start(silence_s=5.0)  # the workers are on its loop: while it stalls they cannot beat
    worker, _ = await first.workers(p0=Role.PREFILL, p1=Role.PREFILL)
    await until(first.store.ready.is_set, "the schema is there", timeout_s=30)
    worker.drain_gate = asyncio.Event()
    flipping = asyncio.ensure_future(first.client.flip("p0", operation_id="op"))
    await until(lambda: worker.calls and not first.store.queued, "begun, and on record", timeout_s=30)
    flipping.cancel()  # in memory there is no process to kill: nothing more of this monitor reaches the database
    first.state.store._rows.clear()
    first.state.store.put = lambda *_, **__: None  # type: ignore[method-assign]
    await first.stop()
    second: Cluster = await start()
    await until(lambda: second.state.operation_log.find("op"), "audit read back", timeout_s=30)
    row = await second.client.operation("op")
    assert (row["result"], row["code"]) == ("unknown", OutcomeUnknown.code)


async def test_a_frozen_monitor_makes_the_outcome_unknown_and_carries_out_nothing_when_it_wakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = MonitorSettings(
        http_port=free_port(),
        heartbeat_address=free_address(),
        broadcast_address=free_address(),
        database_url=sqlite(tmp_path),
    )
    url = f"http://127.0.0.1:{settings.http_port}"
    info = [make_info(name, free_address()) for name in ("d0", "d1")]

    async def both_ready() -> bool:
        try:
            return [one["state"] for one in await client.instances()] == ["ready", "ready"]
        except PolyphaseError:
            return False

    async with (
        MonitorClient(url) as client,
        process("-m", "services.cluster_monitor", **settings.to_environment()) as monitor,
    ):
        await until(lambda: _answers(client), "monitor up", timeout_s=60)
        async with (
            fake_worker(info[0], Role.DECODE, settings.heartbeat_address, client) as worker,
            fake_worker(info[1], Role.DECODE, settings.heartbeat_address, client),
        ):
            await until(both_ready, "ready", timeout_s=30)
            monitor.send_signal(signal.SIGSTOP)
            monkeypatch.setattr(monitor_client, "SLACK_S", 0.5)
            monkeypatch.setattr(monitor_client, "ANSWER_S", 0.2)
            with pytest.raises(OutcomeUnknown, match=r"is unknown: .*`polyphase operation") as unknown:
                await operate.act("drain", "d0", url, timeout_s=0.5, force=False)
            operation_id = unknown.value.operation_id
            monitor.send_signal(signal.SIGCONT)

            async def told() -> str:
                try:
                    return (await operate.operation(operation_id, url)).result
                except PolyphaseError:
                    return ""

            await until(told, "the operation can be asked for", timeout_s=30)
            assert await told() == "expired"
            assert worker.calls == []
            await until(both_ready, "both serve on", timeout_s=10)


async def test_a_monitor_that_is_not_there_did_nothing() -> None:
    async with MonitorClient(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(Unavailable):  # known: it was never asked
            await client.drain("d0", timeout_s=1)


async def _answers(client: MonitorClient) -> bool:
    try:
        return bool(await client.call("GET", "/health"))
    except PolyphaseError:
        return False
