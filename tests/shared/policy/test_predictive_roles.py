"""What roles would make of a demand."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.demand import Demand, Shift
from shared.domain.instance import ClusterView, InstanceState, InstanceView, Role
from shared.domain.rates import LinkRate, Rates, StepForm, StepRates
from shared.errors import InvalidRequest
from shared.policy.predictive_roles import Outlook, PredictiveFlip, Roles, outlook, roles_of, sorted_out
from shared.policy.role_flip import FlipDecision, FlipState, Seen
from tests.shared.policy.views import instance, view


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


# Flips by what roles would make of a demand
PROMPTS = msgspec.structs.replace(  # long prompts, short answers: wants prefill
    DEMAND, prompt_tokens=3_000.0, fresh_tokens=3_000.0, fresh_squares=18e6, output_tokens=20.0, rate=10.0
)
ANSWERS = msgspec.structs.replace(  # the reverse
    DEMAND, prompt_tokens=200.0, fresh_tokens=200.0, fresh_squares=8e4, output_tokens=450.0, rate=22.0
)
DISAGGREGATED = {"split_least": 1.0, "split_most": 1.0}
TO_PROMPTS, TO_ANSWERS = (msgspec.structs.replace(one, **DISAGGREGATED) for one in (PROMPTS, ANSWERS))


def fleet(prefills: int, decodes: int, slow: int = 0, **load: Any) -> list[InstanceView]:
    def made(name: str, role: Role, slower: float = 1.0) -> InstanceView:
        return instance(name, role, rates=rates(slower), max_seqs=64, total_blocks=20_000, chunk_size=2048, **load)

    fast = [made(f"i{n}", Role.PREFILL if n < prefills else Role.DECODE) for n in range(prefills + decodes)]
    return fast + [made(f"s{n}", Role.DECODE, 4.0) for n in range(slow)]


def after(instances: list[InstanceView], decision: FlipDecision) -> list[InstanceView]:
    return [
        msgspec.structs.replace(one, role=decision.to) if one.instance_id == decision.instance_id else one
        for one in instances
    ]


def run(
    policy: PredictiveFlip,
    instances: list[InstanceView],
    demands: list[Demand | None],
    state: FlipState | None = None,
    start_s: float = 1_000.0,
    **seen: Any,
) -> tuple[list[tuple[float, FlipDecision]], list[InstanceView], FlipState]:
    """One step a second; what is decided is done at once."""
    state, made = state or policy.start(), []
    for second, demand in enumerate(demands):
        now = start_s + second
        state, decision = policy.step(state, view(*instances), now, Seen(demand, **seen))
        if decision is not None:
            made.append((now - start_s, decision))
            instances = after(instances, decision)
    return made, instances, state


def counts(instances: list[InstanceView]) -> tuple[int, int]:
    prefills = sum(one.role is Role.PREFILL for one in instances)
    return prefills, len(instances) - prefills


@pytest.mark.parametrize(("demand", "to"), [(TO_PROMPTS, Role.PREFILL), (TO_ANSWERS, Role.DECODE)])
def test_roles_follow_the_demand_and_stay(demand: Demand, to: Role) -> None:
    start = fleet(1, 5) if to is Role.PREFILL else fleet(5, 1)
    made, there, state = run(PredictiveFlip(), start, [demand] * 120)
    assert made
    assert all(decision.to is to for _, decision in made)
    assert made[0][0] == 2.0  # held for two seconds
    again, _, _ = run(PredictiveFlip(), there, [demand] * 600, state, 1_200.0)
    assert again == []


@pytest.mark.parametrize(("demand", "start"), [(TO_PROMPTS, (1, 5)), (TO_ANSWERS, (5, 1))])
def test_the_roles_that_are_wanted_are_those_that_it_comes_to(demand: Demand, start: tuple[int, int]) -> None:
    policy, instances = PredictiveFlip(), fleet(*start)
    wanted = policy.wanted(view(*instances), Seen(demand))
    assert wanted is not None
    assert (wanted.prefill > start[0]) is (demand is TO_PROMPTS)
    assert wanted.harm_then < wanted.harm - policy.gain
    _, there, _ = run(policy, instances, [demand] * 300)
    then = policy.wanted(view(*there), Seen(demand))
    assert then is not None
    assert (then.prefill, then.decode) == counts(there)  # it wants nothing more
    assert then.harm_then == then.harm


def test_nothing_is_wanted_while_nothing_is_known() -> None:
    assert PredictiveFlip().wanted(view(*fleet(1, 5)), Seen(None)) is None
    assert PredictiveFlip().wanted(view(*fleet(0, 5)), Seen(TO_PROMPTS)) is None


def test_the_best_instance_goes_and_the_reasons_say_what_was_considered() -> None:
    (_, first), *_ = run(PredictiveFlip(), fleet(1, 3, slow=3), [TO_PROMPTS] * 5)[0]
    assert first.instance_id.startswith("i")  # a fast one computes four times as many prompts
    predicted, asked, considered = first.reasons
    assert (predicted.what, asked.what, considered.what) == ("role_flip:predictive", "demand", "considered")
    assert predicted.figures["harm"] > predicted.figures["harm_then"]  # type: ignore[operator]
    assert asked.figures["prompt_tokens"] == 3_000.0
    assert set(considered.figures) == {first.instance_id, "s0"}


def test_the_least_loaded_of_its_sort_goes() -> None:
    instances = fleet(1, 4, free_blocks=5_000)
    load = msgspec.structs.replace(instances[3].load, free_blocks=18_000)
    instances[3] = msgspec.structs.replace(instances[3], load=load)
    assert run(PredictiveFlip(), instances, [TO_PROMPTS] * 5)[0][0][1].instance_id == "i3"


def test_the_shift_is_among_the_reasons() -> None:
    demand = msgspec.structs.replace(TO_PROMPTS, shift=Shift("prompts", 500.0, 2_400.0, 4.0, 8.0))
    reasons = run(PredictiveFlip(), fleet(1, 4), [demand] * 5)[0][0][1].reasons
    told = next(reason.figures for reason in reasons if reason.what == "shift")
    assert (told["what"], told["before"], told["after"], told["noticed_after_s"]) == ("prompts", 500.0, 2_400.0, 4.0)


UNDECIDED: list[tuple[str, list[InstanceView], Demand | None]] = [
    ("nothing is known", fleet(1, 5), None),
    ("all is well", fleet(3, 3), msgspec.structs.replace(TO_PROMPTS, rate=0.5)),
    ("the last of a role stays", fleet(3, 1), TO_PROMPTS),
    ("the last prefill instance stays", fleet(1, 3), TO_ANSWERS),
    ("another one drains", [*fleet(1, 5), instance("x", Role.DECODE, InstanceState.DRAINING)], TO_PROMPTS),
    ("a role has no instance", fleet(0, 5), TO_PROMPTS),
    ("the others are not ready", [*fleet(1, 1), instance("x", Role.DECODE, InstanceState.DEAD)], TO_PROMPTS),
]


@pytest.mark.parametrize(("what", "instances", "demand"), UNDECIDED, ids=[row[0] for row in UNDECIDED])
def test_no_flip(what: str, instances: list[InstanceView], demand: Demand | None) -> None:
    assert run(PredictiveFlip(), instances, [demand] * 60)[0] == []


def test_a_person_has_the_last_word() -> None:
    instances = fleet(1, 3)
    kept = frozenset({"i1", "i2"})
    made, _, _ = run(PredictiveFlip(), instances, [TO_PROMPTS] * 60, kept=kept)
    assert {decision.instance_id for _, decision in made} == {"i3"}
    assert run(PredictiveFlip(), instances, [TO_PROMPTS] * 60, kept=frozenset({"i1", "i2", "i3"}))[0] == []
    assert run(PredictiveFlip(), instances, [TO_PROMPTS] * 60, barred=frozenset({Role.PREFILL}))[0] == []


def test_a_gain_that_does_not_last_flips_nothing() -> None:
    calm = msgspec.structs.replace(TO_PROMPTS, rate=0.5)
    assert run(PredictiveFlip(), fleet(1, 5), [TO_PROMPTS, TO_PROMPTS, calm] * 30)[0] == []


def test_flips_keep_to_their_budget_and_cool_down() -> None:
    heavy = msgspec.structs.replace(TO_PROMPTS, rate=60.0)
    made, _, _ = run(PredictiveFlip(most=2, per_s=50.0, cooldown_s=7.0), fleet(1, 11), [heavy] * 60)
    assert [at for at, _ in made] == [2.0, 9.0 + 2.0, 52.0 + 2.0]


def test_no_turning_back_without_a_shift() -> None:
    policy = PredictiveFlip(turn_s=100.0)
    made, there, state = run(policy, fleet(1, 5), [TO_PROMPTS] * 20)
    assert made
    aged = msgspec.structs.replace(TO_ANSWERS, age_s=60.0)
    back, _, _ = run(policy, there, [aged] * 60, state, 1_020.0)
    assert back == []
    back, _, _ = run(policy, there, [aged] * 60, state, 1_120.0)
    assert back[0][1].to is Role.DECODE
    shifted = msgspec.structs.replace(TO_ANSWERS, age_s=5.0, shift=Shift("prompts", 2e3, 150.0, 4.0, 9.0))
    back, _, _ = run(policy, there, [shifted] * 5, state, 1_020.0)
    assert back[0][1].to is Role.DECODE


def test_a_drain_that_costs_more_than_it_wins_is_not_begun() -> None:
    slow = msgspec.structs.replace(TO_PROMPTS, rate=5.7)  # prefill is at its limit, and decode would miss one of two
    slow = msgspec.structs.replace(slow, output_tokens=1_500.0, tpot_s=0.03)
    patient = run(PredictiveFlip(horizon_s=1e6), fleet(1, 2), [slow] * 10)[0]
    hasty = run(PredictiveFlip(horizon_s=1.0), fleet(1, 2), [slow] * 10)[0]
    assert len(hasty) <= len(patient)


def test_a_large_fleet_moves_by_single_flips_in_one_direction() -> None:
    heavy = msgspec.structs.replace(TO_PROMPTS, rate=300.0)
    made, there, _ = run(PredictiveFlip(most=8, per_s=30.0, cooldown_s=0.0), fleet(20, 80), [heavy] * 200)
    assert {decision.to for _, decision in made} == {Role.PREFILL}
    assert len({decision.instance_id for _, decision in made}) == len(made) == counts(there)[0] - 20


@pytest.mark.parametrize("wrong", [{"gain": 0.0}, {"horizon_s": 0.0}, {"most": 0}, {"for_s": -1.0}, {"turn_s": -1.0}])
def test_parameters_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="predictive: "):
        PredictiveFlip(**wrong)


def test_the_same_is_decided_again() -> None:
    instances = fleet(1, 5)
    cluster = ClusterView(1, 0.0, tuple(instances))
    state = FlipState({"prefill": 0.0})
    first = PredictiveFlip().step(state, cluster, 5.0, Seen(TO_PROMPTS))
    assert PredictiveFlip().step(state, cluster, 5.0, Seen(TO_PROMPTS)) == first
