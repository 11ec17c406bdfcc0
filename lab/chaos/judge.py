"""What one answer was worth: compared token by token with the right one. Pure."""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from lab.chaos.client import Ending, Reply

_BUSY = (429, 503, 504)  # what a client may be told when the cluster cannot serve it
_WINDOW = 6  # tokens by which a place in the right answer is recognised


class Verdict(StrEnum):
    """Of one answer. Only `WHOLE` and `ERROR` are what a client was promised."""

    WHOLE = "whole"
    ERROR = "error"  # a typed error that says to come back, after a right beginning
    LOST = "lost"  # tokens are missing
    DOUBLED = "doubled"  # tokens came twice
    WRONG = "wrong"  # tokens or text that are not of this answer
    CUT = "cut"  # it ended without saying why
    HUNG = "hung"
    CRASH = "crash"  # an error that is no answer: 500, a body that is no error, 503 without Retry-After
    UNREACHABLE = "unreachable"


HARM = (Verdict.LOST, Verdict.DOUBLED, Verdict.WRONG)
UNCLEAN = (Verdict.HUNG, Verdict.CRASH)
BROKEN = (Verdict.CUT, Verdict.UNREACHABLE)


@dataclass(frozen=True, slots=True)
class Right:
    """The right answer of one kind of request, and how long it takes when nothing disturbs it."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    took_s: float


def judge(right: Right, reply: Reply) -> Verdict:
    """The verdict. What is wrong in what came outweighs how it ended."""
    difference = compare(right.tokens, reply.tokens)
    if difference is not None:
        return difference
    if not right.text.startswith(reply.text):
        return Verdict.WRONG
    match reply.ending:
        case Ending.HUNG:
            return Verdict.HUNG
        case Ending.CUT:
            return Verdict.CUT
        case Ending.UNREACHABLE:
            return Verdict.UNREACHABLE
        case Ending.ERROR:
            return Verdict.ERROR if _clean(reply) else Verdict.CRASH
    return _of_done(right, reply)


def compare(right: tuple[int, ...], got: list[int]) -> Verdict | None:
    """What is wrong with the tokens so far; None for a right beginning. A tie goes to the nearer explanation."""
    if list(right[: len(got)]) == got:
        return None
    at = next((i for i, (a, b) in enumerate(zip(right, got, strict=False)) if a != b), len(right))
    rest = tuple(got[at : at + _WINDOW])
    if not rest:
        return None
    found = [i for i in range(len(right)) if right[i : i + len(rest)] == rest]
    if not found:
        return Verdict.WRONG
    nearest = min(found, key=lambda i: abs(i - at))
    return Verdict.LOST if nearest > at else Verdict.DOUBLED


def _of_done(right: Right, reply: Reply) -> Verdict:
    if len(reply.tokens) < len(right.tokens):
        return Verdict.LOST
    same = reply.text == right.text and reply.finish_reason == right.finish_reason
    counted = reply.completion_tokens in (None, len(right.tokens))
    return Verdict.WHOLE if same and counted else Verdict.WRONG


def _clean(reply: Reply) -> bool:
    """Whether the error says what it is and, before the stream began, when to come back."""
    if not reply.code or not reply.error:
        return False
    if reply.status == 200:
        return reply.code != "500"
    return reply.status in _BUSY and (reply.retry_after or reply.status == 504)


@dataclass(slots=True)
class Tally:
    """All answers of a stretch of time."""

    counts: Counter[Verdict] = field(default_factory=Counter)
    longest_gap_s: float = 0.0
    examples: dict[Verdict, str] = field(default_factory=dict)

    def add(self, verdict: Verdict, gap_s: float, example: str) -> None:
        """One more."""
        self.counts[verdict] += 1
        if verdict in (Verdict.WHOLE, Verdict.ERROR):  # of the others, how long they took says nothing
            self.longest_gap_s = max(self.longest_gap_s, gap_s)
        if verdict is not Verdict.WHOLE:
            self.examples.setdefault(verdict, example)

    def count(self, *verdicts: Verdict) -> int:
        """How many were of these."""
        return sum(self.counts[verdict] for verdict in verdicts)
