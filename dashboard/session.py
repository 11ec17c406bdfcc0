"""What one browser session remembers between runs of the page."""

from typing import cast

import streamlit as st

from dashboard.operations import Intent, Operation
from shared.timeline import RequestTimeline

KEPT_OPERATIONS = 5


class Session:
    """Streamlit's session state, by name and type."""

    @property
    def intent(self) -> Intent | None:
        """What waits for a yes or no."""
        return cast("Intent | None", st.session_state.get("intent"))

    @property
    def asking(self) -> bool:
        """Whether the question is on the screen."""
        return bool(st.session_state.get("asking"))

    @asking.setter
    def asking(self, value: bool) -> None:
        st.session_state["asking"] = value

    def want(self, intent: Intent) -> None:
        """Somebody wants this; the next full run of the page asks."""
        st.session_state["intent"] = intent
        self.asking = False

    def settle(self, intent: Intent) -> bool:
        """The question is answered. False when it was answered before: a second click must not act twice."""
        if self.intent is not intent:
            return False
        self.drop_intent()
        return True

    def drop_intent(self) -> None:
        """Nobody wants anything any more."""
        st.session_state.pop("intent", None)
        self.asking = False

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Confirmed actions, newest first."""
        return cast("tuple[Operation, ...]", st.session_state.get("operations", ()))

    def add(self, operation: Operation) -> None:
        """Remember a confirmed action; ended ones beyond the newest few are forgotten."""
        kept = [operation, *self.operations]
        st.session_state["operations"] = tuple(
            o for place, o in enumerate(kept) if place < KEPT_OPERATIONS or not o.future.done()
        )

    def dismiss(self, key: str) -> None:
        """The result was read."""
        st.session_state["operations"] = tuple(o for o in self.operations if o.key != key)

    @property
    def timeline(self) -> RequestTimeline | None:
        """The timeline on the screen; finished ones do not change."""
        return cast("RequestTimeline | None", st.session_state.get("timeline"))

    @timeline.setter
    def timeline(self, value: RequestTimeline) -> None:
        st.session_state["timeline"] = value
