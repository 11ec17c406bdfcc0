import asyncio
from types import SimpleNamespace

import pytest

from services.cluster_monitor.operations import OperationRequest
from shared.domain.instance import InstanceState, Role
from shared.errors import Conflict, DeadlineExceeded, EngineFailed, NotFound, OutcomeUnknown, PolyphaseError, Standby
from shared.wire.api import OperationKind
from tests.ports import free_address
from tests.services.cluster_monitor.conftest import Cluster, Start
from tests.services.control_plane import until
from tests.services.fake_worker import fake_worker, make_info


async def test_a_flip_drains_changes_verifies_and_resumes(cluster: Cluster) -> None:
    worker, *_ = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    done = await cluster.client.flip("p0", who="tester")
    assert worker.calls == ["drain", "flip", "resume"]
    assert (done["result"], done["from_role"], done["to_role"], done["who"]) == (
        "succeeded",
        "prefill",
        "decode",
        "tester",
    )
    assert done["flip_s"] == 0.0042  # as the instance measured it, apart from the drain
    assert 0 <= done["drain_s"] < done["total_s"] < 1.0
    await cluster.wait_ready("p0", Role.DECODE)
    assert any(view.of("p0").state is InstanceState.DRAINING for view in cluster.views if view.of("p0"))  # type: ignore[union-attr]
    assert (await cluster.client.flips())[0] == done
    await cluster.client.flip("p0")
    await cluster.wait_ready("p0", Role.PREFILL)


async def test_the_last_of_a_role_stays_unless_forced(cluster: Cluster) -> None:
    await cluster.workers(p0=Role.PREFILL, d0=Role.DECODE)
    with pytest.raises(Conflict, match="d0 is the last ready decode instance"):
        await cluster.client.flip("d0")
    (refused,) = await cluster.client.flips()
    assert (refused["result"], refused["code"], refused["drain_s"]) == ("refused", "conflict", None)
    with pytest.raises(Conflict, match="d0 is the last ready decode instance"):
        await cluster.client.drain("d0", timeout_s=1)
    assert cluster.seen("d0").state is InstanceState.READY
    await cluster.client.flip("d0", force=True)
    await cluster.wait_ready("d0", Role.PREFILL)
    await cluster.client.drain("d0", timeout_s=1)
    await cluster.client.drain("p0", force=True, timeout_s=1)
    await cluster.wait_state("p0", InstanceState.DRAINING)


async def test_a_role_that_is_meant_is_not_taken_from_who_has_it(cluster: Cluster) -> None:
    await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    with pytest.raises(Conflict, match="p1 has the role prefill already"):
        await cluster.client.flip("p1", to=Role.PREFILL)
    assert (await cluster.client.flip("p1", to=Role.DECODE))["to_role"] == "decode"


async def test_two_at_once_on_one_instance_or_on_the_last_two_of_a_role(cluster: Cluster) -> None:
    first, second, _ = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    first.drain_gate = asyncio.Event()
    flipping = asyncio.ensure_future(cluster.client.flip("p0"))
    await until(lambda: "drain" in first.calls, "draining")
    assert (await cluster.client.cluster())["operations"] == {"p0": "flip"}
    for operation in (cluster.client.flip("p0"), cluster.client.resume("p0"), cluster.client.drain("p0", timeout_s=1)):
        with pytest.raises(Conflict, match="a flip is under way"):
            await operation
    with pytest.raises(Conflict, match="last ready prefill"):
        await cluster.client.flip("p1")
    first.drain_gate.set()
    assert (await flipping)["result"] == "succeeded"
    assert second.calls == []


async def test_work_that_does_not_end_leaves_the_old_role(cluster: Cluster) -> None:
    worker, *_ = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL)
    worker.drained = False
    with pytest.raises(DeadlineExceeded, match=r"did not drain within 0\.2 s: 3 jobs remain"):
        await cluster.client.flip("p0", drain_timeout_s=0.2)
    assert worker.calls == ["drain", "resume"]
    await cluster.wait_ready("p0", Role.PREFILL)
    (entry,) = await cluster.client.flips()
    assert entry["result"] == "failed"
    assert "did not drain" in entry["error"]
    assert entry["flip_s"] is None


async def test_an_engine_that_refuses_is_resumed_and_audited(cluster: Cluster) -> None:
    worker, *_ = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL)
    worker.fail_flip = True
    with pytest.raises(EngineFailed, match="stuck"):
        await cluster.client.flip("p0")
    assert worker.calls == ["drain", "flip", "resume"]
    await cluster.wait_ready("p0", Role.PREFILL)
    assert (await cluster.client.flips())[0]["error"] == "the engine is stuck"


async def test_a_failure_is_not_its_own_cause(cluster: Cluster) -> None:
    worker, *_ = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL)
    worker.fail_flip = True
    with pytest.raises(EngineFailed) as failed:
        await cluster.state.operations.run(OperationRequest(OperationKind.FLIP, "p0", "tester"))
    assert failed.value.__cause__ is not failed.value


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
    async with fake_worker(
        make_info("p0", free_address()), Role.PREFILL, cluster.settings.heartbeat_address, cluster.client
    ) as worker:
        await cluster.wait_ready("p0", Role.PREFILL)
        worker.drain_gate = asyncio.Event()
        flipping = asyncio.ensure_future(cluster.client.flip("p0", drain_timeout_s=60))
        await until(lambda: worker.calls, "draining")
    with pytest.raises(PolyphaseError):
        await asyncio.wait_for(flipping, 2.0)
    await cluster.wait_state("p0", InstanceState.DEAD)
    assert (await cluster.client.flips())[0]["result"] == "failed"
    with pytest.raises(Conflict, match="p0 is dead"):
        await cluster.client.flip("p0")


async def test_drain_and_resume(cluster: Cluster) -> None:
    worker, _ = await cluster.workers(d0=Role.DECODE, d1=Role.DECODE)
    assert (await cluster.client.drain("d0", timeout_s=1))["result"] == "succeeded"
    await cluster.wait_state("d0", InstanceState.DRAINING)
    await until(lambda: cluster.seen("d0").state is InstanceState.DRAINING, "broadcast as draining")
    await cluster.client.resume("d0")
    await cluster.wait_ready("d0", Role.DECODE)
    assert worker.calls == ["drain", "resume"]
    assert [entry["kind"] for entry in await cluster.client.flips()] == ["resume", "drain"]


async def test_a_drain_that_times_out_goes_on_draining(cluster: Cluster) -> None:
    (worker,) = await cluster.workers(d0=Role.DECODE)
    worker.drained = False
    with pytest.raises(DeadlineExceeded, match="3 jobs remain"):
        await cluster.client.drain("d0", force=True, timeout_s=0.2)
    await cluster.wait_state("d0", InstanceState.DRAINING)
    assert worker.calls == ["drain"]


async def test_only_known_and_living_instances(cluster: Cluster) -> None:
    with pytest.raises(NotFound):
        await cluster.client.flip("nobody")
    await cluster.client.register(make_info("p0", free_address()), Role.PREFILL)
    with pytest.raises(Conflict, match="p0 is starting"):
        await cluster.client.drain("p0", timeout_s=1)


@pytest.mark.parametrize("kind", ["drain", "flip", "resume"])
async def test_a_monitor_whose_turn_ended_meanwhile_reports_no_success(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its last step was carried out, and its answer was read when another monitor acted already."""
    worker, *_ = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)

    def check() -> None:
        if (kind if kind == "drain" else "resume") in worker.calls:
            raise Standby("m0 does not act: m1 at http://m1 acts")

    monkeypatch.setattr(cluster.state.operations, "_turn", SimpleNamespace(epoch=0, check=check))
    asked = OperationRequest(OperationKind(kind), "p0", "test", drain_timeout_s=1.0)
    operations = cluster.state.operations
    with pytest.raises(OutcomeUnknown, match="is unknown: m0 does not act: m1") as unknown:
        await operations.run(asked)
    assert unknown.value.operation_id == asked.operation_id
    assert operations.describe(asked.operation_id).result == "unknown"
