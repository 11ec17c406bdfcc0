"""The plan in force: what it consists of, and whether it does what was expected of it."""

import pandas as pd
import streamlit as st

from dashboard import look, units
from dashboard.plan.figures import comparison, rate
from dashboard.plan.nodes import GROUPED_ABOVE, graph
from dashboard.plan.picture import LEGEND, picture
from dashboard.plan.records import Fleet, Measured, Route
from dashboard.reads import Read

NO_PLANNER = "Nothing to show while the planner does not answer."
FEW = 30  # requests; a share of fewer says little


def in_force(read: Read[Fleet]) -> None:
    """The picture, the routes behind it, and expected beside measured figures."""
    st.subheader("The plan in force", anchor=False)
    fleet = read.value
    if fleet is None:
        st.html(look.empty(NO_PLANNER))
        return
    if not fleet.instances:
        st.html(look.empty("The planner knows of no instance yet."))
        return
    st.html(look.page(_facts(fleet), stale=read.stale))
    with st.container(key="plan-picture-stale" if read.stale else "plan-picture"):
        drawn = picture(graph(fleet.instances, fleet.routes))
        st.plotly_chart(drawn, key="plan-picture-chart", config={"displayModeBar": False})
    grouped = " Alike instances are drawn as one." if len(fleet.instances) > GROUPED_ABOVE else ""
    st.html(look.page(look.soft(LEGEND + grouped)))
    if fleet.routes:
        with st.expander("Routes as a table"):
            st.dataframe(frame(fleet.routes), hide_index=True, key="plan-routes", column_config=SHARES)
    st.subheader("Expected and measured", anchor=False)
    if fleet.expected is None and fleet.measured is None and fleet.promise is None:
        st.html(look.empty("Nothing is expected yet: the planner has seen too few requests."))
        return
    table = comparison(fleet.expected, fleet.measured, fleet.promise)
    st.html(look.page(table, look.below(look.soft(_window(fleet.measured))), stale=read.stale))


SHARES = {"share": st.column_config.ProgressColumn(format="percent", min_value=0.0, max_value=1.0)}


def frame(routes: list[Route]) -> pd.DataFrame:
    """One line a route."""
    return pd.DataFrame(
        [
            {"prompts computed by": one.prefill or "the same", "decoded by": one.decode, "share": one.share}
            for one in routes
        ]
    )


def _facts(fleet: Fleet) -> str:
    facts = [("Placement", fleet.placement or units.NONE)]
    if fleet.routes:
        facts.append(("Routes", "in force" if fleet.routes_in_force else "what the planner expects, not prescribed"))
    asked = fleet.demand
    if asked is not None:
        prompt, output = units.count(asked.prompt_tokens), units.count(asked.output_tokens)
        facts.append(("Planned for", f"{rate(asked.rate)}, {prompt} prompt + {output} output tokens"))
        facts.append(("SLO", f"TTFT {units.duration(asked.ttft_s)}, TPOT {units.duration(asked.tpot_s)}"))
    line = "".join(f"<span>{look.soft(name)} {look.strong(value)}</span>" for name, value in facts)
    return f'<div class="pp-facts">{line}</div>'


def _window(measured: Measured | None) -> str:
    if measured is None:
        return "Nothing measured yet. Expected latencies are means."
    few = ": too few to say much" if measured.requests < FEW else ""
    of = f"{units.count(measured.requests)} requests of the last {units.duration(measured.window_s)}{few}"
    return f"Measured: {of}. Expected and promised latencies are means, measured ones medians."
