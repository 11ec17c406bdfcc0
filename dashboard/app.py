"""The console: `streamlit run dashboard/app.py`. Every page refreshes itself, but for an open question."""

from collections.abc import Callable
from functools import partial
from typing import Any

import streamlit as st
from pydantic import ValidationError

from dashboard import login_gate, look, resources
from dashboard.accounts import Account
from dashboard.chat_page import try_it
from dashboard.console import Console
from dashboard.dashboard_settings import DashboardSettings
from dashboard.events_page import events
from dashboard.instances_page import instances
from dashboard.overview_page import overview
from dashboard.plan.page import plan
from dashboard.policies_page import policies
from dashboard.predictor_page import predictor
from dashboard.requests_page import requests
from shared.errors import InvalidRequest

PAGES: dict[str, tuple[Callable[[Console], None], str, str]] = {
    "": (overview, "Overview", ":material/monitor_heart:"),
    "instances": (instances, "Instances", ":material/dns:"),
    "requests": (requests, "Requests", ":material/search:"),
    "events": (events, "Events", ":material/history:"),
    "policies": (policies, "Policies", ":material/tune:"),
    "predictor": (predictor, "Predictor", ":material/straighten:"),
    "plan": (plan, "Plan", ":material/route:"),
    "try": (try_it, "Try it", ":material/chat:"),
}


def main() -> None:
    """One run of the script: a new session, another page, or an answered question."""
    st.set_page_config(page_title="Polyphase", page_icon=":material/lan:", layout="wide")
    st.html(look.STYLE)
    try:
        settings = DashboardSettings.load()
        account = login_gate.who(settings)
    except (InvalidRequest, ValidationError) as error:
        st.error(f"**The dashboard's settings cannot work.**\n\n```text\n{error}\n```")
        return
    login_gate.keep()
    if account is None:
        st.navigation(list(_pages(lambda _: login_gate.form(settings)).values()), position="hidden").run()
        return
    _open(settings, account)


def _open(settings: DashboardSettings, account: Account) -> None:
    pages: dict[str, Any] = {}
    console = Console(settings, resources.api(settings), account, pages)
    pages |= _pages(lambda page: page(console))
    st.navigation(list(pages.values()), position="top").run()


def _pages(run: Callable[[Callable[[Console], None]], None]) -> dict[str, Any]:
    """All of them, by their paths."""
    return {
        path: st.Page(partial(run, page), title=title, icon=icon, url_path=path or None, default=not path)
        for path, (page, title, icon) in PAGES.items()
    }


if __name__ == "__main__":
    main()
