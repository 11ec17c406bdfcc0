"""Tables in which a click on a row opens something."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import units

ROW_PX, HEAD_PX = 35, 38


def clicked(key: str) -> str | None:
    """The id of the row that was just clicked in that table, before the table is drawn again; a click counts once.

    Streamlit forgets the selection of a table that is gone only when a run of the page ends. A run that is cut off by
    the reader's next click (back to the list) would leave it, and the table would open the same row again. So a table
    whose click was followed is drawn as a new one.
    """
    selection = st.session_state.get(_widget(key), {}).get("selection", {})
    cells, shown = selection.get("cells") or [], st.session_state.get(f"{key}-shown", ())
    if not cells or not 0 <= cells[0][0] < len(shown):
        return None
    st.session_state[f"{key}-clicks"] = _clicks(key) + 1
    return str(shown[cells[0][0]])


def clickable(frame: pd.DataFrame, ids: Sequence[str], key: str, *, most_px: int = 560, **more: Any) -> None:
    """Draw it; `ids` are those of its rows."""
    st.session_state[f"{key}-shown"] = tuple(ids)
    height = min(most_px, HEAD_PX + ROW_PX * max(1, len(ids)))
    chosen: dict[str, Any] = {"on_select": "rerun", "selection_mode": "single-cell"}
    st.dataframe(frame, hide_index=True, key=_widget(key), height=height, placeholder=units.NONE, **chosen, **more)


def _widget(key: str) -> str:
    return f"{key}-{_clicks(key)}"


def _clicks(key: str) -> int:
    return int(st.session_state.get(f"{key}-clicks", 0))
