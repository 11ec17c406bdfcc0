"""What one browser session remembers between runs of the page."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar, cast

import streamlit as st

from dashboard.operations import Intent, Operation, Outcome

KEPT_OPERATIONS = 5


class Started(Protocol):
    """Something that was confirmed, under way or ended."""

    @property
    def key(self) -> str:
        """Tells it from the others."""

    @property
    def future(self) -> "Future[Any]":
        """Done when it has ended."""

    @property
    def reference(self) -> str:
        """The id under which it can be asked for later; empty without one."""

    def outcome(self, now_s: float) -> Outcome:
        """What to tell of it at `now_s` (unix seconds)."""

    def progress(self, left: Mapping[str, int]) -> str:
        """What is still to do while it runs, by the jobs that instances have left; empty where nothing is known."""


W = TypeVar("W")
S = TypeVar("S", bound=Started)


class Acting(Generic[W, S]):
    """What one page's user wants, and what was begun for it. `name` keeps two pages' memories apart."""

    def __init__(self, name: str = "") -> None:
        self._name = name

    @property
    def intent(self) -> W | None:
        """What waits for a yes or no."""
        return cast("W | None", st.session_state.get(f"{self._name}intent"))

    @property
    def asking(self) -> bool:
        """Whether the question is on the screen."""
        return bool(st.session_state.get(f"{self._name}asking"))

    @asking.setter
    def asking(self, value: bool) -> None:
        st.session_state[f"{self._name}asking"] = value

    def want(self, intent: W) -> None:
        """Somebody wants this; the next full run of the page asks."""
        st.session_state[f"{self._name}intent"] = intent
        self.asking = False

    def settle(self, intent: W) -> bool:
        """The question is answered. False when it was answered before: a second click must not act twice."""
        if self.intent is not intent:
            return False
        self.drop_intent()
        return True

    def drop_intent(self) -> None:
        """Nobody wants anything any more."""
        st.session_state.pop(f"{self._name}intent", None)
        self.asking = False

    @property
    def operations(self) -> tuple[S, ...]:
        """Confirmed actions, newest first."""
        return cast("tuple[S, ...]", st.session_state.get(f"{self._name}operations", ()))

    def add(self, operation: S) -> None:
        """Remember a confirmed action; ended ones beyond the newest few are forgotten."""
        kept = [operation, *self.operations]
        self._keep(tuple(o for place, o in enumerate(kept) if place < KEPT_OPERATIONS or not o.future.done()))

    def dismiss(self, key: str) -> None:
        """The result was read."""
        self._keep(tuple(o for o in self.operations if o.key != key))

    def _keep(self, operations: tuple[S, ...]) -> None:
        st.session_state[f"{self._name}operations"] = operations


class Session(Acting[Intent, Operation]):
    """Of the pages that act on instances."""
