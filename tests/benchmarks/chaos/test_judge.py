"""The judge must catch every way in which an answer can be spoilt, or the bench would prove nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chaos.load import RightAnswer, Tally, Verdict, compare, judge
from tools.client import Ending, Response

TOKENS = tuple(300 + position * 7919 % 997 for position in range(40, 64))
RIGHT = RightAnswer(TOKENS, "".join(chr(97 + token % 26) for token in TOKENS), "length", 1.0)


def response(tokens: "list[int] | None" = None, **changes: object) -> Response:
    got = list(TOKENS) if tokens is None else tokens
    text = "".join(chr(97 + token % 26) for token in got)
    fields = {
        "ending": Ending.DONE,
        "status": 200,
        "tokens": got,
        "text": text,
        "finish_reason": "length",
        "usage": {"completion_tokens": len(TOKENS)},
    }
    return Response(**(fields | changes))  # type: ignore[arg-type]


def test_a_whole_answer() -> None:
    assert judge(RIGHT, response()) is Verdict.WHOLE


@given(st.integers(0, 22), st.integers(1, 5))
def test_missing_tokens(at: int, count: int) -> None:
    got = [*TOKENS[:at], *TOKENS[at + count :]]
    assert judge(RIGHT, response(got)) is Verdict.LOST


@given(st.integers(1, 24), st.integers(1, 5))
def test_tokens_that_came_twice(at: int, count: int) -> None:
    again = TOKENS[max(0, at - count) : at]
    assert judge(RIGHT, response([*TOKENS[:at], *again, *TOKENS[at:]])) is Verdict.DOUBLED


@given(st.integers(0, 23), st.integers(2000, 9999))
def test_a_token_of_something_else(at: int, token: int) -> None:
    assert judge(RIGHT, response([*TOKENS[:at], token, *TOKENS[at + 1 :]])) is Verdict.WRONG


def test_more_than_was_asked_for() -> None:
    assert judge(RIGHT, response([*TOKENS, TOKENS[-1]])) is Verdict.DOUBLED
    assert judge(RIGHT, response([*TOKENS, 7])) is Verdict.WRONG


def test_right_tokens_with_other_words_or_another_end_or_count() -> None:
    assert judge(RIGHT, response(text=RIGHT.text[:-1] + "?")) is Verdict.WRONG
    assert judge(RIGHT, response(text=RIGHT.text[:-1])) is Verdict.WRONG
    assert judge(RIGHT, response(finish_reason="stop")) is Verdict.WRONG
    assert judge(RIGHT, response(usage={"completion_tokens": len(TOKENS) + 1})) is Verdict.WRONG


def test_how_an_answer_ended() -> None:
    half = list(TOKENS[:9])
    assert judge(RIGHT, response(half, ending=Ending.CUT)) is Verdict.CUT
    assert judge(RIGHT, response(half, ending=Ending.HUNG)) is Verdict.HUNG
    assert judge(RIGHT, response([], ending=Ending.UNREACHABLE)) is Verdict.UNREACHABLE


def test_what_is_wrong_outweighs_how_it_ended() -> None:
    for ending in Ending:
        error = {"ending": ending, "code": "unavailable", "error": "no decode instance"}
        assert judge(RIGHT, response([*TOKENS[:9], *TOKENS[8:12]], **error)) is Verdict.DOUBLED


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"status": 503, "retry_after": True}, Verdict.ERROR),
        ({"status": 429, "retry_after": True}, Verdict.ERROR),
        ({"status": 429, "retry_after": False}, Verdict.CRASH),
        ({"status": 500, "retry_after": True}, Verdict.CRASH),
        ({"status": 400, "retry_after": False}, Verdict.CRASH),
        ({"status": 200}, Verdict.ERROR),
        ({"status": 200, "code": "500"}, Verdict.CRASH),
        ({"status": 200, "code": ""}, Verdict.CRASH),
    ],
)
def test_errors_that_a_client_can_use(changes: dict[str, object], verdict: Verdict) -> None:
    error = {"ending": Ending.ERROR, "code": "unavailable", "error": "no decode instance"} | changes
    tokens = list(TOKENS[:5]) if changes["status"] == 200 else []
    assert judge(RIGHT, response(tokens, **error)) is verdict


def test_a_repetitive_answer_is_not_taken_for_a_doubled_one() -> None:
    right = (5, 5, 5, 5, 7, 5, 5, 5)
    for end in range(len(right) + 1):
        assert compare(right, list(right[:end])) is None
    assert compare(right, [5, 5, 5, 7, 5, 5, 5]) is Verdict.LOST
    assert compare(right, [5, 5, 5, 5, 5, 7, 5, 5, 5]) is Verdict.DOUBLED


def test_the_tally_counts_waits_of_answers_only() -> None:
    tally = Tally()
    tally.add(Verdict.WHOLE, 0.5, "")
    tally.add(Verdict.ERROR, 4.0, "refused late")
    tally.add(Verdict.HUNG, 30.0, "nothing came")
    assert tally.longest_gap_s == 4.0
    assert tally.count(Verdict.WHOLE, Verdict.ERROR) == 2
    assert tally.examples == {Verdict.ERROR: "refused late", Verdict.HUNG: "nothing came"}
