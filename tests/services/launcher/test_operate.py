"""Operations in sentences: their outcomes, and the advice after a refusal."""

import io
from datetime import datetime
from typing import Any

import msgspec
import pytest
from rich.console import Console

from services.launcher import operate
from shared.errors import Conflict, DeadlineExceeded, NotFound, PolyphaseError
from shared.wire.api import Operation

DONE = {
    "operation_id": "7f3a",
    "instance_id": "decode-1",
    "generation": 1,
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
    operate.show_outcome(console, "decode-1", msgspec.convert({**DONE, "kind": what, **changes}, Operation))
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
            "✔ decode-1 is drained: its work ended in 1.2 s. It gets no work until `polyphase resume decode-1`.",
        ),
        ("resume", {}, "✔ decode-1 gets work again, as prefill."),
        (
            "flip",
            {"result": "failed", "error": "the connection broke"},
            "✘ The flip of decode-1 (decode → prefill), requested by ann at 03:04:05, failed after 1.3 s: "
            "the connection broke.",
        ),
        (
            "drain",
            {"result": "refused", "error": "it is dead"},
            "✘ The drain of decode-1, requested by ann at 03:04:05, was refused: it is dead.",
        ),
        (
            "drain",
            {"result": "expired", "error": "the deadline was over"},
            "✘ The drain of decode-1, requested by ann at 03:04:05, arrived after its deadline: the deadline was over.",
        ),
        (
            "flip",
            {"result": "unknown", "error": "the monitor ended"},
            "? The flip of decode-1 (decode → prefill), requested by ann at 03:04:05, "
            "may or may not have been carried out: the monitor ended. `polyphase status` shows the role.",
        ),
    ],
)
def test_sentences(what: str, changes: dict[str, Any], sentence: str) -> None:
    assert said(what, **changes) == sentence


def test_a_running_one_says_for_how_long() -> None:
    assert said("flip", result="running").startswith("… The flip of decode-1")
    assert "has been running for" in said("flip", result="running")


def test_a_forgotten_one() -> None:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    operate.show_outcome(console, "d", None)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert text == "✔ d is forgotten: it no longer counts. It registers as a new instance if it comes back.\n"


@pytest.mark.parametrize(
    ("what", "refusal", "others", "state", "advice"),
    [
        ("flip", Conflict, [], "ready", "polyphase flip d --force"),
        ("drain", Conflict, ["starting"], "ready", "polyphase drain d --force"),
        ("flip", Conflict, ["ready"], "ready", ""),
        ("resume", Conflict, [], "ready", ""),
        ("drain", Conflict, [], "dead", "polyphase forget d"),
        ("flip", Conflict, [], "unresponsive", "polyphase logs d"),
        ("flip", Conflict, [], "starting", "polyphase status"),
        ("forget", Conflict, [], "ready", "polyphase drain d"),
        ("drain", DeadlineExceeded, [], "draining", "polyphase resume d"),
        ("flip", DeadlineExceeded, [], "ready", "polyphase flip d --timeout 120"),
    ],
)
def test_advice_after_a_refusal(
    what: str, refusal: type[PolyphaseError], others: list[str], state: str, advice: str
) -> None:
    states = {"d": state, **{f"d{index}": each for index, each in enumerate(others)}}
    known = [{"instance_id": name, "role": "decode", "state": each, "operation": ""} for name, each in states.items()]
    found = operate.advice_on(what, "d", refusal("whatever it says"), known)
    assert advice in found if advice else found == ""


def test_advice_during_another_operation() -> None:
    known = [{"instance_id": "d", "role": "decode", "state": "draining", "operation": "drain"}]
    assert "one operation at a time" in operate.advice_on("flip", "d", Conflict(""), known)
    assert operate.advice_on("flip", "d", Conflict(""), []) == ""


def test_an_unknown_instance_names_those_there_are() -> None:
    refusal = NotFound("no instance 'decode1'")
    known = [{"instance_id": name} for name in ("prefill-0", "decode-1")]
    assert operate.advice_on("flip", "decode1", refusal, known) == "Did you mean decode-1? Known: prefill-0, decode-1"
    assert operate.advice_on("flip", "x", refusal, []) == "Known: none yet"
