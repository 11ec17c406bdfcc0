"""How a fleet with given roles would serve a demand."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.domain.demand import Demand
from shared.domain.instance import InstanceView
from shared.domain.rates import Rates
from shared.policy.outlook import Outlook, RoleCounts, classify, outlook
from tests.shared.policy.demands import DEMAND, FULL, demand_of, rates
from tests.shared.policy.views import decode, prefill


def outlook_of(demand: Demand, *views: InstanceView) -> Outlook:
    classes, class_of = classify(views)
    return outlook(demand, classes, RoleCounts.from_views(views, class_of, len(classes)))


def served(prefills: int, decodes: int, demand: Demand, slow: int = 0) -> Outlook:
    shape = {"max_seqs": 64, "total_blocks": 20_000}
    views = [prefill(f"p{n}", rates=rates(), **shape) for n in range(prefills)]
    views += [prefill(f"s{n}", rates=rates(3.0), **shape) for n in range(slow)]
    return outlook_of(demand, *views, *(decode(f"d{n}", rates=rates(), **shape) for n in range(decodes)))


def test_instances_alike_are_one_class() -> None:
    views = [prefill("a", rates=rates()), decode("b", rates=rates(1.01)), decode("c", rates=rates(3.0))]
    classes, class_of = classify(views)
    assert (len(classes), class_of["a"]) == (2, class_of["b"])
    assert RoleCounts.from_views(views, class_of, 2) == RoleCounts((1, 0), (1, 1))


def test_use_is_work_over_capacity() -> None:
    alone_s = 0.01 * 1_000 / 512 + 0.1
    assert served(2, 4, demand_of(**FULL)).prefill_use == pytest.approx(20.0 * alone_s / 2.0)
    assert served(2, 4, demand_of(**FULL), slow=3).prefill_use == pytest.approx(20.0 * alone_s / 3.0)


def test_steps_are_as_long_as_littles_law_makes_them() -> None:
    seen = served(4, 2, demand_of(**FULL, burstiness=0.0))
    step_s = 0.01 / (1.0 - 10.0 * 100.0 * (1e-4 + 1e-7 * 1_050.0))  # b = rate · output · step; step = fixed + each · b
    moves_s = 1_000.0 * 2 * 2 * 2 * 64 * 2 / 2e9
    assert seen.tpot_s == pytest.approx(step_s + moves_s / 100.0, rel=2e-3)


def test_a_step_that_yields_several_tokens_is_as_long_as_so_many_steps() -> None:
    plain, shape = rates(), {"max_seqs": 64, "total_blocks": 20_000}
    assert plain.step is not None
    steps = msgspec.structs.replace(plain.step, decode=plain.step.decode.scaled(3.0), gain=3.0)
    drafts = msgspec.structs.replace(plain, step=steps)
    prefills = [prefill(f"p{n}", rates=plain, **shape) for n in range(4)]

    def seen(of_decodes: Rates) -> Outlook:
        views = [*prefills, *(decode(f"d{n}", rates=of_decodes, **shape) for n in range(2))]
        return outlook_of(demand_of(**FULL), *views)

    assert seen(drafts).tpot_s == pytest.approx(seen(plain).tpot_s)
    assert seen(drafts).decode_use == pytest.approx(seen(plain).decode_use)
    assert seen(msgspec.structs.replace(plain, step=msgspec.structs.replace(steps, gain=1.0))).decode_use > 1.0


@pytest.mark.parametrize(
    ("prompt", "output", "better", "worse"), [(3_000.0, 20.0, (5, 1), (1, 5)), (200.0, 450.0, (1, 5), (5, 1))]
)
def test_roles_follow_lengths(prompt: float, output: float, better: tuple[int, int], worse: tuple[int, int]) -> None:
    lengths = {"prompt_tokens": prompt, "fresh_tokens": prompt, "fresh_squares": prompt**2, "output_tokens": output}
    demand = demand_of(**FULL, **lengths, rate=12.0)
    assert served(*better, demand).slo_cost < 0.5 < served(*worse, demand).slo_cost


def test_what_makes_roles_better_or_worse() -> None:
    free, full = served(1, 5, DEMAND), served(1, 5, demand_of(**FULL))
    assert free.slo_cost < 0.3 < full.slo_cost, "decode instances may compute prompts"
    assert free.prefill_share < 1.0 == full.prefill_share
    held = demand_of(**FULL, fresh_tokens=200.0, fresh_squares=4e5)  # by prefix caches
    assert served(1, 5, held).prefill_use < 0.5 * full.prefill_use
    beside = served(3, 3, demand_of(rate=10.0, split_least=0.0, split_most=0.0))
    assert beside.tpot_s > 1.3 * served(3, 3, demand_of(**FULL, rate=10.0)).tpot_s, "prompts make steps longer"
    few, many = (served(3, 3, demand_of(**FULL, rate=24.0, burstiness=b)) for b in (1.0, 8.0))
    service_s = 3.0 * few.prefill_use / 24.0
    assert many.ttft_s - service_s == pytest.approx(4.5 * (few.ttft_s - service_s))  # (8 + 1) / (1 + 1): Kingman
    assert many.slo_cost > few.slo_cost


def test_memory_and_seats_bound_what_decodes_at_once() -> None:
    demand, first = demand_of(**FULL, rate=5.0), prefill("p", rates=rates(), total_blocks=20_000)
    small, large = (
        outlook_of(demand, first, decode("d", rates=rates(), total_blocks=blocks)) for blocks in (200, 20_000)
    )
    assert small.decode_use > 1.0 > large.decode_use
    assert small.slo_cost > large.slo_cost


@settings(deadline=None)
@given(
    st.floats(0.1, 500.0),
    st.floats(1.0, 20_000.0),
    st.floats(1.0, 5_000.0),
    st.floats(0.0, 50.0),
    st.sampled_from([(0.0, 1.0), (1.0, 1.0), (0.0, 0.0), (0.5, 0.5)]),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_an_outlook_is_finite_and_more_requests_are_not_easier(
    rate: float, prompt: float, output: float, bursts: float, split: tuple[float, float], prefills: int, decodes: int
) -> None:
    lengths = {"prompt_tokens": prompt, "fresh_tokens": prompt, "fresh_squares": 2 * prompt**2, "output_tokens": output}
    least, most = split
    demand = demand_of(rate=rate, burstiness=bursts, split_least=least, split_most=most, **lengths)
    seen = served(prefills, decodes, demand)
    assert all(value == value and 0.0 <= value < float("inf") for value in seen)
    doubled = served(prefills, decodes, msgspec.structs.replace(demand, rate=2.0 * rate))
    assert doubled.slo_cost >= min(seen.slo_cost, 2.0) - 0.02  # above 2, all requests miss both targets anyway
