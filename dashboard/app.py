"""The dashboard: `streamlit run dashboard/app.py`.

Streamlit runs `pages.py`; `first_paint.py` answers a browser's first request for a page.
"""

from pathlib import Path

from starlette.routing import Route
from streamlit.starlette import App

from dashboard.first_paint import PAINTED, first_paint, warmed_up

app = App(
    Path(__file__).with_name("pages.py"),
    routes=[Route(f"/{path}", first_paint, methods=["GET"]) for path in PAINTED],
    lifespan=warmed_up,
)
