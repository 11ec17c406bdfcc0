"""The script that Streamlit runs for a new session, another page, or a dialog."""

from collections.abc import Callable
from functools import partial
from typing import Any

import streamlit as st
from pydantic import ValidationError

from dashboard import login, markup
from dashboard.chat_page import chat
from dashboard.console import Console, shared_api
from dashboard.dashboard_settings import DashboardSettings
from dashboard.events_page import events
from dashboard.instances_page import instances
from dashboard.overview_page import overview
from dashboard.plan_page import plan
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
    "try": (chat, "Try it", ":material/chat:"),
}


def main() -> None:
    """One run of the script: for a new session, another page, or a dialog."""
    st.set_page_config(page_title="Polyphase", page_icon=":material/lan:", layout="wide")
    st.html(markup.STYLE)
    try:
        settings = DashboardSettings.load()
        account = login.current_account(settings)
    except (InvalidRequest, ValidationError) as error:
        st.error(f"**Invalid settings of the dashboard.**\n\n```text\n{error}\n```")
        return
    login.store_new_ticket()
    if account is None:
        st.navigation(list(_pages(lambda _: login.login_form(settings)).values()), position="hidden").run()
        return
    pages: dict[str, Any] = {}
    console = Console(settings, shared_api(settings), account, pages)
    pages |= _pages(lambda page: page(console))
    st.navigation(list(pages.values()), position="top").run()


def _pages(run: Callable[[Callable[[Console], None]], None]) -> dict[str, Any]:
    """Streamlit's pages by path."""
    return {
        path: st.Page(partial(run, page), title=title, icon=icon, url_path=path or None, default=not path)
        for path, (page, title, icon) in PAGES.items()
    }


if __name__ == "__main__":
    main()
