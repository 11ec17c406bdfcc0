"""The plan in force and the comparison of expected, measured and promised figures, with the size of their deviation
in words.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
import streamlit as st

from dashboard import look, units
from dashboard.plan.picture import GROUPED_ABOVE, LEGEND, graph, picture
from dashboard.plan.records import Expected, Fleet, Measured, Promise, Route
from dashboard.reads import Read

CLOSE = 0.1  # of a figure: nearer than this is as expected
FAR = 0.2  # worse by more than this is trouble
CLOSE_POINTS, FAR_POINTS = 0.02, 0.05  # of attainment, which has no sensible ratio near zero


def rate(value: float | None) -> str:
    """Requests a second."""
    return units.NONE if value is None else f"{value:.3g}/s"


@dataclass(frozen=True, slots=True)
class Figure:
    """One of a plan's figures. better: +1 where more is better, -1 where less is, 0 where it is only told."""

    name: str
    better: int
    told: Callable[[float | None], str]
    expected: Callable[[Expected], float | None]
    measured: Callable[[Measured], float | None]
    promised: Callable[[Promise], float | None]
    more: str = "more"
    less: str = "less"


RATE = Figure("Rate", 0, rate, lambda e: e.rate, lambda m: m.rate, lambda p: p.rate)
GOODPUT = Figure("Goodput", 1, rate, lambda e: e.goodput, lambda _: None, lambda p: p.goodput)
ATTAINMENT = Figure(
    "SLO attainment", 1, units.share, lambda e: e.attainment, lambda m: m.attainment, lambda p: p.attainment
)
TTFT = Figure(
    "TTFT", -1, units.duration, lambda e: e.ttft_s, lambda m: m.ttft_p50_s, lambda p: p.ttft_mean_s, "longer", "shorter"
)
TPOT = Figure(
    "TPOT", -1, units.duration, lambda e: e.tpot_s, lambda m: m.tpot_p50_s, lambda p: p.tpot_mean_s, "longer", "shorter"
)
FIGURES = (RATE, ATTAINMENT, TTFT, TPOT, GOODPUT)


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far one figure is from another. trouble: worse, and by much."""

    text: str
    trouble: bool = False
    gain: bool = False


def deviation(figure: Figure, before: float | None, after: float | None, same: str) -> Deviation:
    """`after` as seen from `before`; `same` is what to say where they are close. Empty where one is not known."""
    if before is None or after is None:
        return Deviation("")
    if figure is ATTAINMENT:
        return _points(before, after, same)
    if before <= 0.0:
        return Deviation(figure.more, gain=figure.better > 0) if after > 0.0 else Deviation(same)
    change = after / before - 1.0
    if abs(change) < CLOSE:
        return Deviation(same)
    word = figure.more if change > 0 else figure.less
    said = f"{abs(change) * 100:.0f} % {word}" if change < 1.0 else f"{after / before:.2g} times as {_much(figure)}"
    gain = change * figure.better
    return Deviation(said, trouble=gain < -FAR, gain=gain > 0)


def change(figure: Figure, before: float | None, after: float | None) -> str:
    """A figure after a change, as HTML: the value, and how it differs from the one before."""
    found = deviation(figure, before, after, "about the same")
    if not found.text:
        return look.text(figure.told(after))
    if found.trouble or found.gain:
        mark = look.badge(found.text, look.BAD if found.trouble else look.GOOD)
    else:
        mark = look.soft(found.text)
    return f"{look.strong(figure.told(after))} {mark}"


def changes(titles: Sequence[str], columns: Sequence[Expected | None]) -> str:
    """A table of expectations, the later ones compared with the first."""
    first = columns[0]
    rows = []
    for figure in FIGURES:
        before = figure.expected(first) if first else None
        cells = [look.text(figure.told(before))]
        for later in columns[1:]:
            cells.append(change(figure, before, figure.expected(later) if later else None))
        rows.append([look.soft(figure.name), *cells])
    return look.narrow(look.table(["", *titles], rows))


def comparison(expected: Expected | None, measured: Measured | None, promise: Promise | None) -> str:
    """A table: what is expected, what is measured, how far they are apart, what the plan file promised."""
    rows = []
    for figure in FIGURES:
        hoped = figure.expected(expected) if expected else None
        seen = figure.measured(measured) if measured else None
        row = [look.soft(figure.name), look.text(figure.told(hoped)), _seen(figure, seen), _apart(figure, hoped, seen)]
        if figure is GOODPUT:
            row[3] = look.soft(_room(expected, measured))
        rows.append([*row, *([look.text(figure.told(figure.promised(promise)))] if promise else [])])
    heads = ["", "Expected", "Measured", "Deviation", *(["The plan file promised"] if promise else [])]
    return look.narrow(look.table(heads, rows))


def _seen(figure: Figure, value: float | None) -> str:
    told = look.strong(figure.told(value))
    return f"{told} {look.soft('p50')}" if figure in (TTFT, TPOT) and value is not None else told


def _apart(figure: Figure, hoped: float | None, seen: float | None) -> str:
    found = deviation(figure, hoped, seen, "as expected")
    if found.trouble:
        return look.badge(f"{found.text} than expected" if " times " not in found.text else found.text, look.BAD)
    words = f"{found.text} than expected" if found.text[:1].isdigit() and " times " not in found.text else found.text
    return look.text(words or units.NONE)


def _room(expected: Expected | None, measured: Measured | None) -> str:
    """What goodput means beside the rate that there is."""
    goodput = expected.goodput if expected else None
    now = measured.rate if measured else None
    if goodput is None or not now:
        return units.NONE
    if goodput >= now:
        return f"room for {100 * (goodput / now - 1.0):.0f} % more requests"
    return f"{100 * (1.0 - goodput / now):.0f} % short of the rate"


def _points(before: float, after: float, same: str) -> Deviation:
    gap = after - before
    if abs(gap) < CLOSE_POINTS:
        return Deviation(same)
    said = f"{abs(gap) * 100:.0f} points {'higher' if gap > 0 else 'lower'}"
    return Deviation(said, trouble=gap < -FAR_POINTS, gain=gap > 0)


def _much(figure: Figure) -> str:
    return "long" if figure.better < 0 else "much"


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
