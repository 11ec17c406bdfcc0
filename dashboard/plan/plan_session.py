"""What one browser session remembers of the page Plan."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import streamlit as st

from dashboard.plan.records import PlanSearch, WhatIf
from dashboard.plan.wishes import Deed, Wish
from dashboard.session import Acting


@dataclass(frozen=True, slots=True)
class Supposed:
    """A what-if that was asked, and its answer when it comes. asked_s: unix seconds."""

    change: Mapping[str, Any]
    future: "Future[WhatIf]"
    asked_s: float


class PlanSession(Acting[Wish, Deed]):
    """Streamlit's session state of this page, by name and type."""

    def __init__(self, may_operate: bool = True) -> None:
        super().__init__("plan_")
        self.may_operate = may_operate

    def busy(self, target: str) -> bool:
        """Whether nothing can be done with a proposal or a search: something is under way, or one may only look."""
        return not self.may_operate or any(
            deed.wish.target == target and not deed.future.done() for deed in self.operations
        )

    @property
    def supposed(self) -> Supposed | None:
        """The last what-if."""
        return cast("Supposed | None", st.session_state.get("plan_supposed"))

    @supposed.setter
    def supposed(self, value: Supposed | None) -> None:
        st.session_state["plan_supposed"] = value

    @property
    def search(self) -> PlanSearch | None:
        """The search on the screen, with its file; ended ones do not change."""
        return cast("PlanSearch | None", st.session_state.get("plan_search"))

    @search.setter
    def search(self, value: PlanSearch) -> None:
        st.session_state["plan_search"] = value
