"""The cheapest accelerators out of what is on offer that serve a rate within the SLO."""

from collections.abc import Iterator

from shared.domain.instance import Role
from shared.errors import Incompatible
from shared.plan.compose import Composer
from shared.plan.group import Group
from shared.plan.methods.simple import smallest
from shared.plan.plan import Plan
from shared.plan.programme import MARGINS, Margin
from shared.plan.search import Found, Search, Stopped

# Spare capacity with which programmes are tried: the estimate knows no bursts, so the first may serve too little.
SPARES = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0)
_SIDES = MARGINS[1:]


def cheapest(search: Search) -> Plan:
    """The plan with the lowest price that serves the problem's rate in the simulator.

    Raises Incompatible that names the highest rate that all that is on offer serves, or says that the time was up;
    Stopped after Ctrl-C: an offer that serves the rate ends the search, so there is no best so far.
    """
    found = _first_that_serves(search)
    if found is not None:
        return found
    most = max((goodput for _, goodput in _all_of_it(search)), default=0.0)
    raise Incompatible(
        f"all that is on offer serves {most:.2f} requests/s of {search.problem.workload.name} within TTFT "
        f"{search.problem.slo.ttft_s:g} s and TPOT {search.problem.slo.tpot_s:g} s, not {search.problem.rate:g}"
    )


def _first_that_serves(search: Search) -> Plan | None:
    """Of the offers, the cheapest first; None where none of them does."""
    try:
        for price, plan in _offers(search):
            if search.judge.attained(plan, search.problem.rate) >= search.problem.target:
                search.tell(f"cheapest: {price:.2f} USD/h serves it", None)
                return plan
            if search.over():
                raise Incompatible("the time is up before an offer was found that serves the rate (seconds)")
    except KeyboardInterrupt as error:
        raise Stopped("stopped before an offer was found that serves the rate") from error
    return None


def _offers(search: Search) -> Iterator[tuple[float, Plan]]:
    """Deployments and their prices, the cheapest of each programme; the tightest first."""
    composer, inventory = Composer(search.estimator), search.problem.inventory
    offers: dict[tuple[Group, ...], float] = {}
    for spare in SPARES:
        for side in _SIDES:
            margin = Margin(side.prefill, side.decode, side.local, side.split, search.problem.rate * spare)
            groups = composer.best(margin)
            if groups:
                offers[groups] = sum(group.price_usd_hour(inventory) for group in groups)
    for groups in (*composer.candidates(), smallest(search, Role.DECODE)):
        if groups:
            offers.setdefault(groups, sum(group.price_usd_hour(inventory) for group in groups))
    for groups, price in sorted(offers.items(), key=lambda one: one[1]):
        yield price, Plan(groups)


def _all_of_it(search: Search) -> Iterator[Found]:
    for groups in (*Composer(search.estimator).candidates(), smallest(search, Role.DECODE)):
        yield search.judged(Plan(groups), local=True)
