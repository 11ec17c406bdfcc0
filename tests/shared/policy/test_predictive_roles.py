"""Flips by what roles would make of a demand."""

from typing import Any

import msgspec
import pytest

from shared.domain.demand import Demand, Shift
from shared.domain.instance import ClusterView, InstanceState, InstanceView, Role
from shared.errors import InvalidRequest
from shared.policy.predictive_roles import PredictiveFlip
from shared.policy.role_flip import FlipDecision, FlipState, Seen
from tests.shared.policy.test_role_harm import DEMAND, rates
from tests.shared.policy.views import instance, view

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
