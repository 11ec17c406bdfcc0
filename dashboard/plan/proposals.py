"""What the planner proposes, what became of it, and whether it asks before it acts."""

from collections.abc import Sequence

import streamlit as st

from dashboard import look, units
from dashboard.plan.in_force import NO_PLANNER, SHARES, changes, frame
from dashboard.plan.operations import Act, PlanSession, Wish, accept, refuse
from dashboard.plan.records import Fleet, Flip, Proposal, Step
from dashboard.reads import Read

CAUSES = {
    "loss": "an instance was lost",
    "return": "an instance came back",
    "shift": "the demand shifted",
    "review": "a review",
    "asked": "somebody asked",
}
_COLOUR = {"open": look.PREFILL, "applying": look.CAUTION, "applied": look.GOOD, "failed": look.BAD}


def auto(read: Read[Fleet], session: PlanSession) -> None:
    """Whether proposals are applied without asking, the button that changes it, and why there may be none."""
    fleet = read.value
    if fleet is None:
        return
    said = "Auto is on: proposals are applied without asking." if fleet.auto else "Auto is off: proposals wait for you."
    act, name = (Act.AUTO_OFF, "Turn auto off") if fleet.auto else (Act.AUTO_ON, "Turn auto on")
    with st.container(horizontal=True, vertical_alignment="center", key="plan-auto"):
        st.html(look.page(look.dot(said, look.GOOD if fleet.auto else look.IDLE), stale=read.stale), width="content")
        target = "auto"
        st.button(
            name,
            key="auto",
            disabled=read.stale or session.busy(target),
            on_click=session.want,
            args=(Wish(act, target),),
        )
    if fleet.trouble and not read.stale:
        st.warning(f"Nothing can be proposed: {fleet.trouble}", icon=":material/warning:")


def proposals(read: Read[list[Proposal]], session: PlanSession, now_s: float) -> None:
    """Those that wait or are being applied in full, the others as a table."""
    st.subheader("Proposals", anchor=False)
    if read.value is None:
        st.html(look.empty(NO_PLANNER))
        return
    waiting = [one for one in read.value if one.state in ("open", "applying")]
    past = [one for one in read.value if one not in waiting]
    if not waiting:
        st.html(look.empty("No proposal is open: the planner knows nothing that would be better by enough."))
    for one in waiting:
        with st.container(border=True, key=f"proposal-{one.proposal_id}"):
            _open(one, session, read.stale, now_s)
    if past:
        heads = ["When", "Cause", "Changes", "Expected goodput", "State", "By", "Steps"]
        rows = [_past(one, now_s) for one in past]
        st.html(look.page(look.soft("Earlier ones"), look.table(heads, rows), stale=read.stale))


def flips(all_of: Sequence[Flip]) -> str:
    """Each flip as HTML."""
    roles = {"prefill": look.PREFILL, "decode": look.DECODE}
    return " ".join(
        f'<span class="pp-flip">{look.strong(one.instance_id)} '
        f"{look.badge(one.from_role, roles.get(one.from_role, look.IDLE))} → "
        f"{look.badge(one.to_role, roles.get(one.to_role, look.IDLE))}</span>"
        for one in all_of
    )


def _open(one: Proposal, session: PlanSession, stale: bool, now_s: float) -> None:
    took = f", worked out in {units.duration(one.took_s)}" if one.took_s is not None else ""
    head = f"{_state(one)} {look.strong(_cause(one))} {look.soft(units.ago(one.made_s, now_s) + took)}"
    steps = _steps(one.steps, now_s)
    parts = [f'<div class="pp-facts">{head}</div>', look.below(look.text(one.why))]
    parts += [look.below(_changes(one)), changes(["Now", "Then"], [one.now, one.then])]
    st.html(look.page(*parts, *([f'<div class="pp-why">{steps}</div>'] if steps else []), stale=stale))
    if one.changes_routes and one.routes:
        with st.expander("The routes then"):
            st.dataframe(frame(one.routes), hide_index=True, key=f"routes-{one.proposal_id}", column_config=SHARES)
    if one.state == "open":
        off = stale or session.busy(one.proposal_id)
        with st.container(horizontal=True):
            st.button(
                "Accept",
                key=f"accept-{one.proposal_id}",
                type="primary",
                disabled=off,
                on_click=session.want,
                args=(accept(one),),
            )
            st.button(
                "Refuse", key=f"refuse-{one.proposal_id}", disabled=off, on_click=session.want, args=(refuse(one),)
            )


def _past(one: Proposal, now_s: float) -> list[str]:
    before, after = (each.goodput if each else None for each in (one.now, one.then))
    gain = units.NONE if before is None or after is None else f"{before:.3g} → {after:.3g}/s"
    decided = f", {_ago(one.decided_s, now_s)}" if one.decided_s is not None else ""
    why = look.text(_cause(one)) + (f"<br>{look.soft(one.why)}" if one.why else "")
    state = _state(one) + (f" {look.soft(one.error)}" if one.error else "")
    by = look.text((one.who or units.NONE) + decided)
    return [
        look.soft(_ago(one.made_s, now_s)),
        why,
        _changes(one),
        look.text(gain),
        state,
        by,
        _steps(one.steps, now_s) or units.NONE,
    ]


def _ago(then_s: float, now_s: float) -> str:
    """As `units.ago`, in one line."""
    return units.ago(then_s, now_s).replace(" ", "\u00a0")


def _changes(one: Proposal) -> str:
    routes = f'<span class="pp-flip">{look.soft("new routes")}</span>' if one.changes_routes else ""
    return " ".join(filter(None, (flips(one.flips), routes))) or look.soft("nothing")


def _steps(steps: Sequence[Step], now_s: float) -> str:
    return "".join(
        f"<div>{'✓' if step.ok else '✕'} {look.text(step.what)} "
        f"{look.soft(' · '.join(filter(None, (step.text, _ago(step.at_s, now_s)))))}</div>"
        for step in steps
    )


def _state(one: Proposal) -> str:
    return look.badge(one.state, _COLOUR.get(one.state, look.IDLE))


def _cause(one: Proposal) -> str:
    return CAUSES.get(one.cause, one.cause)
