"""Whether a running cluster should have other roles or routes: what would change, what is expected, and why."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shared.domain.instance import InstanceView, Role
from shared.plan.plan import Plan, routes_of
from shared.plan.reschedule import WORTH_IT, rescheduled
from shared.plan.routes import Route
from shared.plan.running import Expected, Fleet
from shared.policy.plan_routes import PlanRoute

ENOUGH = 1.1  # times the rate asked for: goodput that needs nothing more


@dataclass(frozen=True, slots=True)
class Flip:
    """An instance is to change its role."""

    instance_id: str
    from_role: Role
    to_role: Role


@dataclass(frozen=True, slots=True)
class Finding:
    """Roles and routes beside those that are.

    now, then: what is expected of both. routes: along which requests would be sent then. changes_routes: whether they
    take the place of those in force. why: in a sentence, also where nothing is to change.
    """

    flips: tuple[Flip, ...]
    routes: tuple[PlanRoute, ...]
    changes_routes: bool
    now: Expected
    then: Expected
    why: str

    @property
    def changes(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.flips) or self.changes_routes


def reviewed(fleet: Fleet, in_force: Sequence[PlanRoute] = (), fixed: Collection[str] = ()) -> Finding:
    """What would be best for the fleet's demand.

    in_force: the routes of placement `plan`; none under another. fixed: instances whose roles are not to change.
    Nothing is to change where the demand is served with something to spare, or nothing else is clearly better.
    """
    routes = surviving(fleet.views, in_force)
    now = fleet.expected(routes=routes)
    if now.goodput >= ENOUGH * now.rate and now.attainment >= fleet.target:
        return _as_it_is(fleet, in_force, now, f"the roles serve this: {_served(now)}")
    positions = {at for at, view in enumerate(fleet.views) if view.instance_id in set(fixed)}
    plan = Plan(fleet.groups, routes, "adaptive" if fleet.local else "plan:")
    groups = rescheduled(fleet.estimator, plan, positions).plan.groups
    then = fleet.expected(groups)
    if then.goodput <= WORTH_IT * now.goodput:
        kept = f"; {len(positions)} are kept as they are" if positions else ""
        return _as_it_is(fleet, in_force, now, f"no other roles serve clearly more: {_served(now)}{kept}")
    flips = tuple(
        Flip(view.instance_id, view.role, group.role)
        for view, group in zip(fleet.views, groups, strict=True)
        if view.role is not group.role
    )
    best = named(fleet.views, routes_of(fleet.estimate(groups)))
    why = f"{_served(now)}; with {_said(flips, bool(in_force))} {then.goodput:.3g}"
    return Finding(flips, best, bool(in_force), now, then, why)


def _as_it_is(fleet: Fleet, in_force: Sequence[PlanRoute], now: Expected, why: str) -> Finding:
    """No other roles; and other routes only where nobody is left whom those in force join."""
    routes = surviving(fleet.views, in_force)
    dead = bool(in_force) and not routes
    here = named(fleet.views, routes or routes_of(fleet.estimate()))
    return Finding((), here, dead, now, now, f"no route in force has its instances any more; {why}" if dead else why)


def surviving(views: Sequence[InstanceView], in_force: Sequence[PlanRoute]) -> tuple[Route, ...]:
    """Of the routes in force those whose instances are there in their roles, in proportion, by position."""
    at = {(view.instance_id, view.role): position for position, view in enumerate(views)}
    found = []
    for route in in_force:
        decode = at.get((route.decode, Role.DECODE))
        prefill = at.get((route.prefill, Role.PREFILL)) if route.prefill else None
        if decode is not None and (prefill is not None or not route.prefill):
            found.append(Route(prefill, decode, route.share))
    whole = sum(route.share for route in found)
    return tuple(Route(route.prefill, route.decode, route.share / whole) for route in found)


def named(views: Sequence[InstanceView], routes: Sequence[Route]) -> tuple[PlanRoute, ...]:
    """Routes by instance id."""
    return tuple(
        PlanRoute(
            "" if route.prefill is None else views[route.prefill].instance_id,
            views[route.decode].instance_id,
            route.share,
        )
        for route in routes
    )


def _served(now: Expected) -> str:
    return f"{now.goodput:.3g} requests/s within the SLO, {now.rate:.3g} asked for"


def _said(flips: Sequence[Flip], routed: bool) -> str:
    words = [f"{flip.instance_id} for {flip.to_role.value}" for flip in flips]
    if routed:
        words.append("other routes")
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1]
