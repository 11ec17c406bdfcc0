"""The page Try it."""

from typing import Any

import httpx
import pytest
from streamlit.testing.v1 import AppTest

from dashboard.talk.chat import Turn, events, messages, refusal, stream, take
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


def test_what_comes_is_counted() -> None:
    turn = Turn("?")
    lines = ["", ": ping", 'data: {"choices":[{"delta":{"content":"a"}}]}', 'data: {"usage":{"completion_tokens":3}}']
    for event in events(iter([*lines, "data: [DONE]", "data: no"])):
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
    client = httpx.Client(
        base_url="http://gateway", transport=httpx.MockTransport(lambda _: httpx.Response(200, content=body))
    )
    turn = Turn("Hello")
    stream(client, turn, messages([], turn), {}, secret)
    assert turn.ended
    assert said in turn.error
    assert secret not in turn.error
