"""Tables in which a click opens something. What was clicked is told by what was on the screen, not by what is new."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import units

ROW_PX, HEAD_PX = 35, 38


def clicked(key: str) -> str | None:
    """The id of the row that was just clicked in that table, before it is drawn again."""
    selection = st.session_state.get(key, {}).get("selection", {})
    cells, shown = selection.get("cells") or [], st.session_state.get(f"{key}-shown", ())
    if not cells or not 0 <= cells[0][0] < len(shown):
        return None
    return str(shown[cells[0][0]])


def clickable(frame: pd.DataFrame, ids: Sequence[str], key: str, *, most_px: int = 560, **more: Any) -> None:
    """Draw it; `ids` are those of its rows."""
    st.session_state[f"{key}-shown"] = tuple(ids)
    height = min(most_px, HEAD_PX + ROW_PX * max(1, len(ids)))
    chosen: dict[str, Any] = {"on_select": "rerun", "selection_mode": "single-cell"}
    st.dataframe(frame, hide_index=True, key=key, height=height, placeholder=units.NONE, **chosen, **more)
