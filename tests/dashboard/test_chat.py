"""The page Try it."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from streamlit.testing.v1 import AppTest

from dashboard.chat_page import Turn, http_error, messages, server_sent_events, stream
from dashboard.console import POOL_SIZES, Pool, thread_pool
from tests.dashboard.pages import LONG_S, button, html, links, opened, shows
from tests.dashboard.sample_data import report


def ask(page: AppTest, text: str) -> Turn:
    """Send a question."""
    page.text_input(key="talk-input").set_value(text)
    button(page, "talk-send").click().run()
    turn: Turn = page.session_state["talk-turns"][-1]
    return turn


def ended(page: AppTest) -> AppTest:
    assert page.session_state["talk-turns"][-1].over.wait(LONG_S)
    return page.run()


def test_an_answer_with_its_ttft_and_waterfall(page: AppTest, cluster: Any) -> None:
    talk = opened(page, "try").run()
    assert not talk.exception
    cluster.chat_go.clear()
    turn = ask(talk, "What is <b>polyphase</b>?")
    assert not talk.exception
    assert button(talk, "talk-stop")
    cluster.jobs.insert(0, report(f"chatcmpl-{turn.tag}-0"))
    cluster.chat_go.set()
    ended(talk)
    assert shows(talk, "Prefill and decode part ways.", "What is &lt;b&gt;polyphase&lt;/b&gt;?", "TTFT")
    assert html(talk).count('class="pp-waterfall"') == 1
    assert ("Open this request", f"requests?request=chatcmpl-{turn.tag}-0") in links(talk)
    body, headers = cluster.chats[0]
    assert (body["max_tokens"], headers["x-request-id"]) == (64, turn.tag)
    ask(talk, "And then?")
    ended(talk)
    assert [one["role"] for one in cluster.chats[1][0]["messages"]] == ["user", "assistant", "user"]
    button(talk, "talk-clear").click().run()
    assert talk.session_state["talk-turns"] == []


def test_a_refusal_has_the_apis_message(page: AppTest, cluster: Any) -> None:
    cluster.chat_key = "pp-the-key"
    talk = opened(page, "try").run()
    ask(talk, "Hello")
    ended(talk)
    assert talk.error[0].value == "HTTP 401: this server needs an API key"
    talk.text_input(key="talk-key").set_value("pp-the-key").run()
    ask(talk, "Hello")
    ended(talk)
    assert cluster.chats[0][1]["authorization"] == "Bearer pp-the-key"
    assert "pp-the-key" not in html(talk)


async def each(lines: list[str]) -> AsyncIterator[str]:
    for line in lines:
        yield line


async def test_events_of_a_stream() -> None:
    turn = Turn("?")
    lines = ["", ": ping", 'data: {"choices":[{"delta":{"content":"a"}}]}', 'data: {"usage":{"completion_tokens":3}}']
    async for event in server_sent_events(each([*lines, "data: [DONE]", "data: no"])):
        turn.receive(event)
    assert (turn.answer, turn.tokens) == ("a", 3)
    assert turn.ttft_s is not None
    turn.receive({"error": {"message": "too full"}})
    assert turn.error == "too full"
    assert messages([turn], Turn("next")) == [{"role": "user", "content": "next"}]
    assert http_error(502, "<html>") == "HTTP 502: <html>"


@pytest.mark.parametrize(
    ("secret", "body", "text"), [("schlüssel", b"", "ascii"), ("pp-key", b"data: {no\n\n", "JSON")]
)
def test_a_key_that_cannot_be_sent_and_an_answer_that_cannot_be_read(secret: str, body: bytes, text: str) -> None:
    client = httpx.AsyncClient(
        base_url="http://gateway", transport=httpx.MockTransport(lambda _: httpx.Response(200, content=body))
    )
    turn = Turn("Hello")
    stream(client, turn, messages([], turn), {}, secret)
    assert turn.ended
    assert text in turn.error
    assert secret not in turn.error


def test_an_answer_can_be_stopped_before_its_first_token() -> None:
    begun, left = threading.Event(), threading.Event()

    async def silent(_: httpx.Request) -> httpx.Response:
        begun.set()
        try:
            await asyncio.sleep(LONG_S)
        finally:
            left.set()
        raise AssertionError("not stopped")

    client = httpx.AsyncClient(base_url="http://gateway", transport=httpx.MockTransport(silent))
    turn = Turn("Hello")
    reading = threading.Thread(target=stream, args=(client, turn, messages([], turn), {}, ""))
    reading.start()
    assert begun.wait(LONG_S)
    turn.stop.set()
    assert turn.over.wait(LONG_S)
    reading.join(LONG_S)
    assert left.is_set()
    assert (turn.error, turn.answer) == ("", "")


def test_a_question_that_is_stopped_before_its_thread_runs_is_not_sent() -> None:
    client = httpx.AsyncClient(base_url="http://gateway", transport=httpx.MockTransport(lambda _: pytest.fail("sent")))
    turn = Turn("Hello")
    turn.stop.set()
    stream(client, turn, messages([], turn), {}, "")
    assert turn.ended


def test_a_new_conversation_stops_the_running_answer(page: AppTest, cluster: Any) -> None:
    cluster.chat_go.clear()
    talk = opened(page, "try").run()
    turn = ask(talk, "Hello")
    button(talk, "talk-clear").click().run()
    assert not talk.exception
    assert talk.session_state["talk-turns"] == []
    assert turn.over.wait(LONG_S)
    assert not cluster.chat_go.is_set()


def test_the_open_answers_of_a_session_are_limited(page: AppTest) -> None:
    talk = opened(page, "try").run()
    assert not button(talk, "talk-send").disabled
    talk.session_state["talk-open"] = before = [Turn("one"), Turn("two")]
    talk.run()
    assert button(talk, "talk-send").disabled
    before[0].over.set()
    assert not button(talk.run(), "talk-send").disabled


def test_chats_and_what_if_questions_delay_no_action(page: AppTest, cluster: Any) -> None:
    hold = threading.Event()
    held = [
        thread_pool(pool).submit(hold.wait, LONG_S)
        for pool in (Pool.CHATS, Pool.WHAT_IF)
        for _ in range(2 * POOL_SIZES[pool])
    ]
    try:
        assert thread_pool(Pool.ACTIONS).submit(lambda: "flipped").result(LONG_S) == "flipped"
        talk = opened(page, "try").run()
        turn = ask(talk, "Hello")
        assert not turn.ended  # it waits for a thread of the chats
    finally:
        hold.set()
    assert turn.over.wait(LONG_S)
    assert all(each.result(LONG_S) for each in held)
    assert turn.answer
