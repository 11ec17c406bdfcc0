"""What a run of a page gets: settings, the services' APIs, the account, thread pools, and links to other pages."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import streamlit as st

from dashboard.api import Api
from dashboard.dashboard_settings import DashboardSettings
from dashboard.login import Account

# Parameters of page addresses.
INSTANCE_ID, REQUEST_ID, OPERATION_ID = "instance", "request", "operation"
T = TypeVar("T")


class Pool(StrEnum):
    """Thread pools, separate so that open chats and what-if questions delay no action."""

    ACTIONS = "action"
    CHATS = "chat"
    WHAT_IF = "what-if"


POOL_SIZES = {Pool.ACTIONS: 16, Pool.CHATS: 32, Pool.WHAT_IF: 4}  # over all sessions


@st.cache_resource(show_spinner=False)
def thread_pool(pool: Pool) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(POOL_SIZES[pool], thread_name_prefix=pool)


@st.cache_resource(
    show_spinner=False, hash_funcs={DashboardSettings: DashboardSettings.model_dump_json}, on_release=Api.close
)
def shared_api(settings: DashboardSettings) -> Api:
    """The APIs that all sessions with these settings share."""
    return Api(settings)


@dataclass(frozen=True, slots=True)
class Console:
    """pages: Streamlit's pages by path, "" for the first."""

    settings: DashboardSettings
    api: Api
    account: Account
    pages: Mapping[str, Any]

    def submit(self, pool: Pool, function: Callable[..., T], /, *arguments: Any) -> "Future[T]":
        return thread_pool(pool).submit(function, *arguments)

    def open(self, page: str, **address: str) -> None:
        """Switch to another page; ends this run."""
        st.switch_page(self.pages[page], query_params=address)

    def link(self, page: str, label: str, icon: str | None = None, **address: str) -> None:
        st.page_link(self.pages[page], label=label, icon=icon, query_params=address)

    def instance_links(self, instance_ids: Iterable[str], limit: int = 6) -> None:
        """Links to the first `limit` instances, and one to the others."""
        ids = list(instance_ids)
        for instance_id in ids[:limit]:
            self.link("instances", instance_id, icon=":material/chevron_right:", instance=instance_id)
        if len(ids) > limit:
            self.link("instances", f"and {len(ids) - limit} more")


def address_parameter(name: str) -> str:
    """A parameter of the page's address; empty without one."""
    return str(st.query_params.get(name, ""))
