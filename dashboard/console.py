"""What every page gets: the settings, the services, who is there, and the ways to the other pages."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import streamlit as st

from dashboard import resources
from dashboard.accounts import Account
from dashboard.dashboard_settings import DashboardSettings
from dashboard.data import Api

INSTANCE, REQUEST, OPERATION = "instance", "request", "operation"  # in addresses


class Submit(Protocol):
    """Begins something in a thread of its own."""

    def __call__(self, do: Any, /, *arguments: Any) -> "Future[Any]":
        """The future of `do(*arguments)`."""


@dataclass(frozen=True, slots=True)
class Console:
    """One run's. pages: by their path, "" for the first."""

    settings: DashboardSettings
    api: Api
    account: Account
    pages: Mapping[str, Any]

    @property
    def submit(self) -> Submit:
        """For actions."""
        return resources.operations().submit

    @property
    def submit_chat(self) -> Submit:
        """For answers that come."""
        return resources.chats().submit

    @property
    def submit_question(self) -> Submit:
        """For what takes a while and changes nothing."""
        return resources.questions().submit

    def open(self, page: str, **address: str) -> None:
        """Go to another page now."""
        st.switch_page(self.pages[page], query_params=address)

    def link(self, page: str, label: str, icon: str | None = None, **address: str) -> None:
        """A link to another page, that can be opened in a new tab or sent."""
        st.page_link(self.pages[page], label=label, icon=icon, query_params=address)

    def instance_links(self, instance_ids: Iterable[str], most: int = 6) -> None:
        """A link to each instance's page, to a few."""
        ids = list(instance_ids)
        for instance_id in ids[:most]:
            self.link("instances", instance_id, icon=":material/chevron_right:", instance=instance_id)
        if len(ids) > most:
            self.link("instances", f"and {len(ids) - most} more")


def addressed(name: str) -> str:
    """What the address says of that name; empty for nothing."""
    return str(st.query_params.get(name, ""))
