"""What should be there and what happened: nobody vanishes without a trace, and a restarted monitor knows it, too."""

from contextlib import AsyncExitStack

import msgspec
import pytest

from services.cluster_monitor import registry
from services.cluster_monitor.events import KEPT
from shared.domain.instance import InstanceState, Role
from shared.errors import Conflict, Incompatible, NotFound
from shared.store.database import open_engine
from tests.ports import free_address
from tests.services.cluster_monitor.conftest import Cluster, Start
from tests.services.control_plane import request, until
from tests.services.fake_worker import FIT, fake_worker, make_info


def kinds(found: list[dict[str, object]]) -> list[object]:
    return [event.kind for event in reversed(found)]


async def test_three_of_fifteen_that_die_are_missed(start: Start) -> None:
    cluster: Cluster = await start(silence_s=20.0)  # they beat on the monitor's loop: on a busy machine it stalls
    for number in range(12):
        await cluster.worker(f"d{number}", Role.DECODE)
    async with AsyncExitStack() as victims:
        for number in range(3):
            await victims.enter_async_context(cluster.mortal(f"v{number}", Role.DECODE))
        for name in (*(f"d{n}" for n in range(12)), "v0", "v1", "v2"):
            await cluster.wait_ready(name, Role.DECODE)
    for number in range(3):
        await cluster.wait_state(f"v{number}", InstanceState.DEAD)
    summary = await cluster.client.cluster()
    assert (summary.known["decode"], summary.instances["decode"]) == (15, {"ready": 12, "dead": 3})
    deaths = await cluster.client.events(kinds=["death"])
    assert {(one.instance_id, one.text, one.role) for one in deaths} == {
        (f"v{number}", "connection lost", "decode") for number in range(3)
    }
    await cluster.client.forget("v0", who="anna")
    (forgotten,) = await cluster.client.events(kinds=["forgotten"])
    assert (forgotten.instance_id, forgotten.text) == ("v0", "by anna")
    assert (await cluster.client.cluster()).known["decode"] == 14
    await cluster.worker("v1", Role.DECODE, info=make_info("v1", free_address(), generation=2))
    await cluster.wait_ready("v1", Role.DECODE)
    summary = await cluster.client.cluster()
    assert (summary.known["decode"], summary.instances["decode"]) == (14, {"ready": 13, "dead": 1})


async def test_the_life_of_an_instance_in_events(start: Start) -> None:
    cluster: Cluster = await start(silence_s=2.0)
    async with cluster.mortal("d0", Role.DECODE) as worker:
        await cluster.wait_ready("d0", Role.DECODE)
        worker.beating = False
        await cluster.wait_state("d0", InstanceState.UNRESPONSIVE)
        worker.beating = True
        await cluster.wait_state("d0", InstanceState.READY)
    await cluster.wait_state("d0", InstanceState.DEAD)
    await cluster.worker("d0", Role.DECODE, info=make_info("d0", free_address(), generation=2))
    await cluster.wait_state("d0", InstanceState.READY)
    found = [one for one in await cluster.client.events() if one.instance_id == "d0"]
    assert kinds(found) == ["registered", "unresponsive", "recovered", "death", "restarted"]
    half = found[2].time_s
    assert kinds(await cluster.client.events(since_s=half)) == ["death", "restarted"]
    assert len(await cluster.client.events(limit=2)) == 2


async def test_who_stops_in_good_order_is_not_missed(start: Start) -> None:
    cluster: Cluster = await start(silence_s=5.0)
    (worker,) = await cluster.workers(d0=Role.DECODE)
    with pytest.raises(Conflict, match="of generation 1, not 7"):
        await cluster.client.leave(make_info("d0", worker.info.rpc, generation=7))
    worker.beating = False
    await cluster.client.leave(worker.info)
    await until(lambda: cluster.seen("d0") is None, "gone from the broadcast")
    assert (await cluster.client.cluster()).known["decode"] == 0
    assert kinds(await cluster.client.events()) == ["registered", "left"]
    with pytest.raises(NotFound):
        await cluster.client.leave(worker.info)


async def test_refusals_are_told_once_a_while(cluster: Cluster) -> None:
    await cluster.workers(p0=Role.PREFILL, d0=Role.DECODE)
    strange = make_info("d9", free_address(), compatibility=msgspec.structs.replace(FIT, fingerprint="fp-2"))
    for _ in range(20):
        with pytest.raises(Incompatible):
            await cluster.client.register(strange, Role.DECODE)
    with pytest.raises(Conflict):
        await cluster.client.drain("d0", timeout_s=20, who="somebody")
    refused = await cluster.client.events(kinds=["registration_refused"])
    assert [(one.instance_id, one.role) for one in refused] == [("d9", "decode")]
    assert "fingerprint" in refused[0].text
    (operation,) = await cluster.client.events(kinds=["operation_refused"])
    assert operation.text.startswith("drain by somebody: d0 is the last ready decode instance")


async def test_a_restarted_monitor_knows_what_happened_and_who_is_missing(start: Start) -> None:
    first: Cluster = await start(silence_s=5.0)
    heartbeats, broadcast = first.settings.heartbeat_address, first.settings.broadcast_address
    address = make_info("d0", free_address())
    async with fake_worker(address, Role.DECODE, heartbeats, first.client):
        await first.workers(d1=Role.DECODE, p0=Role.PREFILL, left=Role.PREFILL)
        await first.client.leave(make_info("left", "tcp://a:1"))
        await first.stack.aclose()  # d1 and p0 die
        for name in ("d1", "p0"):
            await first.wait_state(name, InstanceState.DEAD)
        await first.client.forget("p0")
        before = await first.client.events()
        await until(lambda: first.store.ready.is_set() and not first.store.queued, "all in the database")
        await first.stop()
        second: Cluster = await start(silence_s=5.0, heartbeat_address=heartbeats, broadcast_address=broadcast)
        await second.wait_ready("d0", Role.DECODE)

        async def counted() -> bool:
            return bool((await second.client.cluster()).known == {"prefill": 0, "decode": 2})

        await until(counted, "d1 is missed, p0 and left are not")
        assert (await second.client.instance("d1")).death == "died before the monitor was restarted"
        after = await second.client.events()
        assert after[1:] == before
        assert (after[0].kind, after[0].instance_id) == ("returned", "d0")


async def test_what_is_in_the_database_already_when_it_is_read_is_told_once(start: Start) -> None:
    cluster: Cluster = await start()
    await cluster.workers(d0=Role.DECODE, p0=Role.PREFILL)
    told = await cluster.client.events()
    await until(lambda: cluster.store.ready.is_set() and not cluster.store.queued, "all in the database")
    engine = open_engine(cluster.settings.database_url)
    try:
        await cluster.state.events.load(engine)  # as at a start at which instances come before the database answers
    finally:
        await engine.dispose()
    assert await cluster.client.events() == told


async def test_a_flood_of_one_kind_pushes_out_no_other_and_memory_is_bounded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_DEAD", 5)
    await cluster.workers(d0=Role.DECODE)
    for number in range(KEPT + 50):
        cluster.state.events.refused(f"x{number}", "decode", "no")
    assert len(await cluster.client.events(limit=1000)) == KEPT + 1
    assert kinds(await cluster.client.events(kinds=["registered"])) == ["registered"]
    for number in range(8):
        info = make_info(f"gone{number}", free_address())
        cluster.state.registry.remember_dead(info, Role.DECODE, "long ago", news=False)
    await until(lambda: len(list(cluster.state.registry.all())) == 6, "the oldest dead are forgotten")
    assert {one.instance_id for one in await cluster.client.events(kinds=["forgotten"])} == {"gone0", "gone1", "gone2"}


async def test_bad_questions_are_a_400(cluster: Cluster) -> None:
    for query in ("limit=0", "since=-1", "since=nan", "kind=gossip"):
        assert (await request(cluster.transport, "GET", f"/events?{query}")).status_code == 400, query


async def test_a_request_that_was_refused_for_its_losses_is_an_event_once(cluster: Cluster) -> None:
    losses = [{"position": 3, "instance_id": "d0"}, {"position": 3, "instance_id": "d1"}]
    ended = {"job_id": "r1", "slo": "chat", "ended_s": 10.0, "phase": "failed", "code": "instances_lost"}
    for _ in range(2):  # a delivery whose answer was lost comes again
        await cluster.news({**ended, "losses": losses})
    (event,) = await cluster.client.events(kinds=["request_refused"])
    assert event.job_id == "r1"
    assert event.text.count("at output token 3") == 2
    assert all(name in event.text for name in ("d0", "d1"))
