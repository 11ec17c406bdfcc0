"""Operations in sentences: what came of them, and what helps where they were refused."""

import io
from datetime import datetime
from typing import Any

import pytest
from rich.console import Console

from services.launcher import operate
from shared.errors import Conflict, DeadlineExceeded, NotFound, PolyphaseError

DONE = {
    "operation_id": "7f3a",
    "kind": "flip",
    "instance_id": "decode-1",
    "from_role": "decode",
    "to_role": "prefill",
    "who": "ann",
    "started_s": datetime(2026, 1, 2, 3, 4, 5).timestamp(),
    "drain_s": 1.2,
    "flip_s": 0.004,
    "total_s": 1.3,
    "result": "succeeded",
    "error": "",
}


def said(what: str, **changes: Any) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    operate.show_outcome(console, what, "decode-1", {**DONE, **changes})
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    head, _, operation = text.partition("\n  Operation ")
    assert operation == "7f3a\n"
    return head


@pytest.mark.parametrize(
    ("what", "changes", "sentence"),
    [
        ("flip", {}, "✔ decode-1 is now prefill: drained in 1.2 s, flipped in 4 ms."),
        ("flip", {"flip_s": 1e-6}, "✔ decode-1 is now prefill: drained in 1.2 s, flipped in under 1 ms."),
        ("flip", {"drain_s": None, "flip_s": None}, "✔ decode-1 is now prefill."),
        (
            "drain",
            {},
            "✔ decode-1 is drained: its work ended in 1.2 s. It gets none until `polyphase resume decode-1`.",
        ),
        ("resume", {}, "✔ decode-1 gets work again, as prefill."),
        (
            "flip",
            {"result": "failed", "error": "the connection broke"},
            "✘ The flip of decode-1 (decode → prefill), asked for by ann at 03:04:05, failed after 1.3 s: "
            "the connection broke.",
        ),
        (
            "drain",
            {"result": "refused", "error": "it is dead"},
            "✘ The drain of decode-1, asked for by ann at 03:04:05, was refused: it is dead.",
        ),
        (
            "drain",
            {"result": "expired", "error": "the deadline was over"},
            "✘ The drain of decode-1, asked for by ann at 03:04:05, came too late: the deadline was over.",
        ),
        (
            "flip",
            {"result": "unknown", "error": "the monitor ended"},
            "? The flip of decode-1 (decode → prefill), asked for by ann at 03:04:05, "
            "may have been carried out or not: the monitor ended. `polyphase status` shows its role.",
        ),
    ],
)
def test_sentences(what: str, changes: dict[str, Any], sentence: str) -> None:
    assert said(what, **changes) == sentence


def test_one_under_way_says_since_when() -> None:
    assert "…" in said("flip", result="running")
    assert "is under way since" in said("flip", result="running")


def test_a_forgotten_one() -> None:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    operate.show_outcome(console, "forget", "d", {"instance_id": "d", "result": "forgotten"})
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert text == "✔ d is forgotten: it counts no longer. If it comes back it registers anew.\n"


@pytest.mark.parametrize(
    ("what", "refusal", "helps"),
    [
        ("flip", Conflict("d is the last ready decode instance; without it …"), "polyphase flip d --force"),
        ("drain", Conflict("d is dead"), "polyphase forget d"),
        ("forget", Conflict("d is ready; only dead instances can be forgotten"), "polyphase drain d"),
        ("flip", Conflict("d: a drain is under way"), "One at a time"),
        ("drain", DeadlineExceeded("d did not drain within 30 s: 3 jobs remain"), "polyphase resume d"),
        ("flip", DeadlineExceeded("d did not drain within 30 s: 3 jobs remain"), "polyphase flip d --timeout 120"),
        ("flip", Conflict("something else"), ""),
    ],
)
def test_what_helps_where_it_was_refused(what: str, refusal: PolyphaseError, helps: str) -> None:
    found = operate.help_of(what, "d", refusal)
    assert helps in found if helps else found == ""


def test_an_unknown_instance_names_those_there_are() -> None:
    refusal = NotFound("no instance 'decode1'")
    assert operate.help_of("flip", "decode1", refusal, ["prefill-0", "decode-1"]) == (
        "Did you mean decode-1? Known: prefill-0, decode-1"
    )
    assert operate.help_of("flip", "x", refusal, []) == "Known: none yet"
