"""What a plan is, in tables that a person understands."""

from collections.abc import Sequence
from math import isfinite

from rich.console import Console
from rich.table import Table

from shared.domain.instance import Role
from shared.plan.answer import why
from shared.plan.plan import Plan
from shared.plan.problem import Problem
from shared.plan.search import Outcome


def show(console: Console, problem: Problem, outcomes: Sequence[Outcome]) -> None:
    """The first outcome's groups, routes and promise; all outcomes beside each other; why the first one won."""
    chosen = outcomes[0]
    inventory, slo = problem.inventory, problem.slo
    pools = ", ".join(map(str, inventory.pools))
    console.print(f"{problem.shop.geometry.name} on {pools}", markup=False)
    console.print(
        f"{problem.workload.name}: {problem.workload.prompt_tokens.mean():,.0f} + "
        f"{problem.workload.output_tokens.mean():,.0f} tokens on average; SLO: TTFT {slo.ttft_s:g} s, TPOT "
        f"{1000 * slo.tpot_s:g} ms, ITL {1000 * slo.itl_s:g} ms for {100 * problem.target:g} % of the requests",
        markup=False,
    )
    console.print(_groups(problem, chosen))
    console.print(_promise(problem, chosen))
    if chosen.plan.routes:
        console.print(_routes(problem, chosen.plan))
    if len(outcomes) > 1:
        console.print(_compared(problem, outcomes))
        console.print(why(outcomes), markup=False)
    if chosen.promise.rate > chosen.promise.goodput:
        told = (
            f"{chosen.promise.rate:.2f} requests/s are more than it serves within the SLO: {chosen.promise.goodput:.2f}"
        )
        console.print(told, style="yellow")
    if chosen.stopped:
        console.print("stopped: this is the best so far", style="yellow")


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, padding=(0, 1))


def _groups(problem: Problem, chosen: Outcome) -> Table:
    table = _table(f"Plan ({chosen.method}, policies {_short(chosen.plan.policies)})")
    for column in ("group", "role", "accelerators", "layout"):
        table.add_column(column, no_wrap=column == "group")
    for column in ("busy", "USD/h"):
        table.add_column(column, justify="right")
    figures = chosen.promise.figures
    for name, group in zip(chosen.plan.names(problem), chosen.plan.groups, strict=True):
        busy = figures.get(f"utilisation_{name}")
        role = group.role.value if not chosen.plan.coupled else "both"
        price = group.price_usd_hour(problem.inventory)
        words = group.words(problem.inventory)
        table.add_row(name, role, words, group.layout, "–" if busy is None else f"{100 * busy:.0f} %", f"{price:.2f}")
    return table


def _promise(problem: Problem, chosen: Outcome) -> Table:
    promise, told = chosen.promise, chosen.promise.figures
    price = sum(group.price_usd_hour(problem.inventory) for group in chosen.plan.groups)
    table = _table(f"Expected at {promise.rate:.2f} requests/s (simulated)")
    table.add_column("")
    table.add_column("", justify="right")
    rows = (
        ("goodput", f"{promise.goodput:.2f} requests/s"),
        ("SLO attainment", f"{100 * promise.attainment:.1f} %"),
        ("TTFT, mean and p90", f"{told['ttft_mean_s']:.3f} s, {told['ttft_p90_s']:.3f} s"),
        ("TPOT, mean and p90", f"{1000 * told['tpot_mean_s']:.1f} ms, {1000 * told['tpot_p90_s']:.1f} ms"),
        ("longest gap of a stream, p90", f"{1000 * told['longest_gap_p90_s']:.0f} ms"),
        ("mean utilisation", f"{100 * told['utilisation_mean']:.0f} %"),
        ("price", f"{price:.2f} USD/h, {promise.usd_per_million:.3f} USD for a million tokens at goodput"),
    )
    for title, value in rows:
        table.add_row(title, value)
    return table


def _routes(problem: Problem, plan: Plan) -> Table:
    followed = "plan:" in plan.policies
    title = "Routes" if followed else "Routes (what the plan expects; adaptive decides request by request)"
    table = _table(title)
    for column in ("prompts computed by", "decoded by"):
        table.add_column(column, no_wrap=True)
    table.add_column("share of requests", justify="right")
    names = plan.names(problem)
    for route in plan.routes:
        source = "the same" if route.prefill is None else names[route.prefill]
        table.add_row(source, names[route.decode], f"{100 * route.share:.1f} %")
    return table


def _compared(problem: Problem, outcomes: Sequence[Outcome]) -> Table:
    table = _table("Compared with")
    table.add_column("method")
    for column in ("prefill", "decode", "goodput", "TTFT s", "TPOT ms", "USD/h", "USD/M tokens", "found in s"):
        table.add_column(column, justify="right")
    for one in outcomes:
        told, roles = one.promise.figures, one.plan.roles
        price = sum(group.price_usd_hour(problem.inventory) for group in one.plan.groups)
        usd = one.promise.usd_per_million
        table.add_row(
            one.method,
            str(roles[Role.PREFILL]),
            str(roles[Role.DECODE]),
            f"{one.promise.goodput:.2f}",
            f"{told['ttft_mean_s']:.2f}" if told else "–",
            f"{1000 * told['tpot_mean_s']:.0f}" if told else "–",
            f"{price:.2f}",
            f"{usd:.3f}" if isfinite(usd) else "–",
            f"{one.found_s:.1f}",
        )
    return table


def _short(policies: str) -> str:
    return "along routes" if policies.startswith("plan:") else policies
