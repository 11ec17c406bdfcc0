"""The judge must catch every way in which an answer can be spoilt, or the bench would prove nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chaos.load import RightAnswer, Tally, Verdict, compare, judge
from tools.client import Ending, Response

TOKENS = tuple(300 + position * 7919 % 997 for position in range(40, 64))
RIGHT = RightAnswer(TOKENS, "".join(chr(97 + token % 26) for token in TOKENS), "length", 1.0)
ERROR = {"ending": Ending.ERROR, "code": "unavailable", "error": "no decode instance"}


def verdict(tokens: "list[int] | None" = None, **changes: object) -> Verdict:
    got = list(TOKENS) if tokens is None else tokens
    text = "".join(chr(97 + token % 26) for token in got)
    usage = {"completion_tokens": len(TOKENS)}
    fields = {"ending": Ending.DONE, "status": 200, "text": text, "finish_reason": "length", "usage": usage}
    return judge(RIGHT, Response(tokens=got, **(fields | changes)))  # type: ignore[arg-type]


@given(st.integers(1, 22), st.integers(1, 5), st.integers(2000, 9999))
def test_missing_doubled_and_strange_tokens(at: int, count: int, strange: int) -> None:
    again = TOKENS[max(0, at - count) : at]
    assert verdict([*TOKENS[:at], *TOKENS[at + count :]]) is Verdict.LOST
    assert verdict([*TOKENS[:at], *again, *TOKENS[at:]]) is Verdict.DOUBLED
    assert verdict([*TOKENS[:at], strange, *TOKENS[at + 1 :]]) is Verdict.WRONG


@pytest.mark.parametrize(
    ("tokens", "changes", "expected"),
    [
        (None, {}, Verdict.WHOLE),
        ([*TOKENS, TOKENS[-1]], {}, Verdict.DOUBLED),
        ([*TOKENS, 7], {}, Verdict.WRONG),
        (None, {"text": RIGHT.text[:-1] + "?"}, Verdict.WRONG),
        (None, {"text": RIGHT.text[:-1]}, Verdict.WRONG),
        (None, {"finish_reason": "stop"}, Verdict.WRONG),
        (None, {"usage": {"completion_tokens": len(TOKENS) + 1}}, Verdict.WRONG),
        (list(TOKENS[:9]), {"ending": Ending.CUT}, Verdict.CUT),
        (list(TOKENS[:9]), {"ending": Ending.HUNG}, Verdict.HUNG),
        ([], {"ending": Ending.UNREACHABLE}, Verdict.UNREACHABLE),
        ([], {**ERROR, "status": 503, "retry_after": True}, Verdict.ERROR),
        ([], {**ERROR, "status": 429, "retry_after": True}, Verdict.ERROR),
        ([], {**ERROR, "status": 429, "retry_after": False}, Verdict.CRASH),
        ([], {**ERROR, "status": 500, "retry_after": True}, Verdict.CRASH),
        ([], {**ERROR, "status": 400, "retry_after": False}, Verdict.CRASH),
        (list(TOKENS[:5]), ERROR, Verdict.ERROR),
        (list(TOKENS[:5]), {**ERROR, "code": "500"}, Verdict.CRASH),
        (list(TOKENS[:5]), {**ERROR, "code": ""}, Verdict.CRASH),
        # Wrong tokens outweigh the way in which the answer ended.
        *(([*TOKENS[:9], *TOKENS[8:12]], {**ERROR, "ending": ending}, Verdict.DOUBLED) for ending in Ending),
    ],
)
def test_answers(tokens: "list[int] | None", changes: dict[str, object], expected: Verdict) -> None:
    assert verdict(tokens, **changes) is expected


def test_a_repetitive_answer_is_not_taken_for_a_doubled_one() -> None:
    right = (5, 5, 5, 5, 7, 5, 5, 5)
    for end in range(len(right) + 1):
        assert compare(right, list(right[:end])) is None
    assert compare(right, [5, 5, 5, 7, 5, 5, 5]) is Verdict.LOST
    assert compare(right, [5, 5, 5, 5, 5, 7, 5, 5, 5]) is Verdict.DOUBLED


def test_the_tally_counts_waits_of_answers_only() -> None:
    tally = Tally()
    for got, gap_s in ((Verdict.WHOLE, 0.5), (Verdict.ERROR, 4.0), (Verdict.HUNG, 30.0)):
        tally.add(got, gap_s, f"{got} came")
    assert tally.longest_gap_s == 4.0
    assert tally.count(Verdict.WHOLE, Verdict.ERROR) == 2
    assert tally.examples == {Verdict.ERROR: "error came", Verdict.HUNG: "hung came"}
