"""The form that asks for a key, and who has given one."""

from typing import cast

import streamlit as st

from dashboard import look, resources
from dashboard.accounts import ANYBODY, HOURS, Account
from dashboard.dashboard_settings import DashboardSettings
from shared.errors import InvalidRequest, PolyphaseError
from shared.runtime.keys import LOOPBACK

_TICKET = "ticket"


def who(settings: DashboardSettings) -> Account | None:
    """Who is there; None for somebody who has to log in first. Raises InvalidRequest where everybody could come in."""
    if settings.api_keys_file is None:
        address = st.get_option("server.address")
        if address not in LOOPBACK:
            raise InvalidRequest(
                f"The dashboard listens on {address or 'all addresses'} and asks nobody for a key. "
                "Set POLYPHASE_DASHBOARD_API_KEYS_FILE (`polyphase keys add NAME --role operate` makes a key), "
                "or listen on 127.0.0.1."
            )
        return ANYBODY
    ticket = _ticket()
    secret = resources.tickets().secret(ticket) if ticket else None
    if not secret:
        return None
    try:
        return resources.key_file(settings.api_keys_file).account(secret)
    except PolyphaseError as error:  # the key was taken out of the file meanwhile
        st.session_state["login_error"] = error.message
        return None


def form(settings: DashboardSettings) -> None:
    """Ask for a key; the page that was asked for comes after it."""
    with st.container(key="login"):
        st.html(look.page('<div class="pp-head"><b>Polyphase</b></div>'))
        with st.form("login-form", border=True):
            st.text_input("API key", type="password", key="login_key", autocomplete="off")
            st.form_submit_button("Log in", type="primary", on_click=_enter, args=(settings,), key="login_submit")
        error = st.session_state.pop("login_error", "")
        if error:
            st.error(error, icon=":material/lock:")
        st.caption("Keys with a role open the dashboard: `polyphase keys add NAME --role look` or `--role operate`.")


def keep() -> None:
    """Have the browser hold the ticket of a login that was just made."""
    ticket = st.session_state.pop("new_ticket", None)
    if ticket is not None:
        _cookie(ticket, HOURS * 3600)


def leave_button(account: Account) -> None:
    """The user's name and the logout button; nothing where the login is off."""
    if account is ANYBODY:
        return
    with st.popover(f"{account.name} ({account.role})", icon=":material/person:", type="tertiary", key="account"):
        may = "You may change things; the audit says that it was you." if account.may_operate else "You may look."
        st.caption(may)
        if st.button("Log out", key="logout", on_click=_leave):
            st.rerun()  # all of the page, not only the part in which this stands


def _enter(settings: DashboardSettings) -> None:
    given = str(st.session_state.pop("login_key", "")).strip()
    assert settings.api_keys_file is not None
    try:
        resources.key_file(settings.api_keys_file).account(given)
    except PolyphaseError as error:
        st.session_state["login_error"] = error.message
        return
    ticket = resources.tickets().issue(given)
    st.session_state[_TICKET] = st.session_state["new_ticket"] = ticket


def _leave() -> None:
    resources.tickets().void(_ticket())
    st.session_state[_TICKET] = ""
    st.session_state["new_ticket"] = ""


def _ticket() -> str:
    if _TICKET not in st.session_state:
        st.session_state[_TICKET] = str(st.context.cookies.get(_cookie_name(), ""))
    return cast(str, st.session_state[_TICKET])


def _cookie(ticket: str, seconds: int) -> None:
    """Cookies know no ports: the name says which dashboard it is of."""
    lasting = f"max-age={seconds if ticket else 0}; path=/; SameSite=Strict"
    written = (
        f"document.cookie = '{_cookie_name()}={ticket}; {lasting}' + (location.protocol === 'https:' ? '; Secure' : '')"
    )
    st.html(f"<script>{written}</script>", unsafe_allow_javascript=True)


def _cookie_name() -> str:
    return f"polyphase_dashboard_{st.get_option('server.port')}"
