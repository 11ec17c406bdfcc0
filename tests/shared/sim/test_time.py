"""Time only goes forward, whatever happens to instances, and latencies count from a request's first arrival."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.domain.instance import Role
from shared.policy.papers.tetriinfer import IdleFlip
from shared.sim.cluster import simulate
from shared.sim.events import EventLoop, Handler
from shared.sim.outcomes import Status
from shared.sim.spec import Flip, Loss, RunSpec
from tests.shared.sim.clusters import instance, pair, several, workload

INSTANCES = ("p0", "p1", "d0", "d1")


@contextmanager
def watched() -> Iterator[list[float]]:
    """The times at which events are handled, in the order in which they are."""
    times: list[float] = []
    at = EventLoop.at

    def watch(loop: EventLoop, time_s: float, handler: Handler, subject: Any) -> None:
        def handled(it: Any, now: float) -> None:
            times.append(now)
            handler(it, now)

        at(loop, time_s, handled, subject)

    with patch.object(EventLoop, "at", watch):
        yield times


def test_an_event_in_the_past_is_refused() -> None:
    loop = EventLoop()
    loop.at(2.0, lambda subject, now: loop.at(1.0, print, None), None)
    with pytest.raises(RuntimeError, match=r"print.* for 1\.0 s was planned at 2\.0 s"):
        loop.run(lambda: False)


def test_a_restarted_request_does_not_arrive_in_the_past() -> None:
    # It decodes when its instance dies at 20 s, long after its patience of 5 s counted from its arrival is over.
    work = workload((0.0, 100, 4000))
    specs = [instance("p", Role.PREFILL), instance("d", Role.DECODE)]
    with watched() as times:
        result = simulate(work, specs, RunSpec(losses=(Loss("d", 20.0, 22.0),), patience_s=5.0))
    assert times == sorted(times)
    rows = result.outcomes
    assert rows.status.tolist() == [int(Status.COMPLETED)]
    assert rows.attempts.tolist() == [2]
    assert rows.ttft_s[0] == pytest.approx(0.110)  # from its first arrival, in its first attempt
    assert rows.jct_s[0] > 22.0 + 0.011 * (4000 - 20.0 / 0.011)


@pytest.mark.parametrize(("back_s", "ends"), [(7.9, Status.COMPLETED), (8.1, Status.REFUSED)])
def test_patience_counts_all_waits_together(back_s: float, ends: Status) -> None:
    # No instance until 2 s, and none from 5 s on, before it has a token: 3 s of its patience are left then.
    losses = (Loss("p", 0.0, 2.0), Loss("d", 0.0, 2.0), Loss("p", 3.0), Loss("d", 5.0, back_s))
    rows = simulate(workload((0.5, 2000, 4)), pair(), RunSpec(losses=losses, patience_s=4.5)).outcomes
    assert rows.status.tolist() == [int(ends)]


def test_a_token_renews_patience() -> None:
    # It waits 1.89 s for its first decode instance; when that is lost, all of its 5 s are left.
    for back_s, ends in ((24.9, Status.COMPLETED), (25.1, Status.REFUSED)):
        losses = (Loss("d", 0.0, 2.0), Loss("d", 20.0, back_s))
        rows = simulate(workload((0.0, 100, 4000)), pair(), RunSpec(losses=losses, patience_s=5.0)).outcomes
        assert rows.status.tolist() == [int(ends)]


@pytest.mark.parametrize("back_s", [None, 4.0])
@pytest.mark.parametrize("streaming", [True, False])
def test_prompts_under_way_wait_when_the_last_decode_instance_dies(back_s: float | None, streaming: bool) -> None:
    # The first decodes; of the second's three chunks one is computed; the third comes while there is no instance.
    work = workload((0.0, 200, 50), (0.05, 700, 5), (1.5, 100, 5))
    run = RunSpec(losses=(Loss("d", 0.6, back_s),), patience_s=5.0, streaming=streaming)
    rows = simulate(work, pair(), run).outcomes
    ends = Status.REFUSED if back_s is None else Status.COMPLETED
    assert rows.status.tolist() == [int(ends)] * 3
    # The first has lost its KV; so has the second, if it was sent chunk by chunk.
    assert rows.attempts.tolist() == [2, 1 + streaming, 1]


@pytest.mark.parametrize("back_s", [30.0, None])
def test_prompts_under_way_wait_when_the_last_decode_instance_drains(back_s: float | None) -> None:
    work = workload((0.0, 200, 50), (0.05, 700, 5), (1.5, 100, 5))
    flips = (Flip("d", 0.6), *(() if back_s is None else (Flip("d", 4.0),)))
    rows = simulate(work, pair(), RunSpec(flips=flips, patience_s=5.0)).outcomes
    # What it has already decodes to its end; the other role's instance does not help.
    assert rows.status.tolist()[:2] == [int(Status.COMPLETED)] * 2
    assert rows.attempts.tolist() == [1, 1, 1]
    assert rows.status[2] == (Status.REFUSED if back_s is None else Status.COMPLETED)


def test_what_takes_too_long_is_stopped() -> None:
    work = workload((0.0, 100, 4000), (0.1, 100, 4000), (5.0, 100, 5))
    rows = simulate(work, pair(), RunSpec(job_timeout_s=3.0)).outcomes
    assert rows.status.tolist() == [int(Status.TIMED_OUT), int(Status.TIMED_OUT), int(Status.COMPLETED)]
    assert rows.jct_s[2] == pytest.approx(0.110 + 0.010 + 4 * 0.011)  # nothing is left of them


def test_the_gateway_takes_so_many_requests_and_prompt_tokens_without_a_first_token() -> None:
    work = workload((0.0, 100, 5), (0.0, 100, 5), (0.0, 100, 5), (5.0, 900, 5), (5.0, 900, 5), (10.0, 2000, 5))
    of_jobs = simulate(work, pair(), RunSpec(max_queued_jobs=2)).outcomes.status.tolist()
    assert of_jobs == [0, 0, int(Status.REFUSED), 0, 0, 0]
    of_tokens = simulate(work, pair(), RunSpec(max_queued_tokens=1000)).outcomes.status.tolist()
    assert of_tokens == [0, 0, 0, 0, int(Status.REFUSED), 0]


def test_a_drain_that_takes_too_long_is_given_up() -> None:
    work = workload((0.0, 100, 4000), (5.0, 100, 5))
    given_up = simulate(work, several(1, 2), RunSpec(flips=(Flip("d0", 1.0), Flip("d1", 1.0)), drain_timeout_s=2.0))
    assert given_up.outcomes.completed.all()
    assert sum(use.flips for use in given_up.instances) == 1  # the idle one; the other keeps its role and takes work


def changes() -> st.SearchStrategy[tuple[tuple[Loss, ...], tuple[Flip, ...]]]:
    moments = st.floats(0.0, 6.0)
    losses = st.builds(
        lambda name, at, away: Loss(name, at, None if away is None else at + away),
        st.sampled_from(INSTANCES),
        moments,
        st.none() | st.floats(0.0, 3.0),
    )
    flips = st.builds(Flip, st.sampled_from(INSTANCES), moments)
    return st.tuples(st.lists(losses, max_size=6).map(tuple), st.lists(flips, max_size=4).map(tuple))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 4.0), st.integers(1, 900), st.integers(1, 80)), min_size=1, max_size=25),
    changes(),
    st.sampled_from([0.0, 0.5, 3.0, float("inf")]),
    st.sampled_from([2.0, float("inf")]),
    st.booleans(),
)
def test_time_only_goes_forward_and_every_request_ends_once(
    requests: list[tuple[float, int, int]],
    changed: tuple[tuple[Loss, ...], tuple[Flip, ...]],
    patience_s: float,
    job_timeout_s: float,
    policy: bool,
) -> None:
    work = workload(*sorted(requests))
    run = RunSpec(
        losses=changed[0],
        flips=changed[1],
        patience_s=patience_s,
        job_timeout_s=job_timeout_s,
        hop_s=0.001,
        role_flip=IdleFlip(for_s=0.5) if policy else None,
        role_flip_every_s=0.2,
        drain_timeout_s=1.0,
    )
    ended: list[int] = []
    with watched() as times:
        result = simulate(work, several(2, 2, kv_tokens=1600), run, ended.append)
    assert times == sorted(times)
    rows = result.outcomes
    assert Status.UNFINISHED not in rows.status
    assert (rows.arrival_s == work.arrival_s).all()
    done = rows.completed
    assert (rows.first_token_s[done] > work.arrival_s[done]).all()
    assert (rows.last_token_s[done] >= rows.first_token_s[done]).all()
    if job_timeout_s < 10.0:
        assert (rows.jct_s[done] <= job_timeout_s + 1e-9).all()
