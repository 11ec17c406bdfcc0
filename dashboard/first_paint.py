"""The answer to the browser's first request for a page: Streamlit's own document with the page's newest values in it.

A browser needs a second or more until it has loaded Streamlit and shows anything. What it shows meanwhile is made by
the functions of the pages, without buttons, and goes when the page itself has been drawn.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import HTMLResponse

from dashboard import login, markup, units
from dashboard.answers import CLUSTER, FLEET, INSTANCES, LENGTH_SOURCE, POLICIES, VERDICT
from dashboard.api import Api, Read
from dashboard.console import INSTANCE_ID, OPERATION_ID, REQUEST_ID, shared_api
from dashboard.dashboard_settings import DashboardSettings
from dashboard.events_page import event_frame, newest_events
from dashboard.instances_page import instance_frame, worst_first
from dashboard.layout import last_hour
from dashboard.overview_page import first_charts, snapshot
from dashboard.plan_page import plan_picture
from dashboard.policies_page import policy_table
from dashboard.predictor_page import length_parts
from dashboard.requests_page import request_frame, slowest_requests
from shared.errors import PolyphaseError
from shared.palette import DARK, LIGHT
from shared.runtime.keys import LOOPBACK

WAIT_S = 1.0  # for values that are not known yet
ROWS_SHOWN = 25  # of a table
MOST_MS = 60_000  # until the values give way to whatever the page itself shows by then
ZONE = "UTC"  # the reader's is not known yet
TIMES = f"Times are in {ZONE} until the page is loaded."
TABLE = "[data-testid=stDataFrame]"
Answer = Future[Read[Any]] | None


@dataclass(frozen=True, slots=True)
class Painting:
    """What a page shows before Streamlit draws it. read: starts the reads; None where a service has no URL. paint: the
    HTML of their values; its arguments are the first value, which is known, all reads, None for those that are still on
    their way, and the time. drawn: what the page itself has in the browser once it is there. elements: of Streamlit,
    which the page has besides HTML.
    """

    title: str
    read: Callable[[Api, float], Sequence[Answer]]
    paint: Callable[[Any, Sequence[Read[Any] | None], float], str]
    drawn: tuple[str, ...] = (TABLE,)
    elements: tuple[str, ...] = ()


def _frame_table(frame: pd.DataFrame) -> str:
    """The first rows of a table that the page itself shows; empty without rows."""
    if frame.empty:
        return ""
    rows = frame.head(ROWS_SHOWN).itertuples(index=False)
    cells = [[markup.text(units.NONE if pd.isna(cell) else _cell(cell)) for cell in row] for row in rows]
    return markup.page(markup.table([str(name) for name in frame.columns], cells))


def _cell(cell: object) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def _overview(verdict: Any, reads: Sequence[Read[Any] | None], now_s: float) -> str:
    read, cluster, history = reads
    assert read is not None
    upper = snapshot(read, verdict, cluster.value if cluster is not None else None, now_s)
    if history is None or history.value is None:
        return upper
    goal = DashboardSettings.load().slo_goal
    return upper + markup.page(markup.soft(TIMES)) + first_charts(history.value, ZONE, goal)


def _events(found: Any, reads: Sequence[Read[Any] | None], now_s: float) -> str:
    table = _frame_table(event_frame(found, now_s, ZONE))
    return markup.page(markup.soft(TIMES)) + table if table else ""


def _policies(found: Any, reads: Sequence[Read[Any] | None], now_s: float) -> str:
    assert reads[0] is not None
    return markup.page(markup.soft(TIMES)) + policy_table(reads[0], found, now_s, ZONE)


PAINTED = {
    "": Painting(
        "Overview",
        lambda api, _: [api.read(VERDICT), api.read(CLUSTER), last_hour(api)],
        _overview,
        (".pp-verdict",),
        ("PageLink", "ButtonGroup"),
    ),
    "instances": Painting(
        "Instances",
        lambda api, _: [api.read(INSTANCES)],
        lambda rows, *_: _frame_table(instance_frame(worst_first(rows))),
        (TABLE, ".st-key-cards"),
        ("ReadOnlyGrid", "ButtonGroup"),
    ),
    "requests": Painting(
        "Requests",
        lambda api, now_s: [slowest_requests(api, now_s)],
        lambda page, _, now_s: _frame_table(request_frame(page.rows, now_s)),
        elements=("ReadOnlyGrid", "ButtonGroup", "TextInput", "Selectbox", "Button"),
    ),
    "events": Painting(
        "Events",
        lambda api, now_s: [newest_events(api, now_s)],
        _events,
        elements=("ReadOnlyGrid", "ButtonGroup", "TextInput", "Selectbox"),
    ),
    "policies": Painting(
        "Policies", lambda api, _: [api.read(POLICIES)], _policies, (".pp table",), ("TextInput", "Selectbox", "Button")
    ),
    "predictor": Painting(
        "Predictor",
        lambda api, _: [api.read_optional(LENGTH_SOURCE)],
        lambda source, *_: markup.page(*length_parts(source)),
        (".pp p",),
    ),
    "plan": Painting(
        "Plan",
        lambda api, _: [api.read_optional(FLEET)],
        lambda fleet, *_: plan_picture(fleet) if fleet.instances else "",
        (".pp-plan",),
        ("NumberInput", "Multiselect", "Selectbox", "Button"),
    ),
    "try": Painting("Try it", lambda *_: [], lambda *_: "", elements=("NumberInput", "TextInput", "Button")),
}
ANYWAY = (".pp-empty", "[data-testid=stException]", ".st-key-login")  # other ends of a page that was drawn


@asynccontextmanager
async def warmed_up(app: object) -> AsyncIterator[None]:
    """Read once at the start what pages need, so that the first visitor finds connections and values."""
    try:
        api = shared_api(DashboardSettings.load())
        for painting in PAINTED.values():
            painting.read(api, time.time())
    except (PolyphaseError, ValidationError):
        pass  # each visitor sees the error
    yield


async def first_paint(request: Request) -> HTMLResponse:
    """Streamlit's document, with the newest values for those who may see them."""
    path = request.url.path.strip("/")
    shown = ""
    if not any(name in request.query_params for name in (INSTANCE_ID, REQUEST_ID, OPERATION_ID)):
        shown = await _painted(PAINTED[path], request)
    document = _document(PAINTED[path].elements)
    if shown:
        nav = "".join(f'<a href="./{other}">{markup.text(each.title)}</a>' for other, each in PAINTED.items())
        head = f'<div class="pp-head"><b>Polyphase</b>{markup.soft(PAINTED[path].title)}</div>'
        drawn = ", ".join(f"#root {each}" for each in (*PAINTED[path].drawn, *ANYWAY))
        removal = _REMOVAL.replace("DRAWN", drawn).replace("MOST_MS", str(MOST_MS))
        parts = f'<style>{_style()}</style><div id="pp-first"><nav>{nav}</nav>{markup.page(head)}{shown}</div>{removal}'
        document = document.replace("<body>", f"<body>{parts}", 1)
    return HTMLResponse(document, headers={"Cache-Control": "no-store"})


async def _painted(painting: Painting, request: Request) -> str:
    """The page's values as HTML; empty for a visitor who must log in, and where a value is not known."""
    try:
        settings = DashboardSettings.load()
        account = login.account_of(settings, request.cookies.get(login.cookie_name(), ""))
        # An open dashboard answers for names of this machine only: a foreign name may be a page that was led here.
        if account is None or (settings.api_keys_file is None and request.url.hostname not in LOOPBACK):
            return ""
        now_s = time.time()
        futures = painting.read(shared_api(settings), now_s)
    except (PolyphaseError, ValidationError):
        return ""  # Streamlit's page says what is wrong
    reads = [asyncio.wrap_future(future) for future in futures if future is not None]
    if not reads or len(reads) < len(futures):
        return ""
    await asyncio.wait(reads, timeout=WAIT_S)
    known = [read.result() if read.done() else None for read in reads]
    if known[0] is None or known[0].value is None:
        return ""
    return await asyncio.to_thread(painting.paint, known[0].value, known, now_s)


# Without it a page below the first looks for the server at its own path before it asks at the right one.
_BACKEND = "<script>window.__streamlit = {BACKEND_BASE_URL: location.origin}</script>"
_REMOVAL = """<script>
const first = document.getElementById("pp-first");
const timer = setInterval(() => {
  if (document.querySelector("DRAWN") || performance.now() > MOST_MS) {
    first.remove();
    clearInterval(timer);
  }
}, 50);
</script>"""


@cache
def _document(elements: tuple[str, ...]) -> str:
    """Streamlit's, which loads the code of these elements at once: Streamlit itself asks for it when it draws them."""
    static = Path(st.__file__).parent / "static"
    files = element_files(json.loads((static / "manifest.json").read_text("utf-8")), ("Html", *elements))
    links = "".join(f'<link rel="modulepreload" crossorigin href="./{file}">' for file in files)
    document = (static / "index.html").read_text("utf-8")
    return document.replace("<head>", f"<head>{_BACKEND}", 1).replace("</head>", f"{links}</head>", 1)


def element_files(manifest: Mapping[str, Any], elements: Sequence[str]) -> list[str]:
    """The JavaScript files of these elements and of what they import, by Streamlit's manifest."""
    ends = tuple(f"/{name}.tsx" for name in elements)
    entries = deque(name for name, entry in manifest.items() if name.endswith(ends) and entry.get("isDynamicEntry"))
    found: dict[str, None] = {}
    while entries:
        entry = manifest[entries.popleft()]
        if entry["file"] not in found:
            found[entry["file"]] = None
            entries.extend(entry.get("imports", ()))
    return list(found)


@cache
def _style() -> str:
    light, dark = (f"#pp-first{{background:{ground.page};color:{ground.text}}}" for ground in (LIGHT, DARK))
    own = (
        "#pp-first{position:fixed;inset:0;z-index:999999;overflow:auto;padding:.6rem 2.4rem;"
        "font:16px 'Source Sans',sans-serif;display:flex;flex-direction:column;gap:1rem}"
        "#pp-first nav{display:flex;gap:1.6rem;font-size:.875rem}#pp-first nav a{color:inherit;text-decoration:none}"
        "#pp-first *{box-sizing:border-box}"
    )
    return f"{markup.STYLE.read_text('utf-8')}{own}{light}@media (prefers-color-scheme:dark){{{dark}}}"
