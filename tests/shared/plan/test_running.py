"""Other roles and routes for a running plan, and for a running cluster."""

from dataclasses import replace

import msgspec
import pytest

from shared.cost.kinds import EngineKind, EngineModels, Stage
from shared.cost.library import Library
from shared.domain.demand import Demand
from shared.domain.instance import InstanceView, Role
from shared.domain.rates import LinkRate, Rates
from shared.errors import InvalidRequest
from shared.plan.group import Group, Part
from shared.plan.plan import Plan
from shared.plan.routes import Route
from shared.plan.running import Finding, Fleet, after_loss, reschedule, review, scaled, workload_of
from shared.policy.papers.thunderserve import PlanRoute
from shared.sim.workload import synthetic
from tests.shared.plan.problems import inventory, problem, search
from tests.shared.policy.views import instance

P, D = Role.PREFILL, Role.DECODE
STOCK = inventory(("a", "A10", 4), ("b", "A10", 4), gbps=100.0)


def one(role: Role, pool: int) -> Group:
    return Group(role, 1, (Part(pool, 32),))


def prefills(groups: tuple[Group, ...]) -> int:
    return sum(group.role is P for group in groups)


def test_roles_follow_what_clients_ask_for() -> None:
    """Long prompts and short answers want more prefill, and the other way round."""
    groups = (*[one(P, 0)] * 4, *[one(D, 1)] * 4)
    asked = problem(STOCK)
    prompts = search(replace(asked, workload=synthetic(400, 3000, 15, seed=1)))
    answers = search(replace(asked, workload=synthetic(400, 200, 600, seed=1)))
    more, less = (reschedule(found.estimator, Plan(groups, policies="plan:routes=[]")) for found in (prompts, answers))
    assert prefills(more.plan.groups) > 4 > prefills(less.plan.groups) >= 1
    for proposal in (more, less):
        assert proposal.after.goodput > 1.1 * proposal.before.goodput
        assert {at for at in range(8) if proposal.plan.groups[at] != groups[at]} == set(proposal.flips)
        assert proposal.plan.policies.startswith("plan:")


def test_after_a_loss_routes_are_those_that_are_left() -> None:
    groups = (one(P, 0), one(P, 0), one(D, 1), one(D, 1))
    plan = Plan(groups, (Route(0, 2, 0.4), Route(1, 3, 0.4), Route(None, 3, 0.2)))
    left, routes = after_loss(plan, [2])
    assert left == (groups[0], groups[1], groups[3])
    assert routes == (Route(1, 2, pytest.approx(2 / 3)), Route(None, 2, pytest.approx(1 / 3)))


LIBRARY = Library.built_in()
MODELS = EngineModels(LIBRARY, LIBRARY.geometry("Llama-3-8B"))
CHAT = Demand(
    rate=10.0,
    burstiness=1.0,
    prompt_tokens=500.0,
    fresh_tokens=500.0,
    fresh_squares=500.0**2 * 1.5,
    output_tokens=300.0,
    ttft_s=1.0,
    tpot_s=0.05,
    split_least=0.0,
    split_most=1.0,
    prompt_spread=0.6,
    output_spread=0.6,
)
CODE = Demand(
    rate=10.0,
    burstiness=1.0,
    prompt_tokens=4000.0,
    fresh_tokens=4000.0,
    fresh_squares=4000.0**2 * 1.5,
    output_tokens=20.0,
    ttft_s=2.0,
    tpot_s=0.05,
    split_least=0.0,
    split_most=1.0,
    prompt_spread=0.6,
    output_spread=0.6,
)


def rates_of(accelerator: str) -> Rates:
    kind = EngineKind((Stage(accelerator, MODELS.geometry.layers),))
    return Rates(MODELS.step_rates(kind, 2048), LinkRate(5e9, 1e-3))


def views(roles: str, accelerator: str = "A100-SXM-80", link_bytes_s: float = 5e9) -> tuple[InstanceView, ...]:
    """One instance a letter: p or d."""
    shape = {"total_blocks": 20_000, "chunk_size": 2048, "max_seqs": 256, "max_model_len": 16_384}
    rates = msgspec.structs.replace(rates_of(accelerator), link=LinkRate(link_bytes_s, 1e-3))
    named = {"p": Role.PREFILL, "d": Role.DECODE}
    return tuple(instance(f"i{at}", named[letter], rates=rates, **shape) for at, letter in enumerate(roles))


def roles_after(fleet: Fleet, finding: Finding) -> str:
    turned = {flip.instance_id: flip.to_role for flip in finding.flips}
    return "".join(turned.get(view.instance_id, view.role).value[0] for view in fleet.views)


def demand_of(demand: Demand, share: float, roles: str) -> Demand:
    """The demand at that share of what these roles serve."""
    goodput = Fleet(views(roles), demand, LIBRARY, local=False).expected().goodput
    return scaled(demand, rate=share * goodput / demand.rate)


def test_roles_that_serve_the_demand_stay() -> None:
    finding = review(Fleet(views("ppdd"), demand_of(CHAT, 0.5, "ppdd"), LIBRARY, local=False))
    assert not finding.changes
    assert "the roles serve this" in finding.why
    assert finding.now.attainment > 0.9
    assert sum(route.share for route in finding.routes) == pytest.approx(1.0)


def test_a_shift_to_long_prompts_flips_decode_instances() -> None:
    demand = demand_of(CODE, 0.8, "pppd")
    fleet = Fleet(views("pddd"), demand, LIBRARY, local=False)
    finding = review(fleet)
    assert roles_after(fleet, finding).count("p") >= 2
    assert finding.then.goodput > 1.5 * finding.now.goodput
    assert finding.then.attainment > finding.now.attainment
    assert not finding.changes_routes


def test_a_lost_role_is_replaced() -> None:
    demand = demand_of(CHAT, 0.4, "pddd")
    fleet = Fleet(views("ddd"), demand, LIBRARY, local=False)
    finding = review(fleet)
    assert finding.now.goodput == 0.0
    assert roles_after(fleet, finding) == "pdd"
    assert finding.then.goodput > demand.rate


def test_fixed_instances_keep_their_roles() -> None:
    demand = demand_of(CODE, 0.8, "pppd")
    fleet = Fleet(views("pddd"), demand, LIBRARY, local=False)
    finding = review(fleet, fixed=["i1", "i2", "i3"])
    assert not finding.changes
    assert "3 are kept as they are" in finding.why


def test_routes_in_force_that_lost_an_end_are_replaced() -> None:
    one_way = [PlanRoute("i0", "i2", 0.9), PlanRoute("i1", "i3", 0.1)]
    demand = demand_of(CHAT, 0.9, "ppdd")
    fleet = Fleet(views("ppdd"), demand, LIBRARY, local=False)
    finding = review(fleet, one_way)
    assert finding.changes_routes
    assert not finding.flips
    assert finding.then.goodput > 1.1 * finding.now.goodput
    into = {at: sum(r.share for r in finding.routes if r.decode == at) for at in ("i2", "i3")}
    assert into["i2"] == pytest.approx(0.5, abs=0.1)


def test_slow_links_count() -> None:
    demand = demand_of(CHAT, 0.5, "pd")
    fast = Fleet(views("pd"), demand, LIBRARY, local=False).expected()
    slow = views("pd", link_bytes_s=2e6)
    assert Fleet(slow, demand, LIBRARY, local=False).expected().goodput < 0.8 * fast.goodput


def test_the_demand_as_requests_has_its_means_and_spreads() -> None:
    made = workload_of(CHAT, 16_384)
    assert made.prompt_tokens.mean() == pytest.approx(500.0, rel=0.02)
    assert made.output_tokens.mean() == pytest.approx(300.0, rel=0.02)
    assert (made.prompt_tokens + made.output_tokens).max() <= 16_384
    short = workload_of(CODE, 2048)
    assert (short.prompt_tokens + short.output_tokens).max() <= 2048


def test_a_fleet_needs_an_instance_and_factors_are_positive() -> None:
    with pytest.raises(InvalidRequest, match="no instance is ready"):
        Fleet((), CHAT, LIBRARY)
    with pytest.raises(InvalidRequest, match="positive"):
        scaled(CHAT, rate=0.0)


def test_many_instances_of_several_kinds_flip_in_strides() -> None:
    mixed = [view for kind in ("A100-SXM-80", "A40", "A10", "H100-SXM") for view in views("ppdddddd", kind)]
    several = tuple(
        msgspec.structs.replace(v, info=msgspec.structs.replace(v.info, instance_id=f"n{at}"))
        for at, v in enumerate(mixed)
    )
    finding = review(Fleet(several, scaled(CODE, rate=6.0), LIBRARY, local=False))
    assert len(finding.flips) > 8
    assert finding.then.goodput > 2.0 * finding.now.goodput
