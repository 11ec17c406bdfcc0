"""Actions on instances: the confirmation text, the running operation, its outcome, and what a browser session
remembers of them. Other pages reuse the session classes.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar, cast

import streamlit as st

from dashboard.records import AuditEntry, InstanceRow
from dashboard.units import duration
from shared.domain.instance import InstanceState, Role
from shared.errors import OutcomeUnknown, PolyphaseError
from shared.wire.clients.http import unanswered


class Action(StrEnum):
    """What can be done to an instance."""

    DRAIN = "drain"
    RESUME = "resume"
    FLIP = "flip"


@dataclass(frozen=True, slots=True)
class Intent:
    """An action that somebody wants, with what the page knew of the instance when it was asked for."""

    action: Action
    instance_id: str
    role: Role
    inflight: int
    last_ready: bool  # no other instance of its role would be ready
    force: bool = False

    def forced(self) -> "Intent":
        """The same, overriding the monitor's refusal to take the last ready instance of a role."""
        return replace(self, force=True)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an operation stands: `state` is "running", "succeeded", "refused", "failed" or "unknown"."""

    state: str
    text: str


def fate(error: BaseException | None) -> tuple[str, str]:
    """What became of a change that a service was asked for: a state as `Outcome` has it, and what was said of it."""
    if error is None:
        return "succeeded", ""
    if not isinstance(error, PolyphaseError):
        return "failed", f"{type(error).__name__}: {error}"
    if unanswered(error):
        return "unknown", error.message
    return "refused" if 400 <= error.http_status < 500 else "failed", error.message


@dataclass(frozen=True, slots=True)
class Operation:
    """A confirmed action, under way or ended."""

    intent: Intent
    future: "Future[AuditEntry]"
    started_s: float = field(default_factory=time.time)
    key: str = field(default_factory=lambda: uuid.uuid4().hex)  # the id under which it can be asked for

    @property
    def reference(self) -> str:
        """The id under which it can be asked for later."""
        return self.key

    def progress(self, left: Mapping[str, int]) -> str:
        """What is still to do, by the jobs that instances have left."""
        jobs = left.get(self.intent.instance_id)
        if jobs is None or self.future.done() or self.intent.action is Action.RESUME:
            return ""
        return f" {_jobs(jobs).capitalize()} left to drain." if jobs else " No jobs left to drain."

    def outcome(self, now_s: float) -> Outcome:
        """What to tell of it at `now_s` (unix seconds)."""
        action, target = self.intent.action, self.intent.instance_id
        if not self.future.done():
            taken = duration(max(0.0, now_s - self.started_s))
            return Outcome("running", f"{_DOING[action]} {target}: {taken} so far.")
        error = self.future.exception()
        if error is None:
            return Outcome("succeeded", _told(self.future.result()))
        said = error.message if isinstance(error, PolyphaseError) else f"{type(error).__name__}: {error}"
        if isinstance(error, OutcomeUnknown):
            return Outcome("unknown", f"{said}. Ask by its id, here or with: polyphase operation {error.operation_id}")
        if isinstance(error, PolyphaseError) and error.http_status == 409:
            return Outcome("refused", f"{action.capitalize()} of {target} was refused: {said}")
        return Outcome("failed", f"{action.capitalize()} of {target} failed: {said}")


def intend(action: Action, row: InstanceRow, rows: Sequence[InstanceRow]) -> Intent:
    """The wish to act on `row`, one of `rows`."""
    ready = [r.instance_id for r in rows if r.role is row.role and r.state is InstanceState.READY]
    last = ready == [row.instance_id]
    return Intent(action, row.instance_id, row.role, row.load.inflight, last)


def question(intent: Intent) -> str:
    """The one question to say yes or no to."""
    match intent.action:
        case Action.FLIP:
            return f"Flip {intent.instance_id} from {intent.role.value} to {intent.role.other.value}?"
        case Action.DRAIN:
            return f"Drain {intent.instance_id}?"
        case Action.RESUME:
            return f"Resume {intent.instance_id}?"


def consequences(intent: Intent, drain_timeout_s: float) -> str:
    """What will happen after a yes."""
    role, jobs = intent.role.value, _jobs(intent.inflight)
    limit = f"at most {duration(drain_timeout_s)}"
    match intent.action:
        case Action.FLIP:
            first = f"It first drains {jobs} ({limit})" if intent.inflight else "It has no jobs to drain"
            return f"{first}, then changes its role and takes {intent.role.other.value} work."
        case Action.DRAIN:
            work = f"finishes {jobs} (this waits {limit})" if intent.inflight else "has no jobs to finish"
            return f"It takes no new {role} work and {work}. It stays drained until it is resumed."
        case Action.RESUME:
            return f"It takes new {role} work again."


def _told(entry: AuditEntry) -> str:
    drain = f"Drain {duration(entry.drain_s)}" if entry.drain_s is not None else "No drain"
    if entry.kind == Action.FLIP:
        flip = f"flip {duration(entry.flip_s)}" if entry.flip_s is not None else "flip time not reported"
        return f"{entry.instance_id} is now {entry.to_role} (was {entry.from_role}). {drain}, {flip}."
    if entry.kind == Action.DRAIN:
        return f"{entry.instance_id} is drained and takes no new work. {drain}."
    return f"{entry.instance_id} takes {entry.to_role} work again."


def _jobs(count: int) -> str:
    return f"{count} job" if count == 1 else f"{count} jobs"


_DOING = {Action.DRAIN: "Draining", Action.RESUME: "Resuming", Action.FLIP: "Flipping"}


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
        """Clear the pending action."""
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
