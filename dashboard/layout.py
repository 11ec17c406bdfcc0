"""Parts that pages share: the header with the state of the services, outage messages, stale parts in grey, and tables
whose rows open a page.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import pandas as pd
import streamlit as st

from dashboard import markup, units
from dashboard.answers import HISTORY
from dashboard.api import Api, Read, Service
from dashboard.charts import POINTS, RANGES
from dashboard.console import Console
from dashboard.login import account_menu
from shared.wire.api.monitor import History

T = TypeVar("T")
NO_MONITOR = "No data: the cluster monitor does not answer."
LATE_REFRESHES = 3  # after so many missed refreshes the browser shows that the page is old
FINAL = float("inf")  # refresh period of a page that does not change any more
ROW_PX, HEAD_PX = 35, 38
LONGEST_DEFAULT = 60  # minutes of a chart over time, unless a user chooses more
_RANGE = "first_range"  # in Streamlit's session state


def header(console: Console, title: str, reads: Sequence[Read[Any] | None], every_s: float = 0.0) -> None:
    """The top line with the state of the services of these reads, and a message for each service with an error.

    every_s: the page's refresh period; 0: the one of the settings.
    """
    now_s = time.time()
    by_service: dict[Service, list[Read[Any]]] = {}
    for read in reads:
        if read is not None:
            by_service.setdefault(read.service, []).append(read)
    dots = "".join(_dot(service, group, now_s) for service, group in by_service.items())
    dots += _clock(now_s, every_s or console.settings.refresh_s)
    parts = f"<b>Polyphase</b>{markup.soft(title)}<span class='pp-services'>{dots}</span>"
    with st.container(horizontal=True, vertical_alignment="center", key="header"):
        st.html(markup.page(f'<div class="pp-head">{parts}</div>'))
        account_menu(console.account)
    for service, group in by_service.items():
        if error := _error(group):
            known_s = min((read.read_s for read in group if read.value is not None), default=None)
            _outage(service, error, known_s, now_s)


def unavailable(console: Console, title: str, reason: str) -> None:
    """A page without its service."""
    header(console, title, [], every_s=FINAL)
    st.html(markup.empty(reason))


def optional_result(future: "Future[Read[T]] | None") -> Read[T] | None:
    return future.result() if future is not None else None


def age(read: Read[Any], now_s: float) -> str:
    """The age of stale or late data; empty for fresh data."""
    return markup.soft(f"as of {units.ago(read.read_s, now_s)}") if read.stale or read.late else ""


def stale_container(key: str, read: Read[Any]) -> Any:
    """A container that `style.css` greys out while the read is stale."""
    return st.container(key=f"{key}-stale" if read.stale else key)


def time_zone() -> str:
    """The browser's."""
    return str(st.context.timezone or "UTC")


def range_heading(title: str, api: Api) -> int:
    """A heading with a choice of time ranges, at first the shortest that holds what is known; returns the chosen number
    of minutes.
    """
    if _RANGE not in st.session_state:
        st.session_state[_RANGE] = shortest_range(last_hour(api).result().value)
    default = st.session_state[_RANGE]
    with st.container(horizontal=True, vertical_alignment="bottom", key="range-line"):
        st.subheader(title, anchor=False, width="content")
        chosen = choice("Range", list(RANGES), default, "range")
    return RANGES[chosen]


def last_hour(api: Api) -> "Future[Read[History]]":
    """The history of the longest range that is shown at first."""
    return history_of(api, LONGEST_DEFAULT)


def history_of(api: Api, minutes: int) -> "Future[Read[History]]":
    return api.read(HISTORY, fresh_s=minutes * 60.0 / POINTS, minutes=minutes, points=POINTS)


def shortest_range(last_hour: History | None) -> str:
    """The shortest range, of an hour at most, that the whole history fits into."""
    known_s = LONGEST_DEFAULT * 60.0 if last_hour is None else last_hour.to_s - first_known_s(last_hour)
    return next(name for name, minutes in RANGES.items() if minutes * 60.0 >= known_s or minutes == LONGEST_DEFAULT)


def first_known_s(history: History) -> float:
    """The time of the first point at which anything is known; the end of the history where nothing is."""
    columns = [column for column in history.series.values() if column]
    known = (moment for at, moment in enumerate(history.time_s) if any(column[at] is not None for column in columns))
    return next(known, history.to_s)


def choice(label: str, options: Sequence[str], default: str, key: str, *, labelled: bool = False) -> str:
    """Exactly one of a few options."""
    visibility: Any = "visible" if labelled else "collapsed"
    chosen = st.segmented_control(label, options, default=default, required=True, key=key, label_visibility=visibility)
    return str(chosen or default)


def row_table(
    frame: pd.DataFrame,
    ids: Sequence[str],
    key: str,
    open_row: Callable[[str], None],
    *,
    max_px: int = 560,
    column_config: Any = None,
) -> None:
    """A table of rows with these ids; a click on a row calls `open_row` with its id."""
    clicked = clicked_row(key)
    if clicked is not None:
        open_row(clicked)
    st.session_state[f"{key}-shown"] = tuple(ids)
    st.dataframe(
        frame,
        hide_index=True,
        key=_widget_key(key),
        height=min(max_px, HEAD_PX + ROW_PX * max(1, len(ids))),
        placeholder=units.NONE,
        column_config=column_config,
        on_select="rerun",
        selection_mode="single-cell",
    )


def clicked_row(key: str) -> str | None:
    """The id of the row that was just clicked in that table; each click is returned once.

    Streamlit forgets the selection of a removed table when a run of the page ends. A run that the user's next click
    cuts off (back to the list) would keep it, and the table would open the same row again. After a click the table
    therefore gets another key.
    """
    selection = st.session_state.get(_widget_key(key), {}).get("selection", {})
    cells, shown = selection.get("cells") or [], st.session_state.get(f"{key}-shown", ())
    if not cells or not 0 <= cells[0][0] < len(shown):
        return None
    st.session_state[f"{key}-clicks"] = st.session_state.get(f"{key}-clicks", 0) + 1
    return str(shown[cells[0][0]])


def _widget_key(key: str) -> str:
    return f"{key}-{st.session_state.get(f'{key}-clicks', 0)}"


def _error(reads: Sequence[Read[Any]]) -> str:
    return next((read.error for read in reads if read.error), "")


def _dot(service: Service, reads: Sequence[Read[Any]], now_s: float) -> str:
    """The service's state, not by the colour alone; of late values, the greatest age."""
    error, late_s = _error(reads), [read.read_s for read in reads if read.late]
    if error:
        return markup.dot(f"{service.name} ✕", markup.BAD, error)
    if late_s:
        return markup.dot(f"{service.name}, {units.ago(min(late_s), now_s)}", markup.CAUTION, "answers slowly")
    return markup.dot(service.name, markup.GOOD, "answers")


def _clock(now_s: float, every_s: float) -> str:
    """The time since the refresh, which the browser counts itself, and a banner over the page once it is too long."""
    if every_s == FINAL:
        return markup.soft("final, no more refreshes")
    late = f"--late:{LATE_REFRESHES * every_s:g}s"
    warning = "The connection to the dashboard is lost. Seconds since the last refresh: "
    return (
        f'<span class="pp-clock" data-at="{now_s:.2f}" style="{late}">'
        f'<span class="pp-age">refreshed </span>'
        f'<span class="pp-late" role="alert">✕ {markup.text(warning)}<span class="pp-age-figure"></span></span></span>'
    )


def _outage(service: Service, error: str, known_s: float | None, now_s: float) -> None:
    error = error.replace("`", "'")  # must not end the code block
    stale = "" if known_s is None else f" Greyed-out data is from {units.ago(known_s, now_s)}."
    st.error(
        f"**The {service.name} at `{service.url}` does not answer correctly.** {service.absence}{stale}"
        f"\n\n```text\n{error}\n```",
        icon=":material/cloud_off:",
    )
