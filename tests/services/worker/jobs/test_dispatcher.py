"""The dispatcher: by the policy that each job brings, with random numbers of its own."""

import asyncio

import pytest

from services.worker.jobs.prefill import REST_S, Dispatcher
from shared.domain.cluster import ClusterDelta
from shared.domain.instance import ClusterView
from shared.domain.route import PolicySpec
from shared.errors import InvalidRequest, Unavailable
from tests.shared.policy.views import decode, job


def dispatcher(seed: int | str = 0, instances: int = 8) -> Dispatcher:
    made = Dispatcher(seed)
    assert made.hear(ClusterDelta.of(ClusterView(1, 0.0, tuple(decode(f"d{at}") for at in range(instances)))))
    return made


def choices(made: Dispatcher, policy: PolicySpec, count: int = 40) -> list[str]:
    return [made.choose(job(100, 10), policy)[0].instance_id for _ in range(count)]


def test_each_job_is_dispatched_by_the_policy_that_it_brings() -> None:
    made = dispatcher()
    for name in ("random", "power_of_two", "random"):
        _, reasons = made.choose(job(100, 10), PolicySpec(name))
        assert name in reasons[0].what


def test_a_policy_is_built_once_for_each_set_of_parameters() -> None:
    made = dispatcher()
    for policy in (PolicySpec("spread"), PolicySpec("power_of_two", {"unpredicted_tokens": 5}), PolicySpec("spread")):
        choices(made, policy, 3)
    assert len(made._policies) == 2
    for tokens in range(100):
        made.choose(job(100, 10), PolicySpec("power_of_two", {"unpredicted_tokens": tokens}))
    assert len(made._policies) <= 16


@pytest.mark.parametrize("policy", [None, PolicySpec("no such"), PolicySpec("random", {"more": 1})])
def test_a_policy_that_is_missing_or_unknown_is_named(policy: PolicySpec | None) -> None:
    with pytest.raises(InvalidRequest, match="dispatch policy"):
        dispatcher().choose(job(100, 10), policy)


def test_no_instance_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        dispatcher(instances=0).choose(job(100, 10), PolicySpec("random"))


def test_seeds_of_two_instances_draw_differently_and_one_seed_draws_the_same() -> None:
    policy = PolicySpec("random")
    assert choices(dispatcher("p0:1"), policy) == choices(dispatcher("p0:1"), policy)
    assert choices(dispatcher("p0:1"), policy) != choices(dispatcher("p1:1"), policy)


async def test_the_cluster_is_followed_while_jobs_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made, wanted, now = Dispatcher(0), list[bool](), [100.0]
    made.on_follow = wanted.append
    monkeypatch.setattr("services.worker.jobs.prefill.time.monotonic", lambda: now[0])
    assert made.known("d0") is None
    made.rest()
    assert not wanted
    made.expect()
    made.expect()
    assert wanted == [True]
    waiting = asyncio.ensure_future(made.wait_for_cluster())
    await asyncio.sleep(0)
    assert not made.hear(ClusterDelta(5, 0.0))  # a change of what nobody knows
    assert not waiting.done()
    assert made.hear(ClusterDelta.of(ClusterView(5, 0.0, (decode("d0"),))))
    await asyncio.wait_for(waiting, 10)
    assert made.choose(job(100, 10), PolicySpec("random"))[0].instance_id == "d0"
    now[0] += REST_S - 1.0
    made.rest()
    made.expect()
    now[0] += REST_S - 1.0
    made.rest()
    assert wanted == [True]
    now[0] += REST_S + 1.0
    made.rest()
    assert wanted == [True, False]
    assert made.known("d0") is None  # what it knew is old
    made.expect()
    assert wanted == [True, False, True]
