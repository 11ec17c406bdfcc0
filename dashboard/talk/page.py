"""The page Try it: a chat through the gateway's API, with its own TTFT, and its waterfall as soon as it has ended."""

import time
from typing import cast

import streamlit as st

from dashboard import frame, look, units
from dashboard.console import Console
from dashboard.jobs.one import draw
from dashboard.reads import Read
from dashboard.talk.chat import Turn, messages, stream

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
    """Nobody sees the rest of an answer that still comes."""
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
