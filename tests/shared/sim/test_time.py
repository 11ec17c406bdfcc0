"""Time only goes forward, whatever happens to instances, and latencies count from a request's first arrival."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.domain.instance import Role
from shared.policy.role_flip import IdleFlip
from shared.sim.cluster import simulate
from shared.sim.events import EventLoop, Handler
from shared.sim.outcomes import Status
from shared.sim.spec import Flip, Loss, RunSpec
from shared.sim.workload import Workload
from tests.shared.sim.clusters import instance, pair, several

INSTANCES = ("p0", "p1", "d0", "d1")


def workload(*requests: tuple[float, int, int]) -> Workload:
    arrivals, prompts, outputs = zip(*requests, strict=True)
    return Workload("test", np.array(arrivals, dtype=np.float64), np.array(prompts), np.array(outputs))


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
    with pytest.raises(RuntimeError, match=r"print.* for 1\.0 s was made at 2\.0 s"):
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


def test_patience_counts_all_waits_of_a_request_together() -> None:
    work = workload((0.0, 100, 4000))
    for back_s, ends in ((22.5, Status.COMPLETED), (23.5, Status.REFUSED)):
        # It waits 1.89 s for its first decode instance: 3.11 of its 5 s are left.
        losses = (Loss("d", 0.0, 2.0), Loss("d", 20.0, back_s))
        with watched() as times:
            rows = simulate(work, pair(), RunSpec(losses=losses, patience_s=5.0)).outcomes
        assert times == sorted(times)
        assert rows.status.tolist() == [int(ends)]


def changes() -> st.SearchStrategy[tuple[tuple[Loss, ...], tuple[Flip, ...]]]:
    moments = st.floats(0.0, 6.0)
    losses = st.builds(
        lambda name, at, away: Loss(name, at, None if away is None else at + away),
        st.sampled_from(INSTANCES), moments, st.none() | st.floats(0.0, 3.0),
    )  # fmt: skip
    flips = st.builds(Flip, st.sampled_from(INSTANCES), moments)
    return st.tuples(
        st.lists(losses, max_size=6).map(tuple), st.lists(flips, max_size=4).map(tuple)
    )  # fmt: skip


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
        losses=changed[0], flips=changed[1], patience_s=patience_s, job_timeout_s=job_timeout_s, hop_s=0.001,
        role_flip=IdleFlip(for_s=0.5) if policy else None, role_flip_every_s=0.2, drain_timeout_s=1.0,
    )  # fmt: skip
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
