"""What clients ask for, at the monitor: taken in, told of, and flipped by."""

import time
from typing import Any

import msgspec
import pytest

from services.cluster_monitor.request_stats import Ended, How
from services.cluster_monitor.slo import SloService, in_words
from shared.domain.demand import DemandSecond, Shift
from shared.domain.instance import InstanceInfo, Role
from shared.domain.rates import Rates, StepForm, StepRates
from tests.ports import free_address
from tests.services.cluster_monitor.conftest import Cluster, Start
from tests.services.control_plane import request, text, until
from tests.services.fake_worker import make_info

FORM = StepForm(0.01, 1e-4, 0.0, 1e-4)

KNOWN = Rates(step=StepRates(FORM, FORM, FORM))

PREDICTIVE = {
    "policies": {"role_flip": {"name": "predictive", "for_s": 0.2}},
    "role_flip_period_s": 0.05,
    "drain_timeout_s": 2.0,
}


def seconds(count: int, prompt: float, *, ago: int = 0, source: str = "s0") -> list[dict[str, Any]]:
    """The last so many whole seconds, with twenty requests in each."""
    n, last = 20, int(time.time()) - ago
    log = {"prompt_logs": n * len(str(prompt)) * 1.0, "prompt_log_squares": n * len(str(prompt)) ** 2 * 1.0}
    sums = {"prompt_tokens": n * prompt, "fresh_tokens": n * prompt, "fresh_squares": n * prompt * prompt, **log}
    more = {
        "output_tokens": n * 20.0,
        "per_ttft": n * 1.0,
        "per_tpot": n * 10.0,
        "split_least": 20.0,
        "split_most": 20.0,
    }
    rows = [DemandSecond(source, last - at, n, **sums, **more) for at in range(count, 0, -1)]
    return [msgspec.to_builtins(row) for row in rows]


def knowing(name: str) -> InstanceInfo:
    return msgspec.structs.replace(make_info(name, free_address()), rates=KNOWN)


async def test_what_schedulers_tell_becomes_a_profile(cluster: Cluster) -> None:
    nothing = {"demand": None, "seconds": [], "shifts": [], "roles": None}
    assert await cluster.get("/demand") == nothing
    assert await cluster.news(demand=seconds(10, 500.0)) == {"outcomes": 0, "demand": 10}
    for _ in range(2):  # the second look adds nothing
        cluster.state.demand.step()
    answer = await cluster.get("/demand")
    demand = answer["demand"]
    assert [(one["requests"], one["prompt_tokens"]) for one in answer["seconds"]] == [(20, 500.0)] * 10
    assert answer["roles"] is None  # there are no instances
    assert (demand["rate"], demand["prompt_tokens"], demand["ttft_s"], demand["tpot_s"]) == (20.0, 500.0, 1.0, 0.1)


async def test_a_shift_is_an_event_and_a_metric(cluster: Cluster) -> None:
    await cluster.news(demand=seconds(40, 99.0, ago=10))
    await cluster.news(demand=seconds(10, 9_000.0))
    cluster.state.demand.step()
    (event,) = await cluster.client.events(kinds=["demand_shift"])
    assert event.text.startswith("prompts: ")
    assert event.instance_id == ""
    metrics = await text(cluster.transport, "/metrics")
    assert 'polyphase_demand_shifts_total{what="prompts"} 1.0' in metrics
    answer = await cluster.get("/demand")
    assert [(one["what"], one["at_s"] > 0) for one in answer["shifts"]] == [("prompts", True)]


async def test_what_makes_no_sense_is_refused_and_what_is_late_is_ignored(cluster: Cluster) -> None:
    (row,) = seconds(1, 500.0)
    for wrong in ({"requests": -1}, {"prompt_logs": "many"}, {"source": ""}):
        body = {"revision": 0, "demand": [{**row, **wrong}]}
        assert (await request(cluster.transport, "POST", "/schedulers/s0/news", body)).status_code == 400
    late = {"slo": "chat", "ended_s": 1.0, "ttft_s": -1}
    answer = await request(cluster.transport, "POST", "/schedulers/s0/news", {"revision": 0, "outcomes": [late]})
    assert answer.status_code == 400
    assert await cluster.news(demand=seconds(2, 500.0, ago=300)) == {"outcomes": 0, "demand": 0}
    assert "polyphase_demand_ignored_total 2.0" in await text(cluster.transport, "/metrics")


async def test_roles_follow_what_is_told_and_the_audit_says_why(start: Start) -> None:
    cluster: Cluster = await start(**PREDICTIVE)
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
        await cluster.worker(name, role, info=knowing(name))
    for name in ("d0", "d1"):
        await cluster.wait_ready(name, Role.DECODE)
    await cluster.news(demand=seconds(10, 1_000.0))
    await until(lambda: cluster.state.operation_log.newest(1), "a flip is begun")
    await until(lambda: cluster.state.operation_log.newest(1)[0].result == "succeeded", "it is done")
    (entry,) = await cluster.client.flips()
    assert (entry.who, entry.to_role) == ("role_flip:predictive", "prefill")
    assert "role_flip:predictive (harm " in entry.why
    assert "demand (rate_per_s 20.0, prompt_tokens 1000.0" in entry.why
    assert "considered (d0 " in entry.why
    wanted = (await cluster.get("/demand"))["roles"]
    assert wanted["prefill"] + wanted["decode"] == 3


async def test_a_persons_flip_stands(start: Start) -> None:
    cluster: Cluster = await start(**PREDICTIVE)
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
        await cluster.worker(name, role, info=knowing(name))
        await cluster.wait_ready(name, role)
    await cluster.client.flip("p1", who="someone")
    await cluster.news(demand=seconds(10, 1_000.0))
    cluster.state.demand.step()
    sequence = cluster.views[-1].sequence
    await until(lambda: cluster.views[-1].sequence > sequence + 4, "time for many questions")
    asked = [entry.who for entry in await cluster.client.flips()]
    assert asked == ["someone"]


def test_shifts_in_words() -> None:
    assert in_words(Shift("arrivals", 4.0, 12.5, 3.0, 7.0)) == "arrivals: 4 → 12.5 requests/s, noticed after 3 s"


def test_of_the_jobs_that_were_counted_only_the_newest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.cluster_monitor.slo.SEEN", 100)
    store: Any = None  # nothing is written
    counted = list[Ended]()
    service = SloService((60.0, 300.0), store, counted.append)
    jobs = [(f"j{number}", Ended("chat", How.COMPLETED, 1_000.0)) for number in range(1_000)]
    assert service.take(jobs) == 1_000
    assert len(service._seen) == 100
    assert service.take(jobs[-100:]) == 0
    assert len(counted) == 1_000
