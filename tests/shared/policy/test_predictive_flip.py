"""Flips towards the roles that would serve the demand best."""

from typing import Any

import msgspec
import pytest

from shared.domain.demand import Demand, Shift
from shared.domain.instance import InstanceState, InstanceView, Role
from shared.errors import InvalidRequest
from shared.policy.predictive_flip import PredictiveFlip
from shared.policy.role_flip import FlipContext, FlipDecision, FlipHistory
from tests.shared.policy.demands import FULL, demand_of, rates
from tests.shared.policy.views import instance, view

TO_PROMPTS = demand_of(
    **FULL, prompt_tokens=3_000.0, fresh_tokens=3_000.0, fresh_squares=18e6, output_tokens=20.0, rate=10.0
)
TO_ANSWERS = demand_of(
    **FULL, prompt_tokens=200.0, fresh_tokens=200.0, fresh_squares=8e4, output_tokens=450.0, rate=22.0
)


def fleet(prefills: int, decodes: int, slow: int = 0, **load: Any) -> list[InstanceView]:
    def made(name: str, role: Role, slower: float = 1.0) -> InstanceView:
        return instance(name, role, rates=rates(slower), max_seqs=64, total_blocks=20_000, chunk_size=2048, **load)

    fast = [made(f"i{n}", Role.PREFILL if n < prefills else Role.DECODE) for n in range(prefills + decodes)]
    return fast + [made(f"s{n}", Role.DECODE, 4.0) for n in range(slow)]


class Run:
    """A policy over a fleet, one proposal a second; a flip that is decided is done at once."""

    def __init__(self, policy: PredictiveFlip, instances: list[InstanceView]) -> None:
        self.policy, self.instances, self.history = policy, instances, FlipHistory()

    def __call__(
        self, demands: list[Demand | None], start_s: float = 1_000.0, **context: Any
    ) -> list[tuple[float, FlipDecision]]:
        made = []
        for second, demand in enumerate(demands):
            cluster, seen = view(*self.instances), FlipContext(demand, **context)
            decision = self.policy.propose(cluster, start_s + second, self.history, seen)
            if decision is not None:
                made.append((float(second), decision))
                self.instances = [
                    msgspec.structs.replace(one, role=decision.to) if one.instance_id == decision.instance_id else one
                    for one in self.instances
                ]
        return made

    @property
    def prefills(self) -> int:
        return sum(one.role is Role.PREFILL for one in self.instances)


@pytest.mark.parametrize(("demand", "start"), [(TO_PROMPTS, (1, 5)), (TO_ANSWERS, (5, 1))])
def test_roles_become_those_that_are_wanted_and_stay(demand: Demand, start: tuple[int, int]) -> None:
    run, to = Run(PredictiveFlip(), fleet(*start)), Role.PREFILL if demand is TO_PROMPTS else Role.DECODE
    wanted = run.policy.wanted(view(*run.instances), FlipContext(demand))
    assert wanted is not None
    assert wanted.harm_then < wanted.harm - run.policy.gain
    made = run([demand] * 120)
    assert {decision.to for _, decision in made} == {to}
    assert made[0][0] == 2.0  # held for two seconds
    assert run([demand] * 600, 1_200.0) == []
    then = run.policy.wanted(view(*run.instances), FlipContext(demand))
    assert then is not None
    assert (then.prefill, then.decode, then.harm_then) == (run.prefills, 6 - run.prefills, then.harm)


def test_the_best_instance_goes_and_the_reasons_name_what_was_considered() -> None:
    run = Run(PredictiveFlip(), fleet(1, 3, slow=2))
    shift = Shift("prompts", 500.0, 2_400.0, 4.0, 9.0)
    ((_, decision),) = run([msgspec.structs.replace(TO_PROMPTS, shift=shift, age_s=4.0)] * 3)
    assert decision.instance_id == "i1"
    by_name = {reason.what: reason.figures for reason in decision.reasons}
    assert by_name.keys() == {"role_flip:predictive", "demand", "considered", "shift"}
    assert set(by_name["considered"]) == {"i1", "s0"}  # the least loaded of each sort
    assert float(by_name["role_flip:predictive"]["harm_then"]) < float(by_name["role_flip:predictive"]["harm"]) - 0.1
    shifted = by_name["shift"]
    assert (shifted["what"], shifted["before"], shifted["after"]) == ("prompts", 500.0, 2_400.0)
    loaded = fleet(1, 5, free_blocks=9_000)
    loaded[3] = fleet(1, 5)[3]
    assert Run(PredictiveFlip(), loaded)([TO_PROMPTS] * 3)[0][1].instance_id == "i3"


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
    assert Run(PredictiveFlip(), instances)([demand] * 60) == []
    assert demand is None or not instances or PredictiveFlip().wanted(view(*fleet(0, 5)), FlipContext(demand)) is None


def test_predictive_keeps_what_an_operator_has_set() -> None:
    for context, flipped in (
        ({"kept": frozenset({"i1", "i2"})}, {"i3"}),
        ({"kept": frozenset({"i1", "i2", "i3"})}, set()),
        ({"barred": frozenset({Role.PREFILL})}, set()),
    ):
        made = Run(PredictiveFlip(), fleet(1, 3))([TO_PROMPTS] * 60, **context)
        assert {decision.instance_id for _, decision in made} == flipped


def test_flips_have_to_gain_for_a_while_and_keep_to_their_budget() -> None:
    calm, heavy = (msgspec.structs.replace(TO_PROMPTS, rate=rate) for rate in (0.5, 60.0))
    assert Run(PredictiveFlip(), fleet(1, 5))([TO_PROMPTS, TO_PROMPTS, calm] * 30) == []
    made = Run(PredictiveFlip(most=2, per_s=50.0, cooldown_s=7.0), fleet(1, 11))([heavy] * 60)
    assert [at for at, _ in made] == [2.0, 9.0 + 2.0, 52.0 + 2.0]


def test_no_turning_back_without_a_shift() -> None:
    aged = msgspec.structs.replace(TO_ANSWERS, age_s=60.0)
    shifted = msgspec.structs.replace(TO_ANSWERS, age_s=5.0, shift=Shift("prompts", 2e3, 150.0, 4.0, 9.0))
    for demand, start_s, turns in ((aged, 1_020.0, False), (aged, 1_120.0, True), (shifted, 1_020.0, True)):
        run = Run(PredictiveFlip(turn_s=100.0), fleet(1, 5))
        assert run([TO_PROMPTS] * 20)
        back = run([demand] * 60, start_s)
        assert [decision.to for _, decision in back[:1]] == ([Role.DECODE] if turns else [])


@pytest.mark.parametrize("wrong", [{"gain": 0.0}, {"horizon_s": 0.0}, {"most": 0}, {"for_s": -1.0}, {"turn_s": -1.0}])
def test_parameters_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="predictive: "):
        PredictiveFlip(**wrong)
