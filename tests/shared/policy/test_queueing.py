"""Waits in closed form beside waits in the simulator, and beside waits that are known exactly."""

from math import exp, inf, isinf

import numpy as np
import pytest

from shared.domain.instance import Role
from shared.policy.queueing import EXPONENTIAL_POINTS, NO_WAIT, Wait, queue_wait
from shared.sim.cluster import simulate
from shared.sim.spec import EngineLimits, RunSpec
from shared.sim.workload import Workload
from tests.shared.sim.clusters import Linear, instance

REQUESTS, TOLERANCE = 20_000, 0.15  # of the mean wait; several servers with less load wait shorter than the formula
TOKEN_S, MEAN_TOKENS = 1e-3, 100.0  # of a prompt


@pytest.mark.parametrize(("servers", "load"), [(1, 0.8), (4, 0.85)])
@pytest.mark.parametrize("variation", [0.0, 1.5], ids=["constant", "heavy tail"])
def test_mean_waits_are_those_of_the_simulator(servers: int, load: float, variation: float) -> None:
    """Prefill instances that accept one prompt at a time, and one queue in front of them: M/G/c."""
    rate = load * servers / (MEAN_TOKENS * TOKEN_S)
    rng = np.random.default_rng(7)
    sigma = np.sqrt(np.log(1.0 + variation**2))
    prompts = np.maximum(1, np.rint(MEAN_TOKENS * rng.lognormal(-(sigma**2) / 2.0, sigma, REQUESTS))).astype(np.int64)
    workload = Workload(
        "prompts", np.cumsum(rng.exponential(1.0 / rate, REQUESTS)), prompts, np.ones(REQUESTS, np.int64)
    )
    times, limits = Linear(base_s=0.0, prefill_s=TOKEN_S), EngineLimits(batched_tokens=1 << 20)
    instances = [instance(f"p{n}", Role.PREFILL, times, limits=limits, max_prefills=1) for n in range(servers)]
    result = simulate(workload, [*instances, instance("d", Role.DECODE, Linear(1e-9, 1e-9, 1e-9))], RunSpec())
    waits_s = result.outcomes.first_token_s - workload.arrival_s - prompts * TOKEN_S
    squared = float((prompts.std() / prompts.mean()) ** 2)
    served_per_s = servers / (float(prompts.mean()) * TOKEN_S)
    expected = queue_wait(rate / served_per_s, servers, served_per_s, (1.0 + squared) / 2.0)
    assert expected.mean_s == pytest.approx(float(waits_s.mean()), rel=TOLERANCE)


def test_one_server_waits_as_theory_has_it() -> None:
    exponential, constant = (queue_wait(0.5, 1, 10.0, variability) for variability in (1.0, 0.5))
    assert exponential.mean_s == pytest.approx(0.5 / (1.0 - 0.5) / 10.0)  # M/M/1
    assert constant.mean_s == pytest.approx(exponential.mean_s / 2.0)  # M/D/1
    assert queue_wait(0.5, 1, 10.0, 0.0).mean_s == 0.0


def test_the_probability_of_a_wait_within_a_limit() -> None:
    wait = Wait(0.5, 2.0)
    found = wait.within(np.array([-1.0, 0.0, 1.0]))
    assert found == pytest.approx([0.0, 0.5, 1.0 - 0.5 * exp(-2.0)])
    assert NO_WAIT.within(np.array([-1.0, 0.0])).tolist() == [0.0, 1.0]
    endless = queue_wait(1.0, 4, 10.0)
    assert isinf(endless.mean_s)
    assert endless.within(np.array([1e9])).tolist() == [0.0]
    assert NO_WAIT.rate == inf


def test_two_points_stand_for_an_exponential_wait() -> None:
    for power, moment in ((0, 1.0), (1, 1.0), (2, 2.0), (3, 6.0)):
        assert sum(weight * multiple**power for multiple, weight in EXPONENTIAL_POINTS) == pytest.approx(moment)
