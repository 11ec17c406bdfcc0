"""The Try it page: a chat through the gateway's API, with the TTFT and the waterfall of each answer.

A thread receives each answer while the page refreshes.
"""

import asyncio
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import streamlit as st

from dashboard import layout, markup, units
from dashboard.answers import GATEWAY_HEALTH, RECENT_REQUESTS, REQUEST, TIMELINE
from dashboard.console import Console, Pool
from dashboard.requests_page import show_request

Message = dict[str, str]
ERROR_CHARACTERS = 300
STOP_S = 0.1  # the delay of a stop, at most
NOT_CONFIGURED = "No gateway is configured: POLYPHASE_DASHBOARD_GATEWAY_URL is empty."
TURNS_KEPT = 20  # of a conversation
OPEN_ANSWERS = 2  # of one session at the same time
STREAMING_S = 0.3  # refresh period while an answer is received
RECORD_S = 20.0  # after the end of an answer, the time until its request must be recorded
REQUESTS_SEARCHED = 500  # the newest, for the id of a chat's request
MIN_TOKENS, MAX_TOKENS, DEFAULT_TOKENS = 1, 4096, 64


@dataclass(slots=True)
class Turn:
    """A question and its answer so far. Times are unix seconds. tag: part of the request's id in the cluster. stop: set
    by the page; over: set when nothing more is received.
    """

    question: str
    tag: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    sent_s: float = field(default_factory=time.time)
    first_s: float = 0.0
    last_s: float = 0.0
    error: str = ""
    pieces: list[str] = field(default_factory=list)
    tokens: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def ended(self) -> bool:
        return self.over.is_set()

    @property
    def answer(self) -> str:
        return "".join(self.pieces)

    @property
    def ttft_s(self) -> float | None:
        """As the dashboard measures it, with the way to the API and back."""
        return self.first_s - self.sent_s if self.first_s else None

    @property
    def tpot_s(self) -> float | None:
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None

    def receive(self, event: dict[str, Any]) -> None:
        """Add an event of the stream: a piece of the answer, the final token count, or an error."""
        if "error" in event:
            self.error = str(event["error"].get("message", event["error"]))[:ERROR_CHARACTERS]
            return
        usage = event.get("usage")
        if usage:
            self.tokens = int(usage.get("completion_tokens", 0))
        for choice in event.get("choices", []):
            delta = choice.get("delta", {})
            piece = delta.get("content") or delta.get("reasoning_content") or ""
            if piece:
                self.last_s = time.time()
                self.first_s = self.first_s or self.last_s
                self.pieces.append(piece)


def chat(console: Console) -> None:
    if not console.settings.gateway_url:
        layout.unavailable(console, "Try it", NOT_CONFIGURED)
        return
    st.fragment(_header, run_every=console.settings.refresh_s)(console)
    turns = _turns()
    max_tokens, secret = _options(console)
    for turn in turns[:-1]:
        _show_turn(turn)
    if turns:
        busy = not turns[-1].ended
        every_s = STREAMING_S if busy else console.settings.refresh_s if _record_expected(turns[-1]) else None
        st.fragment(_newest, run_every=every_s)(console, turns[-1], len(turns) - 1, busy)
    else:
        st.html(markup.empty("Answers come through the gateway, as for any client, each with its waterfall."))
    with st.container(horizontal=True):
        st.button("New conversation", key="talk-clear", disabled=not turns, on_click=_clear)
    too_many = len(_open_answers()) >= OPEN_ANSWERS
    if too_many:
        st.fragment(_wait_for_free, run_every=STREAMING_S)()
    disabled = too_many or (bool(turns) and not turns[-1].ended)
    question = _question(disabled=disabled)
    if question:
        _send(question, max_tokens, secret, console)
        st.rerun()


def _header(console: Console) -> None:
    layout.header(console, "Try it", [layout.optional_result(console.api.read_optional(GATEWAY_HEALTH))])


def _options(console: Console) -> tuple[int, str]:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        max_tokens = st.number_input(
            "Max. tokens", MIN_TOKENS, MAX_TOKENS, DEFAULT_TOKENS, key="talk-tokens", width=160
        )
        secret = ""
        if not console.account.secret:
            label = "API key, if the gateway requires one"
            secret = st.text_input(label, type="password", key="talk-key", width=320, autocomplete="off")
    return int(max_tokens), secret.strip() or console.account.secret


def _question(*, disabled: bool) -> str:
    """The question that was just sent; empty without one.

    A form, because Streamlit's own chat input has the browser load a highlighter of source code first (1.6 MB).
    """
    form = st.form("talk-form", clear_on_submit=True, border=False)
    with form, st.container(horizontal=True, vertical_alignment="bottom"):
        question = st.text_input("Ask the model", key="talk-input", disabled=disabled, autocomplete="off")
        sent = st.form_submit_button("Send", key="talk-send", type="primary", disabled=disabled)
    return question.strip() if sent else ""


def _send(question: str, max_tokens: int, secret: str, console: Console) -> None:
    turns, turn = _turns(), Turn(question)
    conversation = messages(turns, turn)
    turns.append(turn)
    del turns[:-TURNS_KEPT]
    _open_answers().append(turn)
    body = {"max_tokens": max_tokens}  # no model: the gateway has one
    console.submit(Pool.CHATS, stream, console.api.streaming_client(), turn, conversation, body, secret)


def _clear() -> None:
    turns = _turns()
    for turn in turns:
        turn.stop.set()
    turns.clear()


def _wait_for_free() -> None:
    if len(_open_answers()) < OPEN_ANSWERS:
        st.rerun()
    st.caption("Earlier answers are still being received.")


def _newest(console: Console, turn: Turn, place: int, busy: bool) -> None:
    _show_turn(turn)
    if busy and turn.ended:
        st.rerun()
    if busy:
        st.button("Stop", key="talk-stop", on_click=turn.stop.set, icon=":material/stop_circle:")
    elif turn.first_s or not turn.error:
        _show_record(console, turn, place)


def _show_turn(turn: Turn) -> None:
    with st.chat_message("user"):
        st.html(markup.verbatim(turn.question))
    with st.chat_message("assistant"):
        if turn.answer:
            st.html(markup.verbatim(turn.answer))
        if turn.error:
            st.error(turn.error, icon=":material/error:")
        elif not turn.answer:
            waiting = f"waiting for the first token for {units.duration(time.time() - turn.sent_s)}"
            st.caption("(empty answer)" if turn.ended else waiting)
        tokens = turn.tokens if turn.ended else len(turn.pieces)
        pairs = [("TTFT", units.duration(turn.ttft_s)), ("TPOT", units.duration(turn.tpot_s))]
        st.html(markup.page(markup.facts([*pairs, ("tokens", units.count(tokens))])))


def _show_record(console: Console, turn: Turn, place: int) -> None:
    """The request as the cluster recorded it."""
    job_id = _job_id(console, turn)
    timeline = console.api.read(TIMELINE, job_id).result().value if job_id else None
    if timeline is None:
        waiting = "The waterfall appears when the scheduler has received the end of the request."
        st.caption(waiting if _record_expected(turn) else f"The scheduler has no record of request {turn.tag}.")
        return
    st.session_state[f"talk-found-{turn.tag}"] = bool(timeline.ended_s)
    with st.container(border=True, key=f"talk-record-{place}"):
        show_request(timeline, console.api.read(REQUEST, job_id).result().value, console)
        console.link("requests", "Open this request", icon=":material/link:", request=job_id)


def _job_id(console: Console, turn: Turn) -> str:
    """The request's id in the cluster; empty while the scheduler does not know it."""
    key = f"talk-job-{turn.tag}"
    if key not in st.session_state:
        rows = console.api.read(RECENT_REQUESTS, limit=REQUESTS_SEARCHED).result().value or []
        found = next((row.job_id for row in rows if turn.tag in row.job_id), "")
        if not found:
            return ""
        st.session_state[key] = found
    return str(st.session_state[key])


def _record_expected(turn: Turn) -> bool:
    """Whether the scheduler's record of the request is incomplete and may still come."""
    if st.session_state.get(f"talk-found-{turn.tag}"):
        return False
    return time.time() < max(turn.last_s, turn.sent_s) + RECORD_S


def _open_answers() -> list[Turn]:
    """This session's answers that are being received, those of earlier conversations included."""
    left: list[Turn] = [turn for turn in st.session_state.get("talk-open", []) if not turn.ended]
    st.session_state["talk-open"] = left
    return left


def _turns() -> list[Turn]:
    return cast("list[Turn]", st.session_state.setdefault("talk-turns", []))


def messages(turns: Sequence[Turn], turn: Turn) -> list[Message]:
    """The conversation up to the question of `turn`, without failed turns."""
    earlier: list[Message] = []
    for each in turns:
        if each.answer and not each.error and each is not turn:
            earlier += [{"role": "user", "content": each.question}, {"role": "assistant", "content": each.answer}]
    return [*earlier, {"role": "user", "content": turn.question}]


def stream(
    client: httpx.AsyncClient, turn: Turn, conversation: Sequence[Message], body: dict[str, Any], secret: str
) -> None:
    """Send the conversation, and receive the answer until its end, an error or a stop. Runs in a thread."""
    headers = {"X-Request-Id": turn.tag, **({"Authorization": f"Bearer {secret}"} if secret else {})}
    sent = {"messages": list(conversation), "stream": True, "stream_options": {"include_usage": True}, **body}
    try:
        asyncio.run(_until_stopped(turn, _receive(client, turn, sent, headers)))
    except (httpx.HTTPError, ValueError) as error:  # ValueError: a key beyond ASCII, or invalid JSON
        turn.error = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]
    finally:
        turn.over.set()


async def _until_stopped(turn: Turn, receiving: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(receiving)
    try:
        while not (task.done() or turn.stop.is_set()):
            await asyncio.wait([task], timeout=STOP_S)
    finally:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _receive(client: httpx.AsyncClient, turn: Turn, sent: dict[str, Any], headers: dict[str, str]) -> None:
    async with client, client.stream("POST", "/v1/chat/completions", json=sent, headers=headers) as response:
        if not response.is_success:
            turn.error = http_error(response.status_code, (await response.aread()).decode("utf-8", "replace"))
            return
        async for event in server_sent_events(response.aiter_lines()):
            turn.receive(event)


async def server_sent_events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a stream up to `[DONE]`."""
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield json.loads(data)


def http_error(status: int, body: str) -> str:
    """The API's error message; for other bodies, their beginning."""
    try:
        error = json.loads(body)["error"]
        body = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        pass
    return f"HTTP {status}: {body[:ERROR_CHARACTERS]}"
