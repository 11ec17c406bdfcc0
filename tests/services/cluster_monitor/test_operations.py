"""Operations have an id and a deadline: none is carried out when nobody waits, and each can be asked for."""

import asyncio
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.cluster_monitor.operations import OperationRequest
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
    Standby,
    Unavailable,
)
from shared.store.tables import requests
from shared.wire.api import OperationKind
from shared.wire.clients import monitor as monitor_client
from shared.wire.clients.monitor import MonitorClient
from tests.ports import free_address, free_port
from tests.services.cluster_monitor.conftest import Cluster, Start
from tests.services.cluster_monitor.test_processes import process
from tests.services.control_plane import request, sqlite, until
from tests.services.fake_worker import FakeWorker, fake_worker, make_info
from tests.shared.store.rows import request_row


async def test_a_flip_drains_changes_verifies_and_resumes(cluster: Cluster) -> None:
    worker, *_ = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    done = await cluster.client.flip("p0", who="tester")
    assert worker.calls == ["drain", "flip", "resume"]
    assert (done.result, done.from_role, done.to_role, done.who) == ("succeeded", "prefill", "decode", "tester")
    assert (done.why, done.origin) == (None, "operator")
    assert 0 <= done.drain_s < done.total_s
    await cluster.wait_ready("p0", Role.DECODE)
    assert any(view.get("p0").state is InstanceState.DRAINING for view in cluster.views if view.get("p0"))  # type: ignore[union-attr]
    assert (await cluster.client.flips())[0] == done
    await cluster.client.flip("p0", to=Role.PREFILL)
    await cluster.wait_ready("p0", Role.PREFILL)
    with pytest.raises(Conflict, match="p0 has the role prefill already"):
        await cluster.client.flip("p0", to=Role.PREFILL)


async def ranks(cluster: Cluster) -> list[FakeWorker]:
    """Two data-parallel ranks of a decode instance `d`, beside `p` and `e`."""
    infos = [make_info(f"d.{rank}", free_address(), rank_of="d") for rank in range(2)]
    found = [await cluster.worker(info.instance_id, Role.DECODE, info=info) for info in infos]
    await cluster.workers(p=Role.PREFILL, e=Role.DECODE)
    for info in infos:
        await cluster.wait_ready(info.instance_id, Role.DECODE)
    return found


async def test_data_parallel_ranks_are_flipped_together_whichever_is_named(cluster: Cluster) -> None:
    workers = await ranks(cluster)
    done = await cluster.client.flip("d.1")
    assert (done.instance_id, done.from_role, done.to_role) == ("d", "decode", "prefill")
    assert [worker.calls for worker in workers] == [["drain", "flip", "resume"]] * 2
    for name in ("d.0", "d.1"):
        await cluster.wait_ready(name, Role.PREFILL)
    assert {"d.0", "d.1"} <= cluster.state.controller.facts().kept
    again = await cluster.client.flip("d")
    assert (again.instance_id, again.to_role) == ("d", "decode")
    await cluster.client.drain("d.0", timeout_s=5.0)
    await cluster.wait_state("d.1", InstanceState.DRAINING)
    with pytest.raises(NotFound, match="no instance 'x'"):
        await cluster.client.drain("x", timeout_s=5.0)


async def test_all_ready_ranks_of_a_role_are_its_last_instance(cluster: Cluster) -> None:
    await ranks(cluster)
    await cluster.client.drain("e", timeout_s=5.0)
    with pytest.raises(Conflict, match="d is the last ready decode instance"):
        await cluster.client.flip("d.0")


async def test_a_rank_that_does_not_drain_keeps_the_others_in_their_role(cluster: Cluster) -> None:
    first, second = await ranks(cluster)
    second.drained = False
    with pytest.raises(DeadlineExceeded, match=r"d\.1 did not drain"):
        await cluster.client.flip("d")
    assert (first.role, second.role) == (Role.DECODE, Role.DECODE)
    assert first.calls == ["drain", "resume"]
    second.drained, second.fail_flip = True, True
    with pytest.raises(PolyphaseError):
        await cluster.client.flip("d")
    await cluster.wait_ready("d.0", Role.PREFILL)  # this one has changed
    second.fail_flip = False
    await cluster.client.flip("d", to=Role.PREFILL)
    assert (first.role, second.role) == (Role.PREFILL, Role.PREFILL)


async def test_dead_ranks_are_forgotten_together_or_one_by_one(cluster: Cluster) -> None:
    await cluster.workers(p=Role.PREFILL)
    async with cluster.mortal("d.0", Role.DECODE, rank_of="d"), cluster.mortal("d.1", Role.DECODE, rank_of="d"):
        await cluster.wait_ready("d.0", Role.DECODE)
        await cluster.wait_ready("d.1", Role.DECODE)
        with pytest.raises(Conflict, match=r"d\.0 is ready; only dead"):
            await cluster.client.forget("d")
    for name in ("d.0", "d.1"):
        await cluster.wait_state(name, InstanceState.DEAD)
    await cluster.client.forget("d")
    assert [each.instance_id for each in cluster.state.registry.all()] == ["p"]


async def test_a_flip_takes_from_the_end_of_the_drain_until_the_instance_serves(cluster: Cluster) -> None:
    worker, *_ = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL)
    worker.drain_gate, worker.resume_gate = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    flipping = asyncio.ensure_future(cluster.client.flip("p0"))
    await until(lambda: "drain" in worker.calls, "draining")
    drained_s = loop.time()
    worker.drain_gate.set()
    await until(lambda: "resume" in worker.calls, "resuming")
    resuming_s = loop.time()
    await until(lambda: loop.time() - resuming_s > 0.05, "the instance to resume slowly")
    worker.resume_gate.set()
    done = await flipping
    assert 0.05 <= done.flip_s <= loop.time() - drained_s  # with the resume, without the drain
    assert done.drain_s + done.flip_s <= done.total_s + 0.01


async def test_the_last_of_a_role_stays_unless_forced(cluster: Cluster) -> None:
    await cluster.workers(p0=Role.PREFILL, d0=Role.DECODE)
    with pytest.raises(Conflict, match="d0 is the last ready decode instance"):
        await cluster.client.flip("d0")
    (refused,) = await cluster.client.flips()
    assert (refused.result, refused.code, refused.drain_s) == ("refused", "conflict", None)
    with pytest.raises(Conflict, match="d0 is the last ready decode instance"):
        await cluster.client.drain("d0", timeout_s=20)
    assert cluster.seen("d0").state is InstanceState.READY
    await cluster.client.flip("d0", force=True)
    await cluster.wait_ready("d0", Role.PREFILL)
    await cluster.client.drain("d0", timeout_s=20)
    await cluster.client.drain("p0", force=True, timeout_s=20)
    await cluster.wait_state("p0", InstanceState.DRAINING)


async def test_two_at_once_on_one_instance_or_on_the_last_two_of_a_role(cluster: Cluster) -> None:
    first, second, _ = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    first.drain_gate = asyncio.Event()
    flipping = asyncio.ensure_future(cluster.client.flip("p0"))
    await until(lambda: "drain" in first.calls, "draining")
    assert (await cluster.client.cluster()).operations == {"p0": "flip"}
    for operation in (cluster.client.flip("p0"), cluster.client.resume("p0"), cluster.client.drain("p0", timeout_s=20)):
        with pytest.raises(Conflict, match="a flip is under way"):
            await operation
    with pytest.raises(Conflict, match="last ready prefill"):
        await cluster.client.flip("p1")
    first.drain_gate.set()
    assert (await flipping).result == "succeeded"
    assert second.calls == []


async def test_work_that_does_not_end_leaves_the_old_role(cluster: Cluster) -> None:
    worker, *_ = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL)
    worker.drained = False
    with pytest.raises(DeadlineExceeded, match=r"did not drain within 0\.2 s: 3 jobs remain"):
        await cluster.client.flip("p0", drain_timeout_s=0.2)
    assert worker.calls == ["drain", "resume"]
    await cluster.wait_ready("p0", Role.PREFILL)
    (entry,) = await cluster.client.flips()
    assert entry.result == "failed"
    assert "did not drain" in entry.error
    assert entry.flip_s is None


async def test_an_engine_that_refuses_is_resumed_and_audited(cluster: Cluster) -> None:
    worker, *_ = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL)
    worker.fail_flip = True
    with pytest.raises(EngineFailed, match="stuck") as failed:
        await cluster.state.operations.run(OperationRequest(OperationKind.FLIP, "p0", "tester"))
    assert failed.value.__cause__ is not failed.value
    assert worker.calls == ["drain", "flip", "resume"]
    await cluster.wait_ready("p0", Role.PREFILL)
    assert (await cluster.client.flips())[0].error == "the engine is stuck"


async def test_a_flip_that_no_heartbeat_shows_fails(start: Start) -> None:
    cluster: Cluster = await start(verify_timeout_s=0.3)
    worker, *_ = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL)
    worker.drain_gate = asyncio.Event()
    flipping = asyncio.ensure_future(cluster.client.flip("p0"))
    await until(lambda: worker.calls, "draining")
    worker.beating = False
    worker.drain_gate.set()
    with pytest.raises(DeadlineExceeded, match=r"no heartbeat as decode within 0\.3 s"):
        await flipping
    assert worker.calls == ["drain", "flip", "resume"]


async def test_an_instance_that_dies_while_it_drains_fails_its_flip_at_once(cluster: Cluster) -> None:
    await cluster.workers(p1=Role.PREFILL)
    async with cluster.mortal("p0", Role.PREFILL) as worker:
        await cluster.wait_ready("p0", Role.PREFILL)
        worker.drain_gate = asyncio.Event()
        flipping = asyncio.ensure_future(cluster.client.flip("p0", drain_timeout_s=60))
        await until(lambda: worker.calls, "draining")
    with pytest.raises(PolyphaseError):
        await asyncio.wait_for(flipping, 30)  # half of what the drain may take
    await cluster.wait_state("p0", InstanceState.DEAD)
    assert (await cluster.client.flips())[0].result == "failed"
    with pytest.raises(Conflict, match="p0 is dead"):
        await cluster.client.flip("p0")


async def test_drain_and_resume(cluster: Cluster) -> None:
    worker, _ = await cluster.workers(d0=Role.DECODE, d1=Role.DECODE)
    assert (await cluster.client.drain("d0", timeout_s=20)).result == "succeeded"
    await cluster.wait_state("d0", InstanceState.DRAINING)
    await until(lambda: cluster.seen("d0").state is InstanceState.DRAINING, "broadcast as draining")
    await cluster.client.resume("d0")
    await cluster.wait_ready("d0", Role.DECODE)
    assert worker.calls == ["drain", "resume"]
    assert [entry.kind for entry in await cluster.client.flips()] == ["resume", "drain"]
    worker.drained = False
    with pytest.raises(DeadlineExceeded, match="3 jobs remain"):
        await cluster.client.drain("d0", timeout_s=0.2)
    await cluster.wait_state("d0", InstanceState.DRAINING)
    assert worker.calls == ["drain", "resume", "drain"]


async def test_only_known_and_living_instances(cluster: Cluster) -> None:
    with pytest.raises(NotFound):
        await cluster.client.flip("nobody")
    await cluster.client.register(make_info("p0", free_address()), Role.PREFILL)
    with pytest.raises(Conflict, match="p0 is starting"):
        await cluster.client.drain("p0", timeout_s=20)


@pytest.mark.parametrize("kind", ["drain", "flip", "resume"])
async def test_a_monitor_whose_turn_ended_meanwhile_reports_no_success(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its last step was carried out, and its answer was read when another monitor acted already."""
    worker, *_ = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)

    def check() -> None:
        if (kind if kind == "drain" else "resume") in worker.calls:
            raise Standby("m0 does not act: m1 at http://m1 acts")

    monkeypatch.setattr(cluster.state.operations, "_term", SimpleNamespace(epoch=0, check=check))
    asked = OperationRequest(OperationKind(kind), "p0", "test", drain_timeout_s=20.0)
    operations = cluster.state.operations
    with pytest.raises(OutcomeUnknown, match="is unknown: m0 does not act: m1") as unknown:
        await operations.run(asked)
    assert unknown.value.operation_id == asked.operation_id
    assert operations.describe(asked.operation_id).result == "unknown"


async def test_a_request_is_moved_by_the_instance_on_which_it_decodes(cluster: Cluster) -> None:
    first, second, _ = await cluster.workers(d0=Role.DECODE, d1=Role.DECODE, p0=Role.PREFILL)
    second.jobs["job-1"] = None
    anywhere = await cluster.client.move("job-1", who="tester")
    named = await cluster.client.move("job-1", to="d0", who="tester", operation_id="mine")
    assert (first.calls, second.calls) == ([], ["move job-1", "move job-1 d0"])
    assert (named.kind, named.result, named.who) == ("move", "succeeded", "tester")
    assert (named.job_id, named.to_instance, named.instance_id, named.generation) == ("job-1", "d0", "d1", 1)
    assert (anywhere.to_instance, anywhere.total_s is not None) == ("", True)
    assert await cluster.client.flips() == [named, anywhere]
    assert await cluster.client.move("job-1", to="d0", operation_id="mine") == named
    assert len(second.calls) == 2
    with pytest.raises(Conflict, match="'mine' is a move of job-1"):
        await cluster.client.move("job-2", operation_id="mine")


async def test_a_request_on_an_instance_that_drains_can_be_moved(cluster: Cluster) -> None:
    worker, _ = await cluster.workers(d0=Role.DECODE, d1=Role.DECODE)
    worker.jobs["job-1"] = None
    worker.drain_gate = asyncio.Event()
    draining = asyncio.ensure_future(cluster.client.drain("d0", timeout_s=20))
    await until(lambda: "drain" in worker.calls, "draining")
    assert (await cluster.client.move("job-1")).instance_id == "d0"
    worker.drain_gate.set()
    await draining


async def test_moves_are_refused_with_the_culprit_and_are_in_the_audit(cluster: Cluster) -> None:
    worker, *_ = await cluster.workers(d0=Role.DECODE, d1=Role.DECODE, p0=Role.PREFILL)
    worker.jobs["fixed"] = Conflict("fixed stays on d0: its gateway does not migrate it")
    await until(cluster.store.ready.is_set, "the schema is there", timeout_s=30)
    cluster.store.put(requests, request_row("waits", phase="prefill"))
    cluster.store.put(requests, request_row("over", phase="completed", final=True, outcome="stop"))
    await until(lambda: not cluster.store.queued, "rows on record", timeout_s=30)
    await cluster.client.drain("d1", timeout_s=5.0)
    await cluster.wait_state("d1", InstanceState.DRAINING)
    for job_id, to, error, why in (
        ("fixed", "", Conflict, "fixed stays on d0: its gateway does not migrate it"),
        ("fixed", "d7", NotFound, "no instance 'd7'"),
        ("fixed", "d1", Conflict, "d1 cannot take fixed over: it is draining"),
        ("fixed", "p0", Conflict, "p0 cannot take fixed over: it is a prefill instance"),
        ("waits", "", Conflict, "waits does not decode at the moment: its last reported phase is prefill"),
        ("over", "", Conflict, "over has ended: stop"),
        ("nobody", "d0", NotFound, "no request 'nobody' decodes on any instance, and none is known by this id"),
    ):
        with pytest.raises(error, match=why):
            await cluster.client.move(job_id, to=to)
        newest = (await cluster.client.flips())[0]
        assert (newest.kind, newest.job_id, newest.to_instance) == ("move", job_id, to)
        assert (newest.result, newest.code) == ("refused", error.code)
        event = (await cluster.client.events(limit=1))[0]
        assert (event.kind, event.job_id, event.operation_id) == ("operation_refused", job_id, newest.operation_id)
        assert event.text.startswith(f"move of {job_id} by ")
    assert worker.calls == ["move fixed"]


async def test_with_one_instance_that_decodes_there_is_nowhere_to_move(cluster: Cluster) -> None:
    await cluster.workers(d0=Role.DECODE, p0=Role.PREFILL)
    with pytest.raises(Conflict, match="job-1 cannot move: there is no other instance that is ready to decode"):
        await cluster.client.move("job-1")
    await ranks_of_its_own(cluster)
    with pytest.raises(NotFound, match=r"no instance 'd'; name one of its data-parallel ranks: d\.0"):
        await cluster.client.move("job-1", to="d")


async def ranks_of_its_own(cluster: Cluster) -> None:
    await cluster.worker("d.0", Role.DECODE, info=make_info("d.0", free_address(), rank_of="d"))
    await cluster.wait_ready("d.0", Role.DECODE)


async def test_an_instance_that_does_not_answer_may_have_the_request(start: Start) -> None:
    cluster: Cluster = await start(rpc_timeout_s=0.2)
    worker, _ = await cluster.workers(d0=Role.DECODE, d1=Role.DECODE)
    worker.move_gate = asyncio.Event()
    with pytest.raises(Unavailable, match=r"no instance found that decodes job-1; without an answer: d0 \("):
        await cluster.client.move("job-1")
    assert (await cluster.client.flips())[0].result == "failed"
    worker.move_gate.set()


async def test_the_same_id_again_is_the_same_operation(cluster: Cluster) -> None:
    worker, *_ = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL)
    worker.drain_gate = asyncio.Event()
    first = asyncio.ensure_future(cluster.client.flip("p0", operation_id="mine"))
    await until(lambda: worker.calls, "draining")
    again = asyncio.ensure_future(cluster.client.flip("p0", operation_id="mine"))
    assert (await cluster.client.operation("mine")).result == "running"
    worker.drain_gate.set()
    assert await first == await again == await cluster.client.flip("p0", operation_id="mine")
    assert worker.calls == ["drain", "flip", "resume"]
    assert (await cluster.client.operation("mine")).result == "succeeded"
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
    assert (await cluster.client.operation("refused")).result == "refused"
    with pytest.raises(NotFound, match="never arrived"):
        await cluster.client.operation("nobody's")


async def test_what_arrives_after_its_deadline_is_not_begun(cluster: Cluster) -> None:
    worker, _ = await cluster.workers(d0=Role.DECODE, d1=Role.DECODE)
    late = {"operation_id": "late", "deadline_s": time.time() - 3}
    for what in ("drain", "flip", "resume", "move"):
        path = "/requests/job-1/move" if what == "move" else f"/instances/d0/{what}"
        answer = await request(cluster.transport, "POST", path, {**late, "operation_id": what})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, DeadlineExceeded.code)
        assert "s after its deadline, and nothing was done" in answer.json()["error"]["message"]
        assert (await cluster.client.operation(what)).result == "expired"
    assert worker.calls == []
    assert cluster.state.registry.get("d0").state is InstanceState.READY


async def test_an_operation_ends_by_its_deadline(cluster: Cluster) -> None:
    worker, _ = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL)
    worker.drain_gate = asyncio.Event()
    for operation_id, within_s in (("op", 2.0), ("in time", 20.0)):
        body = {"operation_id": operation_id, "deadline_s": time.time() + within_s, "drain_timeout_s": 60}
        answer = await request(cluster.transport, "POST", "/instances/p0/flip", body)
        if worker.calls:  # else a busy machine had the deadline pass before it was begun
            break
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, DeadlineExceeded.code)
    assert worker.calls == ["drain", "resume"]
    await cluster.wait_ready("p0", Role.PREFILL)
    assert (await cluster.client.operation(operation_id)).result == "failed"


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
    assert (row.result, row.code) == ("unknown", OutcomeUnknown.code)


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
            return [one.state for one in await client.instances()] == ["ready", "ready"]
        except PolyphaseError:
            return False

    async def both_serve_on() -> bool:
        for one, known in zip(info, await client.instances(), strict=True):
            if known.state == "dead":  # a busy machine had the monitor frozen until its connections were lost
                await client.register(one, Role.DECODE)
        return await both_ready()

    async with (
        MonitorClient(url) as client,
        process("-m", "services.cluster_monitor", **settings.to_environment()) as monitor,
    ):
        await until(lambda: _answers(client), "monitor up", timeout_s=120)
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
            await until(both_serve_on, "both serve on", timeout_s=30)


async def test_a_monitor_that_is_not_there_did_nothing() -> None:
    async with MonitorClient(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(Unavailable):  # known: it was never asked
            await client.drain("d0", timeout_s=20)


async def _answers(client: MonitorClient) -> bool:
    try:
        return bool(await client.get("/health", dict[str, str]))
    except PolyphaseError:
        return False
