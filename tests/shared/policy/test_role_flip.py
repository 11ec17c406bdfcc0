"""Role flips: when an instance is idle, and by what roles would make of a demand."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.domain.demand import Demand, Shift
from shared.domain.instance import ClusterView, InstanceState, InstanceView, Role
from shared.domain.rates import LinkRate, Rates, StepForm, StepRates
from shared.errors import InvalidRequest
from shared.policy.papers.tetriinfer import IdleFlip
from shared.policy.role_flip import (
    FlipContext,
    FlipDecision,
    FlipHistory,
    Outlook,
    PredictiveFlip,
    RoleFlip,
    Roles,
    load_share,
    outlook,
    sorted_out,
)
from tests.shared.policy.views import decode, instance, prefill, view

BUSY = {"free_blocks": 100}  # of 1000
QUIET = {"free_blocks": 950}


def watch(
    policy: RoleFlip, views: list[ClusterView], context: FlipContext = FlipContext()
) -> list[tuple[float, FlipDecision]]:
    history, made = FlipHistory(), []
    for second, cluster in enumerate(views):
        if (decision := policy.propose(cluster, float(second), history, context)) is not None:
            made.append((float(second), decision))
    return made


@pytest.mark.parametrize(
    ("one", "share"),
    [
        (decode("d", free_blocks=1000), 0.0),
        (decode("d", free_blocks=250), 0.75),
        (decode("d", free_blocks=0, queued_prefill_tokens=9999), 1.0),
        (prefill("p", queued_prefill_tokens=128), 0.25),
        (prefill("p", queued_prefill_tokens=9999), 1.0),
        (prefill("p", free_blocks=500, queued_prefill_tokens=128), 0.5),
    ],
)
def test_load_share(one: InstanceView, share: float) -> None:
    assert load_share(one) == pytest.approx(share)


SILENT, DRAINS = InstanceState.UNRESPONSIVE, InstanceState.DRAINING
IDLE: list[tuple[str, list[InstanceView], tuple[str, Role] | None]] = [
    ("idle for a minute (TetriInfer 5.1)", [prefill("p"), prefill("q"), decode("d", **BUSY)], ("p", Role.DECODE)),
    (
        "under 10 % is idle (TetriInfer 3.5)",
        [prefill("p", **BUSY), decode("d", **BUSY), decode("e", **QUIET)],
        ("e", Role.PREFILL),
    ),
    ("10 % is not", [prefill("p", **BUSY), decode("d", **BUSY), decode("e", free_blocks=900)], None),
    ("the last of a role stays", [prefill("p"), decode("d", **BUSY), decode("e", **BUSY)], None),
    ("the last ready one stays", [prefill("p"), prefill("q", state=SILENT), decode("d", **BUSY)], None),
    ("all are idle", [prefill("p"), prefill("q"), decode("d"), decode("e")], None),
    ("another drains", [prefill("p"), prefill("q"), decode("d", **BUSY), decode("e", state=DRAINS)], None),
]


@pytest.mark.parametrize(("what", "instances", "expected"), IDLE, ids=[row[0] for row in IDLE])
def test_idle_by_example(what: str, instances: list[InstanceView], expected: tuple[str, Role] | None) -> None:
    made = watch(IdleFlip(), [view(*instances)] * 120)
    found = [(at, decision.instance_id, decision.to) for at, decision in made[:1]]
    assert found == ([(60.0, *expected)] if expected else [])


def test_work_or_a_flip_starts_the_minute_again() -> None:
    idle = view(prefill("p"), prefill("q", **BUSY), decode("d", **BUSY))
    busy = view(prefill("p", queued_prefill_tokens=400), prefill("q", **BUSY), decode("d", **BUSY))
    assert [at for at, _ in watch(IdleFlip(), [idle] * 50 + [busy] + [idle] * 70)] == [111.0]
    made = watch(IdleFlip(), [idle] * 180)  # the flip was decided, but not carried out
    assert [at for at, _ in made] == [60.0, 121.0]
    (reason,) = made[0][1].reasons
    assert (reason.what, reason.figures["highest_load_of_other_role"]) == ("role_flip:idle", 0.9)


loads = st.fixed_dictionaries(
    {"queued_prefill_tokens": st.sampled_from([0, 20, 50_000]), "free_blocks": st.sampled_from([0, 100, 950, 1000])}
)
states = st.sampled_from([InstanceState.READY] * 3 + list(InstanceState))
members = st.tuples(st.sampled_from(list(Role)), states, loads)


@settings(deadline=None)
@given(st.lists(st.lists(members, max_size=6), min_size=1, max_size=25), st.integers(0, 3))
def test_no_flip_takes_the_last_of_a_role_or_comes_while_one_drains(clusters: list[list[Any]], for_s: int) -> None:
    views = [view(*(instance(f"i{at}", *one[:2], **one[2]) for at, one in enumerate(c))) for c in clusters]
    for at, decision in watch(IdleFlip(for_s=for_s), views):
        cluster = views[round(at)]
        chosen = cluster.get(decision.instance_id)
        assert chosen is not None
        assert (chosen.state, chosen.role) == (InstanceState.READY, decision.to.other)
        assert len(cluster.ready(chosen.role)) >= 2
        assert all(v.state is not InstanceState.DRAINING for v in cluster.instances)


@pytest.mark.parametrize(
    ("context", "flips"),
    [
        (FlipContext(), "d"),
        (FlipContext(kept=frozenset({"d"})), "e"),
        (FlipContext(kept=frozenset({"d", "e", "f"})), ""),
        (FlipContext(barred=frozenset({Role.PREFILL})), ""),
        (FlipContext(barred=frozenset({Role.DECODE})), "d"),
    ],
)
def test_roles_that_an_operator_has_set_stay(context: FlipContext, flips: str) -> None:
    waits = prefill("p", queued_prefill_tokens=30_000, rate=1e-4)
    cluster = view(waits, decode("d", free_blocks=990), decode("e", free_blocks=980), decode("f", **BUSY))
    made = watch(IdleFlip(for_s=5.0), [cluster] * 10, context)
    assert [decision.instance_id for _, decision in made[:1]] == ([flips] if flips else [])


def test_an_operators_flip_binds_for_a_while_and_bars_its_opposite() -> None:
    ordered = [(100.0, "p", Role.DECODE), (40.0, "q", Role.PREFILL)]
    bound = FlipContext(None, frozenset({"p"}), frozenset({Role.PREFILL}))
    assert FlipContext.after_orders(None, ordered, 120.0, 60.0) == bound
    assert FlipContext.after_orders(None, ordered, 160.0, 60.0) == FlipContext()
    assert FlipContext.after_orders(None, ordered, 99.0, 60.0).barred == frozenset(Role)


# What roles would make of a demand


def rates(slower: float = 1.0) -> Rates:
    """Some accelerator: 10,000 prompt tokens a second, decode steps of 10 ms and more."""
    first = StepForm(0.01 * slower, 1e-4 * slower)
    step = StepForm(0.01 * slower, 0.0, 0.0, 1e-4 * slower, 1e-7 * slower)
    mixed = StepForm(0.012 * slower, 1.1e-4 * slower, 0.0, 1e-4 * slower, 1e-7 * slower)
    return Rates(step=StepRates(first, step, mixed), link=LinkRate(2e9, 1e-3))


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


def demand_of(**changes: float) -> Demand:
    return msgspec.structs.replace(DEMAND, **changes)


def outlook_of(demand: Demand, *views: InstanceView) -> Outlook:
    sorts, sort_of = sorted_out(views)
    return outlook(demand, sorts, Roles.from_views(views, sort_of, len(sorts)))


def of(prefills: int, decodes: int, demand: Demand, slow: int = 0) -> Outlook:
    shape = {"max_seqs": 64, "total_blocks": 20_000}
    views = [prefill(f"p{n}", rates=rates(), **shape) for n in range(prefills)]
    views += [prefill(f"s{n}", rates=rates(3.0), **shape) for n in range(slow)]
    return outlook_of(demand, *views, *(decode(f"d{n}", rates=rates(), **shape) for n in range(decodes)))


def test_instances_alike_are_one_sort() -> None:
    views = [prefill("a", rates=rates()), decode("b", rates=rates(1.01)), decode("c", rates=rates(3.0))]
    sorts, sort_of = sorted_out(views)
    assert (len(sorts), sort_of["a"]) == (2, sort_of["b"])
    assert Roles.from_views(views, sort_of, 2) == Roles((1, 0), (1, 1))


def test_use_is_work_over_capacity() -> None:
    alone_s = 0.01 * 1_000 / 512 + 0.1
    assert of(2, 4, demand_of(**FULL)).prefill_use == pytest.approx(20.0 * alone_s / 2.0)
    assert of(2, 4, demand_of(**FULL), slow=3).prefill_use == pytest.approx(20.0 * alone_s / 3.0)


def test_steps_are_as_long_as_littles_law_makes_them() -> None:
    seen = of(4, 2, demand_of(**FULL, burstiness=0.0))
    step_s = 0.01 / (1.0 - 10.0 * 100.0 * (1e-4 + 1e-7 * 1_050.0))  # b = rate · output · step; step = fixed + each · b
    moves_s = 1_000.0 * 2 * 2 * 2 * 64 * 2 / 2e9
    assert seen.tpot_s == pytest.approx(step_s + moves_s / 100.0, rel=2e-3)


@pytest.mark.parametrize(
    ("prompt", "output", "better", "worse"), [(3_000.0, 20.0, (5, 1), (1, 5)), (200.0, 450.0, (1, 5), (5, 1))]
)
def test_roles_follow_lengths(prompt: float, output: float, better: tuple[int, int], worse: tuple[int, int]) -> None:
    lengths = {"prompt_tokens": prompt, "fresh_tokens": prompt, "fresh_squares": prompt**2, "output_tokens": output}
    demand = demand_of(**FULL, **lengths, rate=12.0)
    assert of(*better, demand).slo_cost < 0.5 < of(*worse, demand).slo_cost


def test_what_makes_roles_better_or_worse() -> None:
    free, full = of(1, 5, DEMAND), of(1, 5, demand_of(**FULL))
    assert free.slo_cost < 0.3 < full.slo_cost, "decode instances may compute prompts"
    assert free.share < 1.0 == full.share
    held = demand_of(**FULL, fresh_tokens=200.0, fresh_squares=4e5)  # by prefix caches
    assert of(1, 5, held).prefill_use < 0.5 * full.prefill_use
    beside = of(3, 3, demand_of(rate=10.0, split_least=0.0, split_most=0.0))
    assert beside.tpot_s > 1.3 * of(3, 3, demand_of(**FULL, rate=10.0)).tpot_s, "prompts make steps longer"
    few, many = (of(3, 3, demand_of(**FULL, rate=24.0, burstiness=b)) for b in (1.0, 8.0))
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
    seen = of(prefills, decodes, demand)
    assert all(value == value and 0.0 <= value < float("inf") for value in seen)
    assert of(prefills, decodes, msgspec.structs.replace(demand, rate=2.0 * rate)).slo_cost >= seen.slo_cost - 0.02


# Flips by what roles would make of a demand
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
