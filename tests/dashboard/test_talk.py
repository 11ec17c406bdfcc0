"""The page Try it."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from streamlit.testing.v1 import AppTest

from dashboard import resources
from dashboard.chat_page import Turn, events, messages, refusal, stream, take
from tests.dashboard.pages import LONG_S, button, html, links, opened
from tests.dashboard.rows import report


def ask(page: AppTest, said: str) -> Turn:
    """Ask, and wait for the end of the answer."""
    page.chat_input[0].set_value(said).run()
    turn: Turn = page.session_state["talk-turns"][-1]
    return turn


def ended(page: AppTest) -> AppTest:
    assert page.session_state["talk-turns"][-1].over.wait(LONG_S)
    return page.run()


def test_an_answer_its_ttft_and_its_waterfall(page: AppTest, cluster: Any) -> None:
    talk = opened(page, "try").run()
    assert not talk.exception
    cluster.answers.go.clear()
    turn = ask(talk, "What is <b>polyphase</b>?")
    assert not talk.exception
    assert button(talk, "talk-stop")
    cluster.jobs.insert(0, report(f"chatcmpl-{turn.tag}-0"))
    cluster.answers.go.set()
    ended(talk)
    assert not talk.exception
    shown = html(talk)
    assert "Prefill and decode part ways." in shown
    assert "What is &lt;b&gt;polyphase&lt;/b&gt;?" in shown
    assert "TTFT here" in shown
    assert len(talk.get("plotly_chart")) == 1
    assert ("This request", f"requests?request=chatcmpl-{turn.tag}-0") in links(talk)
    body, headers = cluster.answers.asked[0]
    assert (body["max_tokens"], headers["x-request-id"]) == (64, turn.tag)
    ask(talk, "And then?")
    ended(talk)
    assert [one["role"] for one in cluster.answers.asked[1][0]["messages"]] == ["user", "assistant", "user"]
    button(talk, "talk-clear").click().run()
    assert talk.session_state["talk-turns"] == []


def test_a_refusal_is_told_in_the_apis_own_words(page: AppTest, cluster: Any) -> None:
    cluster.answers.key = "pp-the-key"
    talk = opened(page, "try").run()
    ask(talk, "Hello")
    ended(talk)
    assert talk.error[0].value == "HTTP 401: this server needs an API key"
    talk.text_input(key="talk-key").set_value("pp-the-key").run()
    ask(talk, "Hello")
    ended(talk)
    assert cluster.answers.asked[0][1]["authorization"] == "Bearer pp-the-key"
    assert "pp-the-key" not in html(talk)


async def each(lines: list[str]) -> AsyncIterator[str]:
    for line in lines:
        yield line


async def test_what_comes_is_counted() -> None:
    turn = Turn("?")
    lines = ["", ": ping", 'data: {"choices":[{"delta":{"content":"a"}}]}', 'data: {"usage":{"completion_tokens":3}}']
    async for event in events(each([*lines, "data: [DONE]", "data: no"])):
        take(turn, event)
    assert (turn.answer, turn.tokens) == ("a", 3)
    assert turn.ttft_s is not None
    take(turn, {"error": {"message": "too full"}})
    assert turn.error == "too full"
    assert messages([turn], Turn("next")) == [{"role": "user", "content": "next"}]
    assert refusal(502, "<html>") == "HTTP 502: <html>"


@pytest.mark.parametrize(
    ("secret", "body", "said"), [("schlüssel", b"", "ascii"), ("pp-key", b"data: {no\n\n", "JSON")]
)
def test_what_cannot_be_sent_or_read_is_told(secret: str, body: bytes, said: str) -> None:
    client = httpx.AsyncClient(
        base_url="http://gateway", transport=httpx.MockTransport(lambda _: httpx.Response(200, content=body))
    )
    turn = Turn("Hello")
    stream(client, turn, messages([], turn), {}, secret)
    assert turn.ended
    assert said in turn.error
    assert secret not in turn.error


def test_an_answer_can_be_stopped_before_its_first_token() -> None:
    begun, left = threading.Event(), threading.Event()

    async def silent(_: httpx.Request) -> httpx.Response:
        begun.set()
        try:
            await asyncio.sleep(LONG_S)
        finally:
            left.set()
        raise AssertionError("nobody stopped it")

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


def test_one_that_is_stopped_before_its_turn_is_never_asked() -> None:
    client = httpx.AsyncClient(base_url="http://gateway", transport=httpx.MockTransport(lambda _: pytest.fail("asked")))
    turn = Turn("Hello")
    turn.stop.set()
    stream(client, turn, messages([], turn), {}, "")
    assert turn.ended


def test_a_new_conversation_stops_the_answer_that_comes(page: AppTest, cluster: Any) -> None:
    cluster.answers.go.clear()
    talk = opened(page, "try").run()
    turn = ask(talk, "Hello")
    button(talk, "talk-clear").click().run()
    assert not talk.exception
    assert talk.session_state["talk-turns"] == []
    assert turn.over.wait(LONG_S)
    assert not cluster.answers.go.is_set()


def test_a_session_has_so_many_open_answers_only(page: AppTest) -> None:
    talk = opened(page, "try").run()
    assert not talk.chat_input[0].disabled
    talk.session_state["talk-open"] = before = [Turn("one"), Turn("two")]
    talk.run()
    assert talk.chat_input[0].disabled
    before[0].over.set()
    assert not talk.run().chat_input[0].disabled


def test_chats_hold_up_no_flip(page: AppTest, cluster: Any) -> None:
    hold = threading.Event()
    held = [resources.chats().submit(hold.wait, LONG_S) for _ in range(2 * resources.CHATS)]
    held += [resources.questions().submit(hold.wait, LONG_S) for _ in range(2 * resources.QUESTIONS)]
    try:
        assert resources.operations().submit(lambda: "flipped").result(LONG_S) == "flipped"
        talk = opened(page, "try").run()
        turn = ask(talk, "Hello")
        assert not turn.ended  # it waits for its turn among the chats
    finally:
        hold.set()
    assert turn.over.wait(LONG_S)
    assert all(each.result(LONG_S) for each in held)
    assert turn.answer
