"""The Try it page: a chat through the gateway's API with its own TTFT and waterfall. A thread reads each answer
while the page refreshes.
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

from dashboard import frame, look, units
from dashboard.console import Console
from dashboard.reads import Read
from dashboard.requests_page import draw

Message = dict[str, str]
MOST_SAID = 300  # characters of an error
STOPPED_S = 0.1  # at most so much later a stop takes effect


@dataclass(slots=True)
class Turn:
    """A question and its answer so far. Moments are unix seconds; `tag` is part of the request's id in the cluster."""

    question: str
    tag: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    asked_s: float = field(default_factory=time.time)
    first_s: float = 0.0
    last_s: float = 0.0
    error: str = ""
    pieces: list[str] = field(default_factory=list)
    tokens: int = 0
    stop: threading.Event = field(default_factory=threading.Event)  # set by who wants no more of it
    over: threading.Event = field(default_factory=threading.Event)  # set when nothing comes any more

    @property
    def ended(self) -> bool:
        """Whether nothing comes any more."""
        return self.over.is_set()

    @property
    def answer(self) -> str:
        """What has come of it."""
        return "".join(self.pieces)

    @property
    def ttft_s(self) -> float | None:
        """From here, so with the way to the API and back."""
        return self.first_s - self.asked_s if self.first_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between tokens after the first."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


def messages(turns: Sequence[Turn], turn: Turn) -> list[Message]:
    """The conversation up to this question."""
    said: list[Message] = []
    for one in turns:
        if one.answer and not one.error and one is not turn:
            said += [{"role": "user", "content": one.question}, {"role": "assistant", "content": one.answer}]
    return [*said, {"role": "user", "content": turn.question}]


def stream(
    client: httpx.AsyncClient, turn: Turn, conversation: Sequence[Message], body: dict[str, Any], secret: str
) -> None:
    """Ask, and gather what comes until the end, an error, or until it is stopped: before the first token, too."""
    headers = {"X-Request-Id": turn.tag, **({"Authorization": f"Bearer {secret}"} if secret else {})}
    sent = {"messages": list(conversation), "stream": True, "stream_options": {"include_usage": True}, **body}
    try:
        asyncio.run(_until_stopped(turn, _gather(client, turn, sent, headers)))
    except (httpx.HTTPError, ValueError) as error:  # ValueError: a key beyond ASCII, or what is no JSON
        turn.error = f"{type(error).__name__}: {error}"[:MOST_SAID]
    finally:
        turn.over.set()


async def _until_stopped(turn: Turn, gathering: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(gathering)
    try:
        while not (task.done() or turn.stop.is_set()):
            await asyncio.wait([task], timeout=STOPPED_S)
    finally:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _gather(client: httpx.AsyncClient, turn: Turn, sent: dict[str, Any], headers: dict[str, str]) -> None:
    async with client, client.stream("POST", "/v1/chat/completions", json=sent, headers=headers) as response:
        if not response.is_success:
            turn.error = refusal(response.status_code, (await response.aread()).decode("utf-8", "replace"))
            return
        async for event in events(response.aiter_lines()):
            take(turn, event)


async def events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """What a stream of server-sent events tells, up to its end."""
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield json.loads(data)


def take(turn: Turn, event: dict[str, Any]) -> None:
    """One piece of the answer, its count of tokens at the end, or an error in place of both."""
    if "error" in event:
        turn.error = str(event["error"].get("message", event["error"]))[:MOST_SAID]
        return
    usage = event.get("usage")
    if usage:
        turn.tokens = int(usage.get("completion_tokens", 0))
    for choice in event.get("choices", []):
        delta = choice.get("delta", {})
        piece = delta.get("content") or delta.get("reasoning_content") or ""
        if piece:
            turn.last_s = time.time()
            turn.first_s = turn.first_s or turn.last_s
            turn.pieces.append(piece)


def refusal(status: int, said: str) -> str:
    """Why the API answered nothing, in its own words where it has some."""
    try:
        told = json.loads(said)["error"]
        return f"HTTP {status}: {told.get('message', told) if isinstance(told, dict) else told}"[:MOST_SAID]
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}: {said[:MOST_SAID]}"


NOT_THERE = "No gateway is configured: POLYPHASE_DASHBOARD_GATEWAY_URL is empty."
TURNS = 20  # of a conversation
OPEN = 2  # answers of one session that come at once
STREAMING_S = 0.3  # between two looks at an answer that comes
FOUND_S = 20.0  # after its end, until when the request's record should be there
LEAST_TOKENS, MOST_TOKENS = 1, 4096


def try_it(console: Console) -> None:
    """One run of the page."""
    if not console.settings.gateway_url:
        frame.header(console, "Try it", [], every_s=frame.NEVER_S)
        st.html(look.empty(NOT_THERE))
        return
    st.fragment(_top, run_every=console.settings.refresh_s)(console)
    turns = _turns()
    most, key = _choices(console)
    for place, turn in enumerate(turns[:-1]):
        _said(turn, console, place)
    if turns:
        busy = not turns[-1].ended
        every_s = STREAMING_S if busy else console.settings.refresh_s if _sought(turns[-1]) else None
        st.fragment(_newest, run_every=every_s)(console, turns[-1], len(turns) - 1, busy)
    else:
        st.html(look.empty("The answer comes through the gateway, as to any client; its waterfall stands below it."))
    with st.container(horizontal=True):
        st.button("New conversation", key="talk-clear", disabled=not turns, on_click=_clear)
    busy = len(_open()) >= OPEN
    if busy:
        st.fragment(_until_free, run_every=STREAMING_S)()
    asked = st.chat_input("Ask the model", key="talk-input", disabled=busy or (bool(turns) and not turns[-1].ended))
    if asked:
        _begin(asked, most, key, console)
        st.rerun()


def _top(console: Console) -> None:
    health = console.api.gateway_health()
    frame.header(console, "Try it", [frame.of_gateway(console, frame.waited(health))])


def _choices(console: Console) -> tuple[int, str]:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        most = st.number_input("At most, tokens", LEAST_TOKENS, MOST_TOKENS, 64, key="talk-tokens", width=160)
        key = ""
        if not console.account.secret:
            key = st.text_input(
                "API key, if the gateway wants one", type="password", key="talk-key", width=320, autocomplete="off"
            )
    return int(most), key.strip() or console.account.secret


def _begin(question: str, most: int, secret: str, console: Console) -> None:
    turns = _turns()
    turn = Turn(question)
    conversation = messages(turns, turn)
    turns.append(turn)
    del turns[:-TURNS]
    _open().append(turn)
    client = console.api.hub.clients.streaming(console.settings.gateway_url)
    console.submit_chat(stream, client, turn, conversation, {"max_tokens": most}, secret)  # of the only model there is


def _clear() -> None:
    """The browser discards the rest of an answer that is still being received."""
    turns = _turns()
    for turn in turns:
        turn.stop.set()
    turns.clear()


def _until_free() -> None:
    if len(_open()) < OPEN:
        st.rerun()
    st.caption("Earlier answers are still coming to their end.")


def _newest(console: Console, turn: Turn, place: int, busy: bool) -> None:
    _said(turn, console, place)
    if busy and turn.ended:
        st.rerun()
    if busy:
        st.button("Stop", key="talk-stop", on_click=turn.stop.set, icon=":material/stop_circle:")
        return
    if turn.first_s or not turn.error:
        _record(console, turn, place)


def _said(turn: Turn, console: Console, place: int) -> None:
    with st.chat_message("user"):
        st.html(look.said(turn.question))
    with st.chat_message("assistant"):
        if turn.answer:
            st.html(look.said(turn.answer))
        if turn.error:
            st.error(turn.error, icon=":material/error:")
        elif not turn.answer:
            st.caption("(nothing)" if turn.ended else f"waiting for the first token, {_age(turn)}")
        pairs = [("TTFT here", units.duration(turn.ttft_s)), ("TPOT here", units.duration(turn.tpot_s))]
        pairs.append(("tokens", units.count(turn.tokens) if turn.ended else units.count(len(turn.pieces))))
        st.html(look.page(look.facts(pairs)))


def _record(console: Console, turn: Turn, place: int) -> None:
    """The request as the cluster recorded it."""
    job_id = _job_of(console, turn)
    timeline = console.api.timeline(job_id).result() if job_id else Read(None)
    if timeline.value is None:
        if _sought(turn):
            st.caption("The waterfall comes when the scheduler has heard of the end.")
        else:
            st.caption(f"The scheduler has no record of request {turn.tag}.")
        return
    st.session_state[f"talk-found-{turn.tag}"] = bool(timeline.value.ended_s)
    with st.container(border=True, key=f"talk-record-{place}"):
        draw(timeline.value, console.api.request(job_id).result(), console, f"talk-waterfall-{place}")
        console.link("requests", "This request", icon=":material/link:", request=job_id)


def _job_of(console: Console, turn: Turn) -> str:
    known = st.session_state.get(f"talk-job-{turn.tag}")
    if known:
        return str(known)
    rows = console.api.recent().result().value or []
    found = next((row.job_id for row in rows if turn.tag in row.job_id), "")
    if found:
        st.session_state[f"talk-job-{turn.tag}"] = found
    return found


def _sought(turn: Turn) -> bool:
    """Whether its record may still come."""
    if st.session_state.get(f"talk-found-{turn.tag}"):
        return False
    return time.time() < max(turn.last_s, turn.asked_s) + FOUND_S


def _age(turn: Turn) -> str:
    return units.duration(time.time() - turn.asked_s)


def _open() -> list[Turn]:
    """This session's answers that still come, of former conversations, too."""
    left: list[Turn] = [turn for turn in st.session_state.get("talk-open", []) if not turn.ended]
    st.session_state["talk-open"] = left
    return left


def _turns() -> list[Turn]:
    return cast("list[Turn]", st.session_state.setdefault("talk-turns", []))
