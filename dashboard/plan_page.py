"""The Plan page: the plan in force with expected and measured figures, proposals, what-if questions, and searches for
plans. It reads the planner's API only.
"""

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import pandas as pd
import streamlit as st

from dashboard import layout, markup, units
from dashboard.actions import Action, Call, confirm_pending, is_busy, request_action, show_results
from dashboard.answers import FLEET, PLAN_SEARCH, PLAN_SEARCHES, PROPOSALS
from dashboard.api import Read
from dashboard.charts import natural_order
from dashboard.console import Console, Pool
from dashboard.plan_diagram import GROUPED_ABOVE, LEGEND, diagram, graph
from shared.domain.instance import Role
from shared.domain.job import tight_gaps
from shared.errors import PolyphaseError
from shared.wire.api.planner import (
    Figures,
    Fleet,
    Measured,
    PlanSearch,
    Promise,
    Proposal,
    ProposalStep,
    RoleChange,
    RouteShare,
    SearchResult,
    WhatIf,
)

NO_PLANNER = "No data: the planner does not answer."
NOT_CONFIGURED = (
    "No planner is configured: POLYPHASE_DASHBOARD_PLANNER_URL is empty. With a planner, this page shows the plan in "
    "force, its expected and measured figures, and proposals for a better one."
)
# As in shared/plan/methods/registry.py, which would load the planner's code into the dashboard's process.
METHODS = ("best", "tabu", "joint", "exhaustive", "coupled", "thirds", "single_type", "bruteforce")
CLOSE, FAR = 0.1, 0.2  # relative deviations: below is "as expected", a worse figure beyond is a problem
CLOSE_POINTS, FAR_POINTS = 0.02, 0.05  # the same for attainment, whose ratio near zero means nothing
FEW_REQUESTS = 30  # measured figures of fewer requests are marked
CAUSES = {
    "loss": "an instance was lost",
    "return": "an instance returned",
    "shift": "the demand shifted",
    "review": "regular review",
    "asked": "requested",
}
FACTORS = {"rate_factor": "Request rate ×", "prompt_factor": "Prompt length ×", "output_factor": "Output length ×"}
NEWEST_RESULT = "newest result"
EXAMPLE = """nodes:
  - {name: a40, accelerator: A40, count: 4}
  - {name: ti, accelerator: RTX-3090Ti, count: 4}
network:
  between: {gbps: 40}
"""
_PROPOSAL_COLOUR = {"open": markup.PREFILL, "applying": markup.CAUTION, "applied": markup.GOOD, "failed": markup.BAD}
_SEARCH_COLOUR = {"waiting": markup.IDLE, "running": markup.CAUTION, "done": markup.GOOD, "failed": markup.BAD}
_SHARES = {"share": st.column_config.ProgressColumn(format="percent", min_value=0.0, max_value=1.0)}
_WHAT_IF, _RESULT, _TRIED = "plan_what_if", "plan_search", "search_tried"  # in Streamlit's session state


def plan(console: Console) -> None:
    if not console.settings.planner_url:
        layout.unavailable(console, "Plan", NOT_CONFIGURED)
        return
    confirm_pending(console)
    st.fragment(_live, run_every=console.settings.refresh_s)(console)


def _live(console: Console) -> None:
    api, now_s = console.api, time.time()
    fleet_read = api.read(FLEET)
    proposals_read = api.read(PROPOSALS, limit=api.settings.proposals_shown)
    searches = api.read(PLAN_SEARCHES, limit=api.settings.searches_shown).result()
    fleet, proposals = fleet_read.result(), proposals_read.result()
    layout.header(console, "Plan", [fleet, proposals, searches])
    _auto(fleet, console)
    show_results(console, now_s)
    _in_force(fleet)
    _proposals(proposals, console, now_s)
    _what_if(fleet, console, now_s)
    _searches(searches, console, now_s)


def _auto(read: Read[Fleet], console: Console) -> None:
    """Whether proposals are applied automatically, and why there may be none."""
    fleet = read.value
    if fleet is None:
        return
    label = "Automatic mode is on: proposals are applied without confirmation."
    if not fleet.auto:
        label = "Automatic mode is off: proposals wait for your decision."
    with st.container(horizontal=True, vertical_alignment="center", key="plan-auto"):
        dot = markup.dot(label, markup.GOOD if fleet.auto else markup.IDLE)
        st.html(markup.page(dot, stale=read.stale), width="content")
        _action_button(f"Turn {'off' if fleet.auto else 'on'}", "auto", auto_action(not fleet.auto), console, read)
    if fleet.trouble and not read.stale:
        st.warning(f"The planner cannot make proposals: {fleet.trouble}", icon=":material/warning:")


def _action_button(
    label: str, key: str, action: Action, console: Console, read: Read[Any], kind: Any = "secondary"
) -> None:
    """A button for an action on the planner; disabled for read-only accounts, stale data, and while one is running."""
    disabled = read.stale or not console.account.may_operate or is_busy(action.target)
    st.button(label, key=key, type=kind, disabled=disabled, on_click=request_action, args=(action,))


def _planner_action(
    name: str,
    question: str,
    consequences: str,
    success: str,
    call: Callable[[Call], Coroutine[Any, Any, Any]],
    target: str = "",
) -> Action:
    return Action(
        name=name, question=question, consequences=consequences, call=call, success=lambda _: success, target=target
    )


def accept_action(proposal: Proposal) -> Action:
    return _planner_action(
        "Acceptance of the proposal",
        "Accept this proposal?",
        f"**{proposal_changes(proposal)}**\n\nInstances that change their role are drained first. Serving continues.",
        "The proposal is accepted. Its steps are listed under Proposals.",
        lambda call: call.api.planner.accept(proposal.proposal_id, who=call.who),
        proposal.proposal_id,
    )


def refuse_action(proposal: Proposal) -> Action:
    return _planner_action(
        "Refusal of the proposal",
        "Refuse this proposal?",
        f"**{proposal_changes(proposal)}**\n\nNothing changes. The planner does not repeat the proposal for a while.",
        "The proposal is refused.",
        lambda call: call.api.planner.refuse(proposal.proposal_id, who=call.who),
        proposal.proposal_id,
    )


def auto_action(on: bool) -> Action:
    consequences = "Running changes continue. New proposals wait for a decision."
    if on:
        consequences = "From now on the planner flips instances and changes routes when it expects a clear gain."
    return _planner_action(
        f"Turning automatic mode {'on' if on else 'off'}",
        f"Turn automatic mode {'on' if on else 'off'}?",
        consequences,
        f"Automatic mode is {'on' if on else 'off'}.",
        lambda call: call.api.planner.set_auto(on, who=call.who),
        "auto",
    )


def cancel_action(search: PlanSearch) -> Action:
    return _planner_action(
        "Cancellation of the search",
        "Cancel this search?",
        "The search ends. Its result is the best plan found so far.",
        "The search is being cancelled.",
        lambda call: call.api.planner.cancel(search.plan_id, who=call.who),
        search.plan_id,
    )


def submit_action(body: Mapping[str, Any]) -> Action:
    return _planner_action(
        "Submission of the search",
        "Search for a plan?",
        f"**{body['model']} for {body['workload']}, {body['method']}**\n\n"
        "The search uses a processor of the planner for up to some minutes. The running cluster does not change.",
        "The search is submitted. It is listed under Searches.",
        lambda call: call.api.planner.submit(body, who=call.who),
    )


def proposal_changes(proposal: Proposal) -> str:
    flips = ", ".join(f"{flip.instance_id} from {flip.from_role} to {flip.to_role}" for flip in proposal.flips)
    return "; ".join(filter(None, (flips, "new routes" if proposal.changes_routes else ""))) or "no changes"


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a plan. better: 1 where more is better, -1 where less is better, 0 where neither is."""

    name: str
    better: int
    as_text: Callable[[float | None], str]
    value: Callable[[Figures | Measured], float | None]
    more: str = "more"
    less: str = "less"

    def of(self, figures: Figures | Measured | None) -> float | None:
        return self.value(figures) if figures is not None else None


RATE = Metric("Rate", 0, units.rate, lambda figures: figures.rate)
ATTAINMENT = Metric("SLO attainment", 1, units.share, lambda figures: figures.attainment)
TTFT = Metric("TTFT", -1, units.duration, lambda figures: figures.ttft_s, "longer", "shorter")
TPOT = Metric("TPOT", -1, units.duration, lambda figures: figures.tpot_s, "longer", "shorter")
GOODPUT = Metric("Goodput", 1, units.rate, lambda figures: figures.goodput)
METRICS = (RATE, ATTAINMENT, TTFT, TPOT, GOODPUT)


@dataclass(frozen=True, slots=True)
class Deviation:
    """The difference of two values in words. problem: much worse. gain: better."""

    text: str
    problem: bool = False
    gain: bool = False

    @property
    def relative(self) -> bool:
        """Whether the words need a "than …" after them."""
        return self.text[:1].isdigit() and " times " not in self.text


def deviation(metric: Metric, before: float | None, after: float | None, same: str) -> Deviation:
    """`after` compared with `before`; `same` if they are close, empty if one is not known."""
    if before is None or after is None:
        return Deviation("")
    if metric is ATTAINMENT:
        gap = after - before
        if abs(gap) < CLOSE_POINTS:
            return Deviation(same)
        text = f"{abs(gap) * 100:.0f} points {'higher' if gap > 0 else 'lower'}"
        return Deviation(text, problem=gap < -FAR_POINTS, gain=gap > 0)
    if before <= 0.0:
        return Deviation(metric.more, gain=metric.better > 0) if after > 0.0 else Deviation(same)
    change = after / before - 1.0
    if abs(change) < CLOSE:
        return Deviation(same)
    text = f"{abs(change) * 100:.0f} % {metric.more if change > 0 else metric.less}"
    if change >= 1.0:
        text = f"{after / before:.2g} times as {'long' if metric.better < 0 else 'much'}"
    gain = change * metric.better
    return Deviation(text, problem=gain < -FAR, gain=gain > 0)


def change_table(titles: Sequence[str], columns: Sequence[Figures | None]) -> str:
    """Expected figures side by side, the later columns compared with the first."""
    rows = []
    for metric in METRICS:
        values = [metric.of(each) for each in columns]
        later = (_changed(metric, values[0], value) for value in values[1:])
        rows.append([markup.soft(metric.name), markup.text(metric.as_text(values[0])), *later])
    return markup.table(["", *titles], rows, narrow=True)


def _changed(metric: Metric, before: float | None, after: float | None) -> str:
    found = deviation(metric, before, after, "about the same")
    if not found.text:
        return markup.text(metric.as_text(after))
    note = markup.soft(found.text)
    if found.problem or found.gain:
        note = markup.badge(found.text, markup.BAD if found.problem else markup.GOOD)
    return f"{markup.strong(metric.as_text(after))} {note}"


def comparison_table(expected: Figures | None, measured: Measured | None, promise: Promise | None) -> str:
    """Expected, measured and promised figures with the deviation of measured from expected."""
    rows = []
    for metric in METRICS:
        hoped, seen = metric.of(expected), metric.of(measured)
        value = markup.strong(metric.as_text(seen))
        if metric in (TTFT, TPOT) and seen is not None:
            value += f" {markup.soft('p50')}"
        apart = markup.soft(_headroom(expected, measured)) if metric is GOODPUT else _apart(metric, hoped, seen)
        promised = [markup.text(metric.as_text(metric.of(promise)))] if promise else []
        rows.append([markup.soft(metric.name), markup.text(metric.as_text(hoped)), value, apart, *promised])
    heads = ["", "Expected", "Measured", "Deviation", *(["Promised by the plan file"] if promise else [])]
    return markup.table(heads, rows, narrow=True)


def _apart(metric: Metric, expected: float | None, measured: float | None) -> str:
    found = deviation(metric, expected, measured, "as expected")
    words = f"{found.text} than expected" if found.relative else found.text
    return markup.badge(words, markup.BAD) if found.problem else markup.text(words or units.NONE)


def _headroom(expected: Figures | None, measured: Measured | None) -> str:
    """Expected goodput compared with the measured rate."""
    goodput, rate = GOODPUT.of(expected), RATE.of(measured)
    if goodput is None or not rate:
        return units.NONE
    if goodput >= rate:
        return f"room for {100 * (goodput / rate - 1.0):.0f} % more requests"
    return f"{100 * (1.0 - goodput / rate):.0f} % below the rate"


def _in_force(read: Read[Fleet]) -> None:
    """The diagram, the routes, and expected beside measured figures."""
    st.subheader("Plan in force", anchor=False)
    fleet = read.value
    if fleet is None:
        st.html(markup.empty(NO_PLANNER))
        return
    if not fleet.instances:
        st.html(markup.empty("The planner knows no instance yet."))
        return
    with layout.stale_container("plan-picture", read):
        st.html(plan_picture(fleet))
    if fleet.routes:
        _route_expander("Routes as a table", fleet.routes, "plan-routes")
    st.subheader("Expected and measured figures", anchor=False)
    if fleet.expected is None and fleet.measured is None and fleet.promise is None:
        st.html(markup.empty("No expectation yet: the planner has seen too few requests."))
        return
    table = comparison_table(fleet.expected, fleet.measured, fleet.promise)
    note = markup.below(markup.soft(_measured_note(fleet.measured)))
    st.html(markup.page(table, note, stale=read.stale))


def plan_picture(fleet: Fleet) -> str:
    """What the plan is for, the diagram, and its legend."""
    picture = diagram(graph(fleet.instances, fleet.routes))
    grouped = " Equal instances are drawn as one group." if len(fleet.instances) > GROUPED_ABOVE else ""
    return markup.page(_fleet_facts(fleet), picture, markup.soft(LEGEND + grouped))


def _route_expander(title: str, routes: Sequence[RouteShare], key: str) -> None:
    rows = [
        {"prefill": route.prefill or "the decode instance", "decode": route.decode, "share": route.share}
        for route in routes
    ]
    with st.expander(title):
        st.dataframe(pd.DataFrame(rows), hide_index=True, key=key, column_config=_SHARES)


def _fleet_facts(fleet: Fleet) -> str:
    pairs = [("Placement", fleet.placement or units.NONE)]
    if fleet.routes:
        pairs.append(("Routes", "in force" if fleet.routes_in_force else "expected by the planner, not enforced"))
    demand = fleet.demand
    if demand is not None:
        prompt, output = units.count(demand.prompt_tokens), units.count(demand.output_tokens)
        pairs.append(("Planned for", f"{units.rate(demand.rate)}, {prompt} prompt + {output} output tokens"))
        pairs.append(("SLO", f"TTFT {units.duration(demand.ttft_s)}, TPOT {units.duration(demand.tpot_s)}"))
    return markup.facts(pairs)


def _measured_note(measured: Measured | None) -> str:
    if measured is None:
        return "No measurements yet. Expected latencies are means."
    few = ", too few for reliable figures" if measured.requests < FEW_REQUESTS else ""
    source = f"{units.count(measured.requests)} requests of the last {units.duration(measured.window_s)}{few}"
    return f"Measured: {source}. Expected and promised latencies are means, measured latencies are medians."


def _proposals(read: Read[list[Proposal]], console: Console, now_s: float) -> None:
    """Open proposals in full, earlier ones as a table."""
    st.subheader("Proposals", anchor=False)
    if read.value is None:
        st.html(markup.empty(NO_PLANNER))
        return
    current = [each for each in read.value if each.state in ("open", "applying")]
    earlier = [each for each in read.value if each not in current]
    if not current:
        st.html(markup.empty("No open proposal: the planner expects no clear gain from a change."))
    for proposal in current:
        with st.container(border=True, key=f"proposal-{proposal.proposal_id}"):
            _current_proposal(proposal, console, read, now_s)
    if earlier:
        heads = ["Time", "Cause", "Changes", "Expected goodput", "State", "By", "Steps"]
        table = markup.table(heads, [_proposal_row(each, now_s) for each in earlier])
        st.html(markup.page(markup.soft("Earlier proposals"), table, stale=read.stale))


def _current_proposal(proposal: Proposal, console: Console, read: Read[Any], now_s: float) -> None:
    took = f", computed in {units.duration(proposal.took_s)}" if proposal.took_s is not None else ""
    made = markup.soft(units.ago(proposal.made_s, now_s) + took)
    head = f"{_proposal_state(proposal)} {markup.strong(_cause(proposal))} {made}"
    parts = [f'<div class="pp-facts">{head}</div>', markup.below(markup.text(proposal.why))]
    parts += [markup.below(_changes(proposal)), change_table(["Now", "Then"], [proposal.now, proposal.then])]
    if proposal.steps:
        parts.append(f'<div class="pp-why">{_steps(proposal.steps, now_s)}</div>')
    st.html(markup.page(*parts, stale=read.stale))
    if proposal.changes_routes and proposal.routes:
        _route_expander("Proposed routes", proposal.routes, f"routes-{proposal.proposal_id}")
    if proposal.state == "open":
        with st.container(horizontal=True):
            key = proposal.proposal_id
            _action_button("Accept", f"accept-{key}", accept_action(proposal), console, read, "primary")
            _action_button("Refuse", f"refuse-{key}", refuse_action(proposal), console, read)


def _proposal_row(proposal: Proposal, now_s: float) -> list[str]:
    before, after = GOODPUT.of(proposal.now), GOODPUT.of(proposal.then)
    gain = units.NONE if before is None or after is None else f"{before:.3g} → {after:.3g}/s"
    decided = f", {_ago(proposal.decided_s, now_s)}" if proposal.decided_s is not None else ""
    return [
        markup.soft(_ago(proposal.made_s, now_s)),
        markup.text(_cause(proposal)) + (f"<br>{markup.soft(proposal.why)}" if proposal.why else ""),
        _changes(proposal),
        markup.text(gain),
        _proposal_state(proposal) + (f" {markup.soft(proposal.error)}" if proposal.error else ""),
        markup.text((proposal.who or units.NONE) + decided),
        _steps(proposal.steps, now_s) or units.NONE,
    ]


def _ago(then_s: float, now_s: float) -> str:
    """An age that does not break across lines."""
    return units.ago(then_s, now_s).replace(" ", "\u00a0")


def _changes(proposal: Proposal) -> str:
    routes = f'<span class="pp-flip">{markup.soft("new routes")}</span>' if proposal.changes_routes else ""
    return " ".join(filter(None, (_flips(proposal.flips), routes))) or markup.soft("none")


def _flips(flips: Sequence[RoleChange]) -> str:
    return " ".join(
        f'<span class="pp-flip">{markup.strong(flip.instance_id)} '
        f"{markup.role_badge(flip.from_role)} → {markup.role_badge(flip.to_role)}</span>"
        for flip in flips
    )


def _steps(steps: Sequence[ProposalStep], now_s: float) -> str:
    return "".join(
        f"<div>{'✓' if step.ok else '✕'} {markup.text(step.what)} "
        f"{markup.soft(' · '.join(filter(None, (step.text, _ago(step.at_s, now_s)))))}</div>"
        for step in steps
    )


def _proposal_state(proposal: Proposal) -> str:
    return markup.badge(proposal.state, _PROPOSAL_COLOUR.get(proposal.state, markup.IDLE))


def _cause(proposal: Proposal) -> str:
    return CAUSES.get(proposal.cause, proposal.cause)


@dataclass(frozen=True, slots=True)
class Question:
    """A what-if question and its answer when it has come. asked_s: unix seconds."""

    change: Mapping[str, Any]
    answer: "Future[WhatIf]"
    asked_s: float


def _what_if(read: Read[Fleet], console: Console, now_s: float) -> None:
    """The form, and the answer to the last question."""
    st.subheader("What if", anchor=False)
    if read.value is None:
        st.html(markup.empty(NO_PLANNER))
        return
    ids = sorted((each.instance_id for each in read.value.instances if not each.lost), key=natural_order)
    if not ids:
        st.html(markup.empty("The planner knows no living instance."))
        return
    with st.form("what-if", border=True):
        lost, count, like, role = st.columns([4, 1.3, 2, 1.7], gap="small")
        lost.multiselect("Lost instances", ids, key="suppose_lost", placeholder="none")
        count.number_input("Added instances", min_value=0, max_value=1000, step=1, key="suppose_count")
        like.selectbox("of the same kind as", ids, key="suppose_like")
        role.selectbox("in the role", [role.value for role in Role], key="suppose_role")
        columns = st.columns([1.5, 1.5, 1.5, 4.5], gap="small", vertical_alignment="bottom")
        limits: dict[str, Any] = {"min_value": 0.01, "max_value": 100.0, "value": 1.0, "step": 0.1, "format": "%.2f"}
        for column, (name, label) in zip(columns, FACTORS.items(), strict=False):
            column.number_input(label, key=f"suppose_{name}", **limits)
        submit = columns[-1].form_submit_button
        submit("Compute", key="suppose", disabled=read.stale, on_click=_ask, args=(console,))
    question = _question()
    if question is not None:
        _answer(question, now_s)


def _ask(console: Console) -> None:
    change, known = change_body(st.session_state.to_dict()), _question()
    if known is None or known.answer.done() or known.change != change:
        answer = console.submit(Pool.WHAT_IF, console.api.what_if, change)
        st.session_state[_WHAT_IF] = Question(change, answer, time.time())


def _question() -> Question | None:
    return cast("Question | None", st.session_state.get(_WHAT_IF))


def change_body(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The body of `POST /what-if` for the values of the form."""
    count = int(fields.get("suppose_count", 0))
    added = [{"like": fields["suppose_like"], "count": count, "role": fields["suppose_role"]}] if count else []
    factors = {name: float(fields.get(f"suppose_{name}", 1.0)) for name in FACTORS}
    return {"lost": list(fields.get("suppose_lost", [])), "added": added, **factors}


def change_words(change: Mapping[str, Any]) -> str:
    parts = [f"without {', '.join(change['lost'])}"] if change["lost"] else []
    parts += [f"{each['count']} more like {each['like']} as {each['role']}" for each in change["added"]]
    parts += [f"{label.lower()} {change[name]:g}" for name, label in FACTORS.items() if change[name] != 1.0]
    return "; ".join(parts) or "no change"


def _answer(question: Question, now_s: float) -> None:
    words = change_words(question.change).capitalize()
    head = f"{markup.strong(words)} {markup.soft(units.ago(question.asked_s, now_s))}"
    if not question.answer.done():
        st.html(markup.page(f"{head} {markup.soft('· computing …')}"))
        return
    error = question.answer.exception()
    if error is not None:
        message = error.message if isinstance(error, PolyphaseError) else f"{type(error).__name__}: {error}"
        st.warning(f"{words}: {message}", icon=":material/block:")
        return
    with st.container(key="what-if-answer"):
        st.html(markup.page(f"<div>{head}</div>", *_answer_parts(question.answer.result())))


def _answer_parts(answer: WhatIf) -> list[str]:
    best = answer.best
    titles, columns = ["Now", "Then, same roles"], [answer.now, answer.then]
    if best is not None:
        titles, columns = [*titles, "Then, with the best flips"], [*columns, best.expected]
    parts = [change_table(titles, columns)]
    if best is not None:
        flips = _flips(best.flips) if best.flips else markup.text("none, the present roles are best")
        parts.append(markup.below(f"{markup.soft('Best flips:')} {flips}"))
    if answer.why:
        parts.append(markup.below(markup.text(answer.why)))
    return parts


def _searches(read: Read[list[PlanSearch]], console: Console, now_s: float) -> None:
    """Running and ended searches, one result, and the form for another search."""
    st.subheader("Searches", anchor=False)
    if read.value is None:
        st.html(markup.empty(NO_PLANNER))
        return
    for search in read.value:
        if not search.ended:
            _running_search(search, console, read, now_s)
    ended = [search for search in read.value if search.ended]
    if ended:
        heads = ["Time", "Search", "State", "Duration", "Method", "Goodput", "By"]
        st.html(markup.page(markup.table(heads, [_search_row(each, now_s) for each in ended]), stale=read.stale))
    elif not read.value:
        st.html(markup.empty("No searches yet."))
    _chosen_result(ended, console)
    _search_form(console, read.stale)


def _running_search(search: PlanSearch, console: Console, read: Read[Any], now_s: float) -> None:
    by = f"by {search.who}" if search.who else ""
    facts = [search.plan_id, by, f"submitted {units.ago(search.submitted_s, now_s)}"]
    progress = search.progress
    if progress is not None:
        facts.append(progress.what)
        facts.append(f"running for {units.duration(progress.elapsed_s)}" if progress.elapsed_s is not None else "")
        facts.append(f"best goodput {units.rate(progress.best_goodput)}" if progress.best_goodput is not None else "")
    line = f"{_search_state(search)} {markup.text(' · '.join(filter(None, facts)))}"
    with st.container(horizontal=True, vertical_alignment="center", key=f"search-{search.plan_id}"):
        st.html(markup.page(line, stale=read.stale), width="content")
        _action_button("Cancel", f"cancel-{search.plan_id}", cancel_action(search), console, read)


def _search_row(search: PlanSearch, now_s: float) -> list[str]:
    took_s = search.ended_s - search.submitted_s if search.ended_s is not None else None
    result = search.result
    method, goodput = (result.method, units.rate(result.promise.goodput)) if result else (units.NONE, units.NONE)
    return [
        markup.soft(units.ago(search.submitted_s, now_s)),
        markup.strong(search.plan_id),
        _search_state(search) + (f" {markup.soft(search.error)}" if search.error else ""),
        *(markup.text(cell) for cell in (units.duration(took_s), method, goodput, search.who or units.NONE)),
    ]


def _search_state(search: PlanSearch) -> str:
    return markup.badge(search.state, _SEARCH_COLOUR.get(search.state, markup.IDLE))


def _chosen_result(ended: Sequence[PlanSearch], console: Console) -> None:
    ids = [search.plan_id for search in ended if search.result is not None]
    if not ids:
        return
    chosen = st.selectbox("Result", [NEWEST_RESULT, *ids], key="chosen_search", label_visibility="collapsed")
    plan_id = ids[0] if chosen == NEWEST_RESULT else str(chosen)
    search = cast("PlanSearch | None", st.session_state.get(_RESULT))
    if search is None or search.plan_id != plan_id:  # an ended search does not change
        read = console.api.read(PLAN_SEARCH, plan_id).result()
        search = read.value
        if search is None or search.result is None:
            st.html(markup.empty(read.error or "This search has no result."))
            return
        st.session_state[_RESULT] = search
    result = search.result
    assert result is not None
    with st.container(border=True, key="search-result"):
        st.html(
            markup.page(
                markup.tiles(*_promise_tiles(result.promise), *_endurance_tiles(result)), markup.below(_groups(result))
            )
        )
        st.html(markup.page(_routes(result), markup.below(_other_methods(result))))
        st.download_button(
            "Cluster file",
            result.cluster_file,
            file_name=f"plan-{plan_id}.yaml",
            mime="application/yaml",
            icon=":material/download:",
            on_click="ignore",
            disabled=not result.cluster_file,
            key="cluster_file",
        )


def _promise_tiles(promise: Promise) -> list[str]:
    price = units.NONE if promise.usd_per_hour is None else f"{promise.usd_per_hour:.2f} USD/h"
    tokens, at = promise.usd_per_million_tokens, f"at {units.rate(promise.rate)}"
    return [
        markup.tile("Goodput", units.rate(promise.goodput), "highest rate within the SLO"),
        markup.tile("SLO attainment", units.share(promise.attainment), at),
        markup.tile("TTFT, mean", units.duration(promise.ttft_s), at),
        markup.tile("TPOT, mean", units.duration(promise.tpot_s), at),
        markup.tile("Price", price, "" if tokens is None else f"{tokens:.3g} USD for a million tokens"),
    ]


def _endurance_tiles(result: SearchResult) -> list[str]:
    kept = result.endurance
    if kept is None:
        return []
    flips = f" after {kept.flips} flip{'s' if kept.flips > 1 else ''}" if kept.flips else ""
    cost = f"; costs {units.share(kept.given_up)} of goodput" if kept.given_up else ""
    return [markup.tile("Without any one group", units.rate(kept.goodput), f"worst: {kept.lost}{flips}{cost}")]


def _groups(result: SearchResult) -> str:
    rows = [
        [
            markup.strong(group.name),
            markup.role_badge(group.role),
            markup.text(group.accelerators),
            markup.text(group.layout),
            markup.text(units.NONE if group.price_usd_hour is None else f"{group.price_usd_hour:.2f}"),
        ]
        for group in result.groups
    ]
    return markup.table(["Group", "Role", "Accelerators", "Layout", "USD/h"], rows)


def _routes(result: SearchResult) -> str:
    rows = [
        [
            markup.text(route.prefill or "the decode instance"),
            markup.text(route.decode),
            markup.bar("", route.share, units.share(route.share), markup.IDLE),
        ]
        for route in result.routes
    ]
    policies = f"<div>{markup.soft('Policies')} {markup.strong(result.policies)}</div>" if result.policies else ""
    return policies + (markup.table(["Prefill", "Decode", "Share"], rows) if rows else "")


def _other_methods(result: SearchResult) -> str:
    goodputs = [(each.method, units.rate(each.goodput)) for each in result.compared]
    return f"<div>{markup.text('Goodput of other methods:')}</div>{markup.facts(goodputs)}" if goodputs else ""


def _search_form(console: Console, stale: bool) -> None:
    with st.expander("Search for a plan"), st.form("search", border=False):
        left, right = st.columns([3, 2], gap="medium")
        left.text_area("Inventory (YAML)", key="search_inventory", height=300, placeholder=EXAMPLE)
        with right:
            st.text_input("Model", key="search_model", placeholder="Llama-3-8B")
            st.text_input("Workload", "azure-conv", key="search_workload")
            first, second = st.columns(2)
            seconds: dict[str, Any] = {"min_value": 0.001, "format": "%.3f"}
            first.number_input("TTFT, s", value=2.0, step=0.1, key="search_ttft_s", **seconds)
            second.number_input("TPOT, s", value=0.1, step=0.01, key="search_tpot_s", **seconds)
            itl_help = "99th percentile of the gaps between tokens. Empty: the larger of 0.25 and 1.25 times TPOT"
            first.number_input(
                "ITL, s", value=None, step=0.05, key="search_itl_s", placeholder="default", help=itl_help, **seconds
            )
            rate_help = "0: a rate near goodput"
            second.number_input("Requests/s", min_value=0.0, value=0.0, step=1.0, key="search_rate", help=rate_help)
            st.selectbox("Method", METHODS, key="search_method")
        error = search_error(st.session_state.to_dict())
        if error and st.session_state.get(_TRIED):
            st.warning(error, icon=":material/warning:")
        disabled = stale or not console.account.may_operate
        st.form_submit_button("Search", key="search_submit", disabled=disabled, on_click=_request_search)


def _request_search() -> None:
    st.session_state[_TRIED] = True
    fields = st.session_state.to_dict()
    if not search_error(fields):
        request_action(submit_action(search_body(fields)))


def search_error(fields: Mapping[str, Any]) -> str:
    """Why the form cannot be sent; empty if it can."""
    required = {"search_inventory": "inventory", "search_model": "model", "search_workload": "workload"}
    for key, name in required.items():
        if not str(fields.get(key) or "").strip():
            return f"The {name} is missing."
    itl_s = fields.get("search_itl_s")
    tight = tight_gaps(float(itl_s), float(fields["search_tpot_s"])) if itl_s is not None else ""
    return f"ITL is too short: {tight}." if tight else ""


def search_body(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The body of `POST /plans` for the values of the form."""
    slo = {name: float(fields[f"search_{name}"]) for name in ("ttft_s", "tpot_s")}
    if fields.get("search_itl_s") is not None:
        slo["itl_s"] = float(fields["search_itl_s"])
    texts = {name: str(fields[f"search_{name}"]).strip() for name in ("model", "workload", "method")}
    return {"inventory": str(fields["search_inventory"]), **texts, "slo": slo, "rate": float(fields["search_rate"])}
