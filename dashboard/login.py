"""The login: accounts from the gateway's keys file, tickets that keep a browser logged in, and the form.

Without a keys file there is no login, and the dashboard must listen on loopback.
"""

import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, cast

import streamlit as st

from dashboard import markup
from dashboard.dashboard_settings import DashboardSettings
from shared.errors import InvalidRequest, PolyphaseError, Unauthorized
from shared.runtime.keys import LOOPBACK, OPERATE, ApiKey, digest_of, load_keys

TICKET_HOURS = 12
TICKETS_KEPT = 1_000
_TICKET, _NEW_TICKET, _KEY, _ERROR = "ticket", "new_ticket", "login_key", "login_error"  # in Streamlit's session state


class NotAllowed(PolyphaseError):
    """The account is read-only."""

    code: ClassVar[str] = "not_allowed"
    http_status: ClassVar[int] = 403


@dataclass(frozen=True, slots=True)
class Account:
    """A user. secret: the user's API key, sent with chats; empty without a login."""

    name: str
    role: str
    secret: str = field(default="", repr=False)

    @property
    def may_operate(self) -> bool:
        return self.role == OPERATE

    def require_operate(self) -> None:
        """Raises NotAllowed."""
        if not self.may_operate:
            raise NotAllowed(f"the key {self.name!r} has the role {self.role!r}, which changes nothing")


LOCAL_USER = Account("dashboard", OPERATE)  # named in the audit where no login is required


class KeyFile:
    """The keys as the file has them now: a removed key stops working."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._read: tuple[tuple[int, int], dict[str, ApiKey]] | None = None

    def account(self, secret: str) -> Account:
        """Raises Unauthorized for an unknown key or one without a role, InvalidRequest for an unusable file."""
        key = self._keys().get(digest_of(secret))
        if key is None:
            raise Unauthorized("Unknown API key.")
        if not key.role:
            raise Unauthorized(f"The key {key.name!r} has no dashboard role; it is valid for the API only.")
        return Account(key.name, key.role, secret)

    def _keys(self) -> dict[str, ApiKey]:
        with self._lock:
            try:
                state = self._file.stat()
                version = (state.st_mtime_ns, state.st_ino)
            except OSError:
                version = (0, 0)  # load_keys reports the error
            if self._read is None or self._read[0] != version:
                self._read = version, {key.digest: key for key in load_keys(self._file)}
            return self._read[1]


class Tickets:
    """Tickets of logged-in browsers, in memory: they end with the process. Stored by digest, each with its key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[str, tuple[str, float]] = OrderedDict()  # digest -> key, expiry (monotonic)

    def issue(self, secret: str) -> str:
        ticket = secrets.token_urlsafe(32)
        with self._lock:
            self._held[digest_of(ticket)] = secret, time.monotonic() + TICKET_HOURS * 3600.0
            if len(self._held) > TICKETS_KEPT:
                self._held.popitem(last=False)
        return ticket

    def secret(self, ticket: str) -> str | None:
        """The key of a ticket; None for a ticket that is wrong, void or expired."""
        with self._lock:
            held = self._held.get(digest_of(ticket))
            return held[0] if held is not None and time.monotonic() < held[1] else None

    def void(self, ticket: str) -> None:
        with self._lock:
            self._held.pop(digest_of(ticket), None)


@st.cache_resource(show_spinner=False)
def key_file(file: Path) -> KeyFile:
    return KeyFile(file)


@st.cache_resource(show_spinner=False)
def tickets() -> Tickets:
    return Tickets()


def current_account(settings: DashboardSettings) -> Account | None:
    """The account of this session; None when it has to log in. Raises as `account_of`."""
    try:
        return account_of(settings, _ticket())
    except PolyphaseError as error:  # the key was removed from the file after the login
        if settings.api_keys_file is None:
            raise
        st.session_state[_ERROR] = error.message
        return None


def account_of(settings: DashboardSettings, ticket: str) -> Account | None:
    """The account of a browser with that ticket; None without a valid ticket. Raises Unauthorized for a key that is no
    longer in the file, InvalidRequest for an unusable file, or where an open dashboard could be reached from other
    machines.
    """
    if settings.api_keys_file is None:
        address = st.get_option("server.address")
        if address not in LOOPBACK:
            raise InvalidRequest(
                f"The dashboard listens on {address or 'all addresses'} and requires no login. "
                "Set POLYPHASE_DASHBOARD_API_KEYS_FILE (`polyphase keys add NAME --role operate` makes a key), "
                "or listen on 127.0.0.1."
            )
        return LOCAL_USER
    secret = tickets().secret(ticket) if ticket else None
    return key_file(settings.api_keys_file).account(secret) if secret else None


def login_form(settings: DashboardSettings) -> None:
    """The form in place of each page; after the login the requested page follows."""
    with st.container(key="login"):
        st.html(markup.page('<div class="pp-head"><b>Polyphase</b></div>'))
        with st.form("login-form", border=True):
            st.text_input("API key", type="password", key=_KEY, autocomplete="off")
            st.form_submit_button("Log in", type="primary", on_click=_log_in, args=(settings,), key="login_submit")
        error = st.session_state.pop(_ERROR, "")
        if error:
            st.error(error, icon=":material/lock:")
        st.caption(
            "The dashboard accepts keys with a role: `polyphase keys add NAME --role look` (read only) "
            "or `--role operate`."
        )


def store_new_ticket() -> None:
    """Store the ticket of a login or logout in the browser, in the run after it."""
    ticket = st.session_state.pop(_NEW_TICKET, None)
    if ticket is None:
        return
    attributes = f"max-age={TICKET_HOURS * 3600 if ticket else 0}; path=/; SameSite=Strict"
    secure = "(location.protocol === 'https:' ? '; Secure' : '')"
    script = f"document.cookie = '{cookie_name()}={ticket}; {attributes}' + {secure}"
    st.html(f"<script>{script}</script>", unsafe_allow_javascript=True)


def account_menu(account: Account) -> None:
    """The user's name and the logout button; nothing where no login is required."""
    if account is LOCAL_USER:
        return
    with st.popover(f"{account.name} ({account.role})", icon=":material/person:", type="tertiary", key="account"):
        st.caption("Changes are recorded under your name." if account.may_operate else "Read only.")
        if st.button("Log out", key="logout", on_click=_log_out):
            st.rerun()  # the whole page, not only the fragment that contains the button


def _log_in(settings: DashboardSettings) -> None:
    secret = str(st.session_state.pop(_KEY, "")).strip()
    assert settings.api_keys_file is not None
    try:
        key_file(settings.api_keys_file).account(secret)
    except PolyphaseError as error:
        st.session_state[_ERROR] = error.message
        return
    ticket = tickets().issue(secret)
    st.session_state[_TICKET] = st.session_state[_NEW_TICKET] = ticket


def _log_out() -> None:
    tickets().void(_ticket())
    st.session_state[_TICKET] = st.session_state[_NEW_TICKET] = ""


def _ticket() -> str:
    if _TICKET not in st.session_state:
        st.session_state[_TICKET] = str(st.context.cookies.get(cookie_name(), ""))
    return cast(str, st.session_state[_TICKET])


def cookie_name() -> str:
    """With the port, because cookies of one host are shared by all of its ports."""
    return f"polyphase_dashboard_{st.get_option('server.port')}"
