"""What roles would make of a demand."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.demand import Demand
from shared.domain.instance import Role
from shared.domain.rates import LinkRate, Rates, StepForm, StepRates
from shared.policy.predictive_roles import Outlook, Roles, outlook, roles_of, sorted_out
from tests.shared.policy.views import instance


def rates(slower: float = 1.0) -> Rates:
    """Some accelerator: 10,000 prompt tokens a second, decode steps of 10 ms and more."""
    prefill = StepForm(0.01 * slower, 1e-4 * slower)
    decode = StepForm(0.01 * slower, 0.0, 0.0, 1e-4 * slower, 1e-7 * slower)
    mixed = StepForm(0.012 * slower, 1.1e-4 * slower, 0.0, 1e-4 * slower, 1e-7 * slower)
    return Rates(step=StepRates(prefill, decode, mixed), link=LinkRate(2e9, 1e-3))


DEMAND = Demand(
    rate=20.0,
    burstiness=1.0,
    prompt_tokens=1_000.0,
    fresh_tokens=1_000.0,
    fresh_squares=2e6,
    output_tokens=100.0,
    ttft_s=1.0,
    tpot_s=0.05,
)
FULL = {"split_least": 1.0, "split_most": 1.0}


def asked(**changes: float) -> Demand:
    return msgspec.structs.replace(DEMAND, **changes)


def of(prefills: int, decodes: int, demand: Demand, slow: int = 0) -> Outlook:
    """`slow` further instances at a third of the speed compute prompts."""
    views = [instance(f"p{n}", Role.PREFILL, rates=rates(), max_seqs=64, total_blocks=20_000) for n in range(prefills)]
    views += [instance(f"s{n}", Role.PREFILL, rates=rates(3.0), max_seqs=64, total_blocks=20_000) for n in range(slow)]
    views += [instance(f"d{n}", Role.DECODE, rates=rates(), max_seqs=64, total_blocks=20_000) for n in range(decodes)]
    sorts, sort = sorted_out(views)
    by_role = {role is Role.PREFILL: [one for one in views if one.role is role] for role in Role}
    return outlook(demand, sorts, roles_of(by_role, sort, len(sorts)))


def test_instances_alike_are_one_sort() -> None:
    views = [instance("a", rates=rates()), instance("b", rates=rates(1.01)), instance("c", rates=rates(3.0))]
    sorts, sort = sorted_out(views)
    assert (len(sorts), sort["a"], sort["b"]) == (2, sort["a"], sort["a"])
    assert roles_of({True: views[:1], False: views[1:]}, sort, 2) == Roles((1, 0), (1, 1))


def test_use_is_work_over_capacity() -> None:
    alone_s = 0.01 * 1_000 / 512 + 0.1
    assert of(2, 4, asked(**FULL)).prefill_use == pytest.approx(20.0 * alone_s / 2.0)
    assert of(2, 4, asked(**FULL), slow=3).prefill_use == pytest.approx(20.0 * alone_s / 3.0)


def test_steps_are_as_long_as_littles_law_makes_them() -> None:
    seen = of(4, 2, asked(**FULL, burstiness=0.0))
    each_s, context = 1e-4 + 1e-7 * 1_050.0, 1_050.0
    step_s = 0.01 / (1.0 - 10.0 * 100.0 * each_s)  # b = rate · output · step; step = fixed + each · b
    moves_s = 1_000.0 * 2 * 2 * 2 * 64 * 2 / 2e9
    assert seen.tpot_s == pytest.approx(step_s + moves_s / 100.0, rel=2e-3)
    assert context == 1_050.0


@pytest.mark.parametrize(
    ("what", "changes", "better", "worse"),
    [
        ("long prompts and short answers", {"prompt_tokens": 3_000.0, "output_tokens": 20.0}, (5, 1), (1, 5)),
        ("short prompts and long answers", {"prompt_tokens": 200.0, "output_tokens": 450.0}, (1, 5), (5, 1)),
    ],
)
def test_roles_follow_the_lengths(
    what: str, changes: dict[str, float], better: tuple[int, int], worse: tuple[int, int]
) -> None:
    prompt = changes["prompt_tokens"]
    demand = asked(**FULL, **changes, fresh_tokens=prompt, fresh_squares=prompt**2, rate=12.0)
    good, bad = of(*better, demand), of(*worse, demand)
    assert good.harm < 0.5 < bad.harm


def test_where_decode_instances_may_compute_prompts_an_imbalance_hurts_less() -> None:
    free, full = of(1, 5, DEMAND), of(1, 5, asked(**FULL))
    assert free.harm < 0.3 < full.harm
    assert free.share < 1.0 == full.share


def test_what_prefix_caches_hold_needs_no_prefill() -> None:
    held = asked(**FULL, fresh_tokens=200.0, fresh_squares=4e5)
    assert of(1, 5, held).prefill_use < 0.5 * of(1, 5, asked(**FULL)).prefill_use


def test_prompts_beside_decodes_make_their_steps_longer() -> None:
    beside = of(3, 3, asked(rate=10.0, split_least=0.0, split_most=0.0))
    assert beside.tpot_s > 1.3 * of(3, 3, asked(**FULL, rate=10.0)).tpot_s


def test_bursts_hurt() -> None:
    few, many = (of(3, 3, asked(**FULL, rate=24.0, burstiness=b)) for b in (1.0, 8.0))
    service_s = 3.0 * few.prefill_use / 24.0
    assert many.ttft_s - service_s == pytest.approx(4.5 * (few.ttft_s - service_s))  # (8 + 1) / (1 + 1): Kingman
    assert of(3, 3, asked(**FULL, burstiness=8.0)).harm > of(3, 3, asked(**FULL)).harm


def test_memory_and_seats_bound_what_decodes_at_once() -> None:
    views = [instance("p", Role.PREFILL, rates=rates(), total_blocks=20_000)]
    small = instance("d", Role.DECODE, rates=rates(), total_blocks=200)  # three contexts
    large = instance("d", Role.DECODE, rates=rates(), total_blocks=20_000)
    harms = []
    for one in (small, large):
        sorts, sort = sorted_out([*views, one])
        roles = roles_of({True: views, False: [one]}, sort, len(sorts))
        harms.append(outlook(asked(**FULL, rate=5.0), sorts, roles))
    assert harms[0].decode_use > 1.0 > harms[1].decode_use
    assert harms[0].harm > harms[1].harm


@given(
    st.floats(0.1, 500.0),
    st.floats(1.0, 20_000.0),
    st.floats(1.0, 5_000.0),
    st.floats(0.0, 50.0),
    st.sampled_from([(0.0, 1.0), (1.0, 1.0), (0.0, 0.0), (0.5, 0.5)]),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_it_always_answers_and_more_requests_are_never_easier(
    rate: float,
    prompt: float,
    output: float,
    burstiness: float,
    split: tuple[float, float],
    prefills: int,
    decodes: int,
) -> None:
    demand = asked(
        rate=rate,
        prompt_tokens=prompt,
        fresh_tokens=prompt,
        fresh_squares=2 * prompt**2,
        output_tokens=output,
        burstiness=burstiness,
        split_least=split[0],
        split_most=split[1],
    )
    seen = of(prefills, decodes, demand)
    assert all(value == value and 0.0 <= value < float("inf") for value in seen)
    more = of(prefills, decodes, msgspec.structs.replace(demand, rate=2.0 * rate))
    assert more.harm >= seen.harm - 0.02
