"""Interactive and batch requests together, by the functions that decide live."""

from dataclasses import replace

import numpy as np
import pytest

from shared.domain.instance import Role
from shared.domain.job import Slo, WhenFull
from shared.domain.rates import Rates, StepForm, StepRates
from shared.errors import InvalidRequest
from shared.policy import fair_queue
from shared.policy.adaptive import Adaptive, AdaptiveDispatch, AdaptiveSplit
from shared.policy.overload import steps_aside
from shared.policy.placement import Policies
from shared.sim.cluster import simulate
from shared.sim.metrics import attainment
from shared.sim.outcomes import Outcomes, Status
from shared.sim.spec import EngineLimits, InstanceSpec, RunSpec, plain_policies
from shared.sim.workload import Workload, evenly, of_class, synthetic, together
from tests.shared.sim.clusters import Linear, instance

CHAT = Slo("default", 2.0, 0.15, 1.0, WhenFull.REJECT)
BATCH = Slo("batch", 600.0, 2.0, 0.1, WhenFull.DELAY)
RUN = RunSpec(policies=Policies(Adaptive(), AdaptiveSplit(), AdaptiveDispatch()))
# The step times of `clusters.Linear`: 10 ms, 1 ms a prompt token or decode. So one instance serves about two a second.
STEP = StepRates(
    StepForm(0.01, token_s=0.001), StepForm(0.01, sequence_s=0.001), StepForm(0.01, token_s=0.001, sequence_s=0.001)
)


def cluster() -> list[InstanceSpec]:
    return [instance(name, Role.DECODE, rates=Rates(step=STEP), kv_tokens=64_000) for name in ("a", "b")]


def requests(count: int, rate: float, slo: Slo, caller: str = "") -> Workload:
    return of_class(evenly(synthetic(count, 400, 20), rate), slo, caller)


def of(rows: Outcomes, workload: Workload, at: int) -> tuple[float, int, int]:
    """Of one part of the workload: the share within its targets, and how many completed and were refused."""
    assert workload.mix is not None
    mine, slo = workload.mix.class_of == at, workload.mix.classes[at]
    met = rows.completed & (rows.ttft_s <= slo.ttft_s) & (rows.tpot_s <= slo.tpot_s)
    ended = [int(np.sum(mine & (rows.status == int(status)))) for status in (Status.COMPLETED, Status.REFUSED)]
    return float(met[mine].mean()), ended[0], ended[1]


def test_interactive_requests_keep_their_targets_and_batch_fills_the_rest() -> None:
    both = together([requests(60, 2.0, CHAT), requests(120, 4.0, BATCH)])
    rows = simulate(both, cluster(), RUN).outcomes
    met, completed, refused = of(rows, both, 0)
    assert met >= 0.9
    assert completed + refused == 60
    assert of(rows, both, 1)[1:] == (120, 0)
    plain = of_class(both, Slo("all", 2.0, 0.15))
    without = simulate(plain, cluster(), RUN).outcomes
    assert of(without, plain, 0)[0] < 0.5


def test_too_much_interactive_work_is_refused_and_what_is_let_in_keeps_its_targets() -> None:
    only = requests(120, 8.0, CHAT)
    rows = simulate(only, cluster(), RUN).outcomes
    met, completed, refused = of(rows, only, 0)
    assert completed + refused == 120
    assert refused > 30
    assert met * 120 >= 0.85 * completed


def test_a_refused_client_that_comes_again_when_told_is_served_more_often() -> None:
    only = requests(30, 30.0, CHAT)
    once = of(simulate(only, cluster(), RUN).outcomes, only, 0)
    again = of(simulate(only, cluster(), replace(RUN, returns=20)).outcomes, only, 0)
    assert again[1] > once[1]


def test_who_is_delayed_for_too_long_is_refused() -> None:
    both = together([requests(60, 2.0, CHAT), requests(120, 8.0, BATCH)])
    rows = simulate(both, cluster(), replace(RUN, delay_s=3.0)).outcomes
    assert of(rows, both, 1)[2] > 0
    assert np.all(rows.status != int(Status.UNFINISHED))


def test_of_two_keys_the_one_that_floods_is_refused_first() -> None:
    both = together([requests(300, 5.0, CHAT, "flood"), requests(30, 0.5, CHAT, "polite")])
    pair = [
        instance(name, role, rates=Rates(step=STEP), kv_tokens=64_000) for name, role in zip("pd", Role, strict=True)
    ]
    rows = simulate(both, pair, replace(RUN, policies=plain_policies())).outcomes
    assert of(rows, both, 1)[0] >= 0.9
    assert of(rows, both, 0)[0] < 0.6
    one = of_class(both, CHAT)
    rows = simulate(one, pair, replace(RUN, policies=plain_policies())).outcomes
    assert np.mean(rows.completed[both.mix.caller_of == 1]) < 0.6  # type: ignore[union-attr]  # of one key all are alike


def test_the_same_again() -> None:
    both = together([requests(30, 2.0, CHAT), requests(60, 4.0, BATCH)])
    first, second = (simulate(both, cluster(), RUN).outcomes for _ in range(2))
    assert np.array_equal(first.last_token_s, second.last_token_s, equal_nan=True)


def test_a_mix_is_of_as_many_requests_as_there_are_and_its_head_too() -> None:
    both = together([requests(3, 1.0, CHAT, "x"), requests(2, 1.0, BATCH, "y")])
    assert both.mix is not None
    assert [both.mix.callers[at] for at in both.mix.caller_of] == ["x", "y", "x", "y", "x"]
    head = both.head(2).mix
    assert head is not None
    assert list(head.class_of) == [0, 1]
    with pytest.raises(InvalidRequest, match="a mix of 2 requests, not 5"):
        replace(both, mix=head)
    with pytest.raises(InvalidRequest, match="without a class"):
        together([synthetic(1, 1, 1)])


def test_a_late_request_that_waits_for_room_makes_none_behind_it_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts for more KV than there is: the late ones step aside and leave the others their time."""
    rng, count = np.random.default_rng(1), 300
    arrival_s = np.cumsum(rng.exponential(0.2, count))
    work = Workload("long", arrival_s, rng.integers(300, 3500, count), rng.integers(100, 400, count))
    form = StepForm(0.01, 5e-5, 0.0, 1e-4)
    rates, model = Rates(step=StepRates(form, form, form)), Linear(0.01, 5e-5, 1e-4)
    sizes = (("p", Role.PREFILL, 65_536), ("d0", Role.DECODE, 16_384), ("d1", Role.DECODE, 16_384))
    specs = [
        instance(name, role, model, kv_tokens=size, limits=EngineLimits(), rates=rates) for name, role, size in sizes
    ]
    chosen = Policies(Adaptive(keep=False), AdaptiveSplit(), AdaptiveDispatch())  # else none of them waits for room
    met = []
    for aside in (steps_aside, lambda *_: False):
        monkeypatch.setattr(fair_queue, "steps_aside", aside)
        result = simulate(work, specs, RunSpec(policies=chosen, slo=Slo()))
        assert result.outcomes.completed.all()
        met.append(attainment(result.outcomes, Slo()).every)
    assert met[0] > met[1] + 0.05
