"""Everything that a user can change goes through an `Action`: a button requests it, a dialog asks for confirmation, a
thread makes the call, and a message shows its progress and result on every page that shows results.

A browser session has at most one action that waits for confirmation.
"""

import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, cast

import streamlit as st

from dashboard.api import Api
from dashboard.console import Console, Pool
from dashboard.units import duration
from shared.errors import OutcomeUnknown, PolyphaseError
from shared.wire.clients.http import unanswered

RESULTS_KEPT = 5  # ended actions beyond the newest are forgotten
_PENDING, _DIALOG, _STARTED = "pending_action", "action_dialog_open", "started_actions"  # in Streamlit's session state


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of an action's call. who: the actor that the audit names."""

    api: Api
    who: str
    operation_id: str
    force: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Something that a user can do.

    name: a noun phrase, such as "Flip of p0", the subject of its messages. success: the message for the call's result.
    target: the instance, proposal or search that it changes. force_warning: why the service would refuse it without
    force. operation: whether the monitor records it under its operation id. drains: whether it waits for the jobs of
    its target.
    """

    name: str
    question: str
    consequences: str
    call: Callable[[Call], Coroutine[Any, Any, Any]]
    success: Callable[[Any], str]
    target: str = ""
    force_warning: str = ""
    operation: bool = False
    drains: bool = False


class ResultState(StrEnum):
    """How an action stands. UNKNOWN: the call may have been carried out, but no answer came."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    REFUSED = "refused"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ActionResult:
    """The state of an action and the message for the user."""

    state: ResultState
    text: str


@dataclass(frozen=True, slots=True)
class StartedAction:
    """A confirmed action, running or ended. operation_id: under which the monitor knows it."""

    action: Action
    future: "Future[Any]"
    operation_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started_s: float = field(default_factory=time.time)

    def result(self, now_s: float, remaining: Mapping[str, int] | None = None) -> ActionResult:
        """remaining: jobs of each instance, for the progress of a drain."""
        name = self.action.name
        if not self.future.done():
            text = f"{name} has been running for {duration(max(0.0, now_s - self.started_s))}."
            jobs = (remaining or {}).get(self.action.target)
            if self.action.drains and jobs is not None:
                text += f" {count_jobs(jobs).capitalize()} left to drain."
            return ActionResult(ResultState.RUNNING, text)
        error = self.future.exception()
        if error is None:
            return ActionResult(ResultState.SUCCEEDED, self.action.success(self.future.result()))
        if not isinstance(error, PolyphaseError):
            return ActionResult(ResultState.FAILED, f"{name} failed: {type(error).__name__}: {error}")
        if isinstance(error, OutcomeUnknown) or unanswered(error):
            text = f"The outcome of this action is unknown: {name}. {error.message}"
            if self.action.operation:
                text += f". Look it up on the Events page or with: polyphase operation {self.operation_id}"
            return ActionResult(ResultState.UNKNOWN, text)
        if 400 <= error.http_status < 500:
            return ActionResult(ResultState.REFUSED, f"{name} was refused: {error.message}")
        return ActionResult(ResultState.FAILED, f"{name} failed: {error.message}")


def request_action(action: Action) -> None:
    """Have the next full run of the page ask for confirmation."""
    st.session_state[_PENDING] = action
    st.session_state[_DIALOG] = False


def is_busy(target: str) -> bool:
    """Whether an action on that target is running."""
    return any(each.action.target == target and not each.future.done() for each in _started())


def confirm_pending(console: Console) -> None:
    """Open the dialog of the pending action. Called in full runs; refreshing fragments leave the dialog alone."""
    action = _pending()
    if action is not None:
        st.session_state[_DIALOG] = True
        st.dialog(action.question, on_dismiss=_drop_pending)(_dialog)(console, action)


def show_results(console: Console, now_s: float, remaining: Mapping[str, int] | None = None) -> None:
    """Messages of the started actions, with jobs `remaining` by instance; called in the fragments with buttons."""
    if _pending() is not None and not st.session_state.get(_DIALOG):
        st.rerun()  # a full run opens the dialog outside of this fragment
    for started in _started():
        result, key = started.result(now_s, remaining), started.operation_id
        with st.container(horizontal=True, vertical_alignment="center", key=f"result-{key}"):
            _message(result)
            if started.action.operation:
                console.link("events", f"operation {key[:8]}", operation=key)
            if result.state is not ResultState.RUNNING:
                st.button("Dismiss", key=f"dismiss-{key}", type="tertiary", on_click=_dismiss, args=(key,))


def count_jobs(count: int) -> str:
    return f"{count or 'no'} job{'' if count == 1 else 's'}"


def _dialog(console: Console, action: Action) -> None:
    st.write(action.consequences)
    force = False
    if action.force_warning:
        st.warning(action.force_warning, icon=":material/warning:")
        force = st.checkbox("Override the refusal (force)", key="force")
    with st.container(horizontal=True, horizontal_alignment="right"):
        closed = st.button("Cancel", key="cancel", on_click=_drop_pending)
        arguments = (console, action, force)
        closed |= st.button("Confirm", key="confirm", type="primary", on_click=_start, args=arguments)
    if closed:
        st.rerun()


def _start(console: Console, action: Action, force: bool) -> None:
    if _pending() is not action:  # a second click on Confirm
        return
    _drop_pending()
    operation_id = uuid.uuid4().hex
    call = partial(action.call, Call(console.api, console.account.name, operation_id, force))
    future: Future[Any] = console.submit(Pool.ACTIONS, console.api.change, console.account, call)
    kept = [StartedAction(action, future, operation_id), *_started()]
    _keep(tuple(each for place, each in enumerate(kept) if place < RESULTS_KEPT or not each.future.done()))


def _message(result: ActionResult) -> None:
    match result.state:
        case ResultState.RUNNING:
            st.info(result.text, icon=":material/hourglass_top:")
        case ResultState.SUCCEEDED:
            st.success(result.text, icon=":material/check_circle:")
        case ResultState.REFUSED:
            st.warning(result.text, icon=":material/block:")
        case ResultState.UNKNOWN:
            st.warning(result.text, icon=":material/help:")
        case ResultState.FAILED:
            st.error(result.text, icon=":material/error:")


def _pending() -> Action | None:
    return cast("Action | None", st.session_state.get(_PENDING))


def _drop_pending() -> None:
    st.session_state.pop(_PENDING, None)
    st.session_state[_DIALOG] = False


def _started() -> tuple[StartedAction, ...]:
    """Newest first."""
    return cast("tuple[StartedAction, ...]", st.session_state.get(_STARTED, ()))


def _keep(started: tuple[StartedAction, ...]) -> None:
    st.session_state[_STARTED] = started


def _dismiss(operation_id: str) -> None:
    _keep(tuple(each for each in _started() if each.operation_id != operation_id))
