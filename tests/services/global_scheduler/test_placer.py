import asyncio
from collections import Counter

import pytest
import zmq
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.global_scheduler.placer import SchedulerMetrics
from shared.domain.instance import InstanceState, Role
from shared.domain.job import JobView, Phase
from shared.domain.policies import ROUTING, PolicySet
from shared.domain.route import InstanceRef, PolicySpec, PrefixPull, Route
from shared.errors import InvalidRequest, PeerLost, Stays, Unavailable
from tests.ports import free_address
from tests.services.control_plane import text, until
from tests.services.global_scheduler.conftest import Scheduler, Start, report

CLUSTER = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE}


def job(number: int = 0, **changes: object) -> JobView:
    return JobView(f"j{number}", 100, 50, **changes)  # type: ignore[arg-type]


async def test_before_the_first_broadcast_it_answers_at_once_that_it_cannot(scheduler: Scheduler) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(Unavailable, match="no broadcast from the cluster monitor yet"):
        await scheduler.client.place(job(), timeout_s=5)
    assert loop.time() - started < 2.0


async def test_a_route_with_its_reasons(scheduler: Scheduler) -> None:
    await scheduler.hear(**CLUSTER)
    route = await scheduler.client.place(job(), timeout_s=5)
    assert route.prefill is not None
    assert (route.prefill.rpc, route.prefill.generation) == ("tcp://127.0.0.1:9", 1)
    assert (route.decode, route.split, route.policy) == (None, 100, "least_load")
    assert {reason.what for reason in route.reasons} >= {"placement:least_load", "split:full"}


async def test_jobs_of_one_broadcast_spread(scheduler: Scheduler) -> None:
    await scheduler.hear(**CLUSTER)
    routes = await asyncio.gather(*(scheduler.client.place(job(n), timeout_s=5) for n in range(40)))
    counts = Counter(route.prefill.instance_id for route in routes if route.prefill)
    assert counts == {"p0": 20, "p1": 20}


async def test_exclusion(scheduler: Scheduler) -> None:
    await scheduler.hear(**CLUSTER)
    for _ in range(5):
        route = await scheduler.client.place(job(), exclude=("p0",), timeout_s=5)
        assert route.prefill is not None
        assert route.prefill.instance_id == "p1"
    route = await scheduler.client.place(job(), exclude=("p0", "p1"), timeout_s=5)
    assert (route.prefill, route.split) == (None, 0)
    with pytest.raises(Unavailable, match="just failed this job"):
        await scheduler.client.place(job(), exclude=("d0",), timeout_s=5)


async def test_a_paused_job_that_stays_is_neither_placed_nor_refused(scheduler: Scheduler) -> None:
    await scheduler.hear(**{**CLUSTER, "d1": Role.DECODE})
    await scheduler.client.place(job(), timeout_s=5)
    with capture_logs() as lines:
        with pytest.raises(Stays):
            await scheduler.client.place(job(begun=True, pause_s=0.001), exclude=("d0",), timeout_s=5)
        with pytest.raises(Unavailable):
            await scheduler.client.place(job(begun=True, pause_s=60.0), exclude=("d0", "d1"), timeout_s=5)
        route = await scheduler.client.place(job(begun=True, pause_s=60.0), exclude=("d0",), timeout_s=5)
    assert route.reasons[0].what == "sooner"
    assert not [line for line in lines if line["event"] in ("no placement", "placed after all")]
    metrics = await text(scheduler.transport, "/metrics")
    assert "polyphase_scheduler_refused_total{" not in metrics
    assert 'polyphase_scheduler_placements_total{kind="full"} 2.0' in metrics


def test_pulls_and_their_tokens_are_counted() -> None:
    registry, where = CollectorRegistry(), [InstanceRef(name, 1, "") for name in "pdh"]
    metrics = SchedulerMetrics(registry)
    pull = PrefixPull(where[2], 1_024)
    metrics.placed(Route(where[0], where[1], 1_100, "adaptive", prefill_saved=512, decode_saved=1_024, pull=pull), 0.1)
    metrics.placed(Route(None, where[1], 0, "adaptive", decode_saved=256, pull=pull), 0.1)
    metrics.placed(Route(None, where[1], 0, "adaptive", decode_saved=256), 0.1)
    assert registry.get_sample_value("polyphase_scheduler_prefix_pulls_total") == 2
    assert registry.get_sample_value("polyphase_scheduler_prefix_pull_tokens_total") == 512 + 768


def test_a_kept_answer_is_counted_at_its_prefill_instance() -> None:
    registry, p = CollectorRegistry(), InstanceRef("p", 1, "")
    metrics = SchedulerMetrics(registry)
    for keep_tokens in (0, 100):
        metrics.placed(Route(None, p, 0, "adaptive", keep_tokens=keep_tokens), 0.1)
    assert registry.get_sample_value("polyphase_scheduler_kept_answers_total") == 1
    for role in ("prefill", "decode"):
        labels = {"instance_id": "p", "role": role}
        assert registry.get_sample_value("polyphase_scheduler_chosen_total", labels) == 1


async def test_nobody_there_and_impossible_are_kept_apart(scheduler: Scheduler) -> None:
    await scheduler.hear(p0=Role.PREFILL, d0=(Role.DECODE, InstanceState.DRAINING))
    with pytest.raises(Unavailable, match="1 draining"):  # a 503: no limit of the client's own is reached
        await scheduler.client.place(job(), timeout_s=5)
    await scheduler.hear(p0=Role.PREFILL)
    with pytest.raises(Unavailable, match="none registered"):
        await scheduler.client.place(job(), timeout_s=5)
    await scheduler.hear(**CLUSTER)
    with pytest.raises(InvalidRequest, match="context of 100050 tokens"):
        await scheduler.client.place(JobView("j", 100_000, 50), timeout_s=5)


async def test_without_its_monitor_it_goes_on_with_the_last_broadcast(scheduler: Scheduler) -> None:
    await scheduler.hear(**CLUSTER)
    scheduler.publisher.close()
    routes = [await scheduler.client.place(job(n), timeout_s=5) for n in range(10)]
    assert len({route.prefill.instance_id for route in routes if route.prefill}) == 2

    async def said() -> bool:
        route = await scheduler.client.place(job(), timeout_s=5)
        return any(one.what.startswith("old loads") for one in route.reasons)

    assert not any(one.what.startswith("old loads") for one in routes[0].reasons)
    await until(said, "the reasons say that the loads are old")


async def test_policies_come_with_broadcasts(scheduler: Scheduler) -> None:
    await scheduler.hear(**CLUSTER)
    half = PolicySpec("fraction", {"fraction": 0.5})
    await scheduler.follow(split=half, placement=PolicySpec("round_robin"))
    followed = await scheduler.admin.policies()
    assert followed.split == half
    assert (followed.dispatch.name, followed.revision, followed.trouble) == ("power_of_two", 2, "")
    route = await scheduler.client.place(job(), timeout_s=5)
    assert (route.split, route.policy) == (50, "round_robin")
    assert route.decode is not None
    assert route.decode.instance_id == "d0"


async def test_each_route_names_the_dispatch_policy_in_force(scheduler: Scheduler) -> None:
    await scheduler.hear(**CLUSTER)
    route = await scheduler.client.place(job(), timeout_s=5)
    assert (route.decode, route.dispatch) == (None, PolicySpec("power_of_two"))
    await scheduler.follow(dispatch=PolicySpec("spread", {"unpredicted_tokens": 7}))
    route = await scheduler.client.place(job(1), timeout_s=5)
    assert route.decode is None  # with the default split it is the prefill instance that dispatches
    assert route.dispatch == PolicySpec("spread", {"unpredicted_tokens": 7})


async def test_policies_of_another_version_are_not_followed_and_it_says_so(scheduler: Scheduler) -> None:
    await scheduler.hear(**CLUSTER)
    with capture_logs() as logs:
        await scheduler.follow(split=PolicySpec("of tomorrow"), placement=PolicySpec("round_robin"))
        await scheduler.hear(**CLUSTER)  # again and again
    assert [entry["event"] for entry in logs] == ["newer policies are not followed"]
    followed = await scheduler.admin.policies()
    assert (followed.revision, followed.placement.name, followed.split.name) == (1, "least_load", "full")
    assert followed.trouble.startswith("unknown split policy 'of tomorrow'; known: ")
    assert (await scheduler.client.place(job(), timeout_s=5)).policy == "least_load"
    await scheduler.follow(split=PolicySpec("none"))
    followed = await scheduler.admin.policies()
    assert (followed.revision, followed.placement.name, followed.trouble) == (3, "round_robin", "")


async def test_kinds_that_are_not_its_own_may_be_unknown(scheduler: Scheduler) -> None:
    await scheduler.hear(**CLUSTER)
    await scheduler.follow(role_flip=PolicySpec("of tomorrow"))
    followed = await scheduler.admin.policies()
    assert (followed.revision, followed.trouble) == (2, "")


async def test_garbage_on_both_sockets_is_dropped_and_counted(scheduler: Scheduler) -> None:
    hostile = scheduler.sockets.unconnected(zmq.DEALER)
    hostile.connect(scheduler.settings.rpc_address)

    async def counted() -> bool:
        hostile.send(b"\xff garbage")
        hostile.send_multipart([b"too", b"many", b"frames"])
        scheduler.publisher.say({"sequence": "not a view"})
        metrics = await text(scheduler.transport, "/metrics")
        causes = (("rpc", "garbage"), ("rpc", "frame"), ("broadcast", "garbage"))
        return all(
            f'polyphase_wire_dropped_total{{cause="{cause}",socket="{socket}"}}' in metrics for socket, cause in causes
        )

    await until(counted, "all kinds counted")
    hostile.close()
    await scheduler.hear(**CLUSTER)
    assert await scheduler.client.place(job(), timeout_s=5)


async def test_work_counts_until_a_report_says_that_the_job_is_over(scheduler: Scheduler) -> None:
    await scheduler.hear(d0=Role.DECODE, d1=Role.DECODE)
    await scheduler.follow(placement=PolicySpec("workload", {"penalty": "linear"}))
    routes = {f"j{n}": await scheduler.client.place(job(n), timeout_s=5) for n in range(10)}
    assert Counter(route.decode.instance_id for route in routes.values() if route.decode) == {"d0": 5, "d1": 5}
    ledger = scheduler.state.placer.decider.ledger
    assert len(ledger) == 10
    assert ledger.scores[ledger.slot("d0")] == ledger.scores[ledger.slot("d1")] > 0
    phases = (Phase.COMPLETED, Phase.FAILED, Phase.CANCELLED, Phase.DECODE)
    await scheduler.client.report([report(job_id, phases[at % 4]) for at, job_id in enumerate(routes)], timeout_s=5)
    assert len(ledger) == 2


async def test_another_scheduler_is_asked_when_one_is_away(scheduler: Scheduler) -> None:
    from shared.wire.clients.scheduler import SchedulerClient
    from shared.wire.rpc_client import RpcClients

    await scheduler.hear(**CLUSTER)
    with RpcClients(scheduler.sockets) as clients:
        client = SchedulerClient(clients, [free_address(), scheduler.settings.rpc_address])
        await until(lambda: clients.to(scheduler.settings.rpc_address).connected, "connected")
        for number in range(4):
            assert await client.place(job(number), timeout_s=5)
        gone = SchedulerClient(clients, [free_address()])
        with pytest.raises(PeerLost, match="no connection"):
            await gone.place(job(), timeout_s=5)


async def test_a_job_that_waits_is_told_of_once(scheduler: Scheduler) -> None:
    await scheduler.hear(p0=Role.PREFILL)
    with capture_logs() as lines:
        for _ in range(20):
            for number in range(2):
                with pytest.raises(Unavailable):
                    await scheduler.client.place(job(number), timeout_s=5)
        await scheduler.hear(**CLUSTER)
        assert await scheduler.client.place(job(0), timeout_s=5)
        await scheduler.client.report([report("j1", Phase.FAILED, outcome="unavailable")], timeout_s=5)
    said = [(one["event"], one["job_id"], one.get("refusals")) for one in lines if "job_id" in one]
    assert said == [
        ("no placement", "j0", None),
        ("no placement", "j1", None),
        ("placed after all", "j0", 20),
        ("ended without a placement", "j1", 20),
    ]
    assert 'polyphase_scheduler_refused_total{cause="",code="unavailable",slo="default"} 40.0' in await text(
        scheduler.transport, "/metrics"
    )


async def test_by_default_one_decision_is_for_all_three(start: Start) -> None:
    scheduler = await start(**{kind: PolicySet().spec(kind) for kind in ROUTING})
    await scheduler.hear(**CLUSTER)
    route = await scheduler.client.place(job(), timeout_s=5)
    assert route.decode is not None
    assert "placement:adaptive" in {reason.what for reason in route.reasons}
    assert route.dispatch == PolicySpec("adaptive")


async def test_a_bound_decode_counts_until_its_gateway_says_that_it_has_come(start: Start) -> None:
    scheduler = await start(placement="least_load", split="fraction", dispatch="power_of_two")
    await scheduler.hear(**CLUSTER)
    ledger = scheduler.state.placer.decider.ledger
    for number in range(3):
        route = await scheduler.client.place(job(number), timeout_s=5)
        assert route.decode is not None
    assert len(ledger.coming) == 3
    await scheduler.client.report([report("j0", Phase.DECODE)], timeout_s=5)
    assert len(ledger.coming) == 2
    await scheduler.client.report([report("j1", Phase.CANCELLED)], timeout_s=5)
    assert len(ledger.coming) == 1


async def test_answers_teach_their_lengths(scheduler: Scheduler) -> None:
    await scheduler.hear(**CLUSTER)
    for number in range(40):
        await scheduler.client.place(job(number), timeout_s=5)
    await scheduler.client.report([report(f"j{number}", output_tokens=7) for number in range(39)], timeout_s=5)
    await scheduler.client.report([report("j39", Phase.FAILED, output_tokens=999)], timeout_s=5)
    assert scheduler.state.placer.decider.ledger.output_lengths.all.mean == pytest.approx(7.0)
