"""Every policy of the registry is one that services use: all processes follow it, and a job is served under it."""

import asyncio
from collections.abc import AsyncIterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.pipeline import Pipeline
from shared.domain.job import Phase
from shared.domain.policies import ENGINE, KINDS, PolicySet
from shared.domain.route import PolicySpec
from shared.errors import InvalidRequest
from shared.policy import registry
from shared.timeline import Span
from tests.gateway.cluster import make_job, tokens_of
from tests.services.control_plane import until
from tests.services.live_suite import LiveSuite, live_suite, pipelines

on_one_loop = pytest.mark.asyncio(loop_scope="module")
BASE = {"placement": "least_load", "split": "full", "dispatch": "power_of_two"}  # every job passes both instances
NEEDED: dict[str, dict[str, Any]] = {"plan": {"routes": [["p0", "d0", 1]]}, "single": {"instance": "p0"}}
ALL = [(kind, name) for kind, table in registry.KINDS.items() for name in table]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveSuite]:
    async with live_suite(tmp_path_factory.mktemp("suite")) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways(suite: LiveSuite) -> AsyncIterator[list[Pipeline]]:
    with pipelines(suite) as found:
        yield found


async def reasons_of_a_job(gateway: Pipeline) -> set[str]:
    """Serve one, and give what its decisions rested on."""
    job, steps = make_job(list(range(200)), 4)
    await gateway.run(job)
    assert (job.phase, len(tokens_of(steps))) == (Phase.COMPLETED, 4)
    return {reason.what for decision in job.timeline.decisions for reason in decision.reasons}


@on_one_loop
@pytest.mark.parametrize(("kind", "name"), ALL)
async def test_all_follow_it_and_a_job_is_served_under_it(
    suite: LiveSuite, gateways: list[Pipeline], kind: str, name: str
) -> None:
    spec = PolicySpec(name, NEEDED.get(name, {}))
    wanted = {**dict.fromkeys(KINDS), **{k: PolicySpec(n) for k, n in BASE.items()}, kind: spec}
    answer = await suite.change(wanted)
    assert {one.name: one.follows for one in answer.followers} == dict.fromkeys(["s0", "s1", "d0", "p0"], True)
    for app in suite.schedulers:
        assert app.state.scheduler.placer.followed[0].spec(kind) == spec
    if kind in ENGINE:
        said = {"off": False, "on": True}.get(name, name)
        assert [one.engine.policies.names()[kind] for one in suite.instances.values()] == [said, said]
    for gateway in gateways:
        reasons = await reasons_of_a_job(gateway)
        if kind in BASE:
            assert any(what.startswith(f"{kind}:{name}") for what in reasons), reasons


@on_one_loop
async def test_one_that_comes_later_follows_from_its_first_broadcast_on(suite: LiveSuite) -> None:
    answer = await suite.change({"prefill_order": PolicySpec("ljf", {"window": 3}), "split": PolicySpec("none")})
    await suite.start_instance("d1", "decode")
    await suite.start_scheduler()
    late = suite.schedulers[-1].state.scheduler.placer

    async def follow() -> bool:
        async with suite.client as monitor:
            told = {one.name: one.follows for one in (await monitor.policies()).followers}
        return told.get("d1", False) and told.get("s2", False)

    await until(follow, "both follow", timeout_s=20)
    assert suite.instances["d1"].engine.policies.names()["prefill_order"] == "ljf"
    assert (late.followed[0].revision, late.followed[0].split.name) == (answer.revision, "none")


@on_one_loop
async def test_a_monitor_that_restarts_changes_nothing_and_goes_on(suite: LiveSuite) -> None:
    answer = await suite.change({"split": PolicySpec("fraction", {"fraction": 0.25}), "step_budget": PolicySpec("off")})
    followed = [app.state.scheduler.placer.followed for app in suite.schedulers]
    heard: list[PolicySet] = []
    suite.schedulers[0].state.scheduler.placer.on_policies = lambda: heard.append(
        suite.schedulers[0].state.scheduler.placer.followed[0]
    )
    await suite.stop_monitor()
    app = await suite.start_monitor()
    monitor = app.state.leadership.acting()
    await until(lambda: monitor.policies.policies.revision == answer.revision, "recalled", timeout_s=20)
    sequence = monitor.broadcaster.sequence
    views = [app.state.scheduler.placer for app in suite.schedulers]
    await until(lambda: all(v.view.sequence > sequence + 2 for v in views if v.view), "heard again", timeout_s=20)
    assert [app.state.scheduler.placer.followed for app in suite.schedulers] == followed
    assert heard == []
    assert not suite.instances["p0"].engine.policies.step_budget
    again = await suite.change({"split": PolicySpec("none")})
    assert again.revision > answer.revision


@on_one_loop
async def test_a_wrong_change_reaches_nobody(suite: LiveSuite) -> None:
    before = [app.state.scheduler.placer.followed for app in suite.schedulers]
    with pytest.raises(InvalidRequest, match="dispatch: unknown dispatch policy 'best'; known: adaptive"):
        await suite.change({"split": PolicySpec("none"), "dispatch": PolicySpec("best")})
    assert [app.state.scheduler.placer.followed for app in suite.schedulers] == before


async def test_the_weights_of_instances_reach_the_policy(tmp_path: Path) -> None:
    async with live_suite(tmp_path, schedulers=1) as suite:
        await suite.start_instance("p1", "prefill", weight=4.0)
        await until(lambda: suite.known(3), "the second prefill instance is known to be ready", timeout_s=20)
        await suite.change({"placement": PolicySpec("weighted"), "split": PolicySpec("full")})
        placed: list[str] = []
        with pipelines(suite) as (gateway,):
            for _ in range(10):
                job, _steps = make_job(list(range(200)), 2)
                await gateway.run(job)
                figures = [
                    r.figures for d in job.timeline.decisions for r in d.reasons if r.what.startswith("placement")
                ]
                placed.append(str(figures[0]["chosen"]))
        assert (placed.count("p0"), placed.count("p1")) == (2, 8)


async def test_under_cronus_requests_wait_at_the_gateway_until_the_prefill_instance_has_fewer_than_two(
    tmp_path: Path,
) -> None:
    async with live_suite(tmp_path, schedulers=1) as suite:
        await suite.change({**{k: PolicySpec(n) for k, n in BASE.items()}, "split": PolicySpec("cronus")})
        with pipelines(suite) as (gateway,):
            jobs = [make_job(list(range(200)), 4) for _ in range(8)]
            await asyncio.gather(*(gateway.run(job) for job, _ in jobs))
    assert [(job.phase, len(tokens_of(steps))) for job, steps in jobs] == [(Phase.COMPLETED, 4)] * 8
    delays = [d.reasons[0].what for job, _ in jobs for d in job.timeline.decisions if d.kind == "delay"]
    assert set(delays) == {"each prefill instance has at least 2 requests (split: cronus)"}
    changes: list[tuple[float, int]] = []
    for job, _ in jobs:
        spans = {one.span: one for one in job.timeline.spans}
        changes += [(spans[Span.QUEUE].started_s, 1), (spans[Span.PREFILL].ended_s, -1)]
    inside = accumulate(change for _, change in sorted(changes))
    assert max(inside) <= 2
