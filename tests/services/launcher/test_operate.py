"""Operations, policies and proposals on the command line: outcomes in sentences, tables and JSON."""

import io
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from services.launcher import cli, operate, suite
from services.launcher.operate import change_of, reset_of, show_policies
from shared.domain.policies import KINDS
from shared.domain.route import PolicySpec
from shared.errors import Conflict, DeadlineExceeded, InvalidRequest, NotFound, PolyphaseError, Unavailable
from shared.policy import registry
from shared.wire.api import Operation
from shared.wire.api.monitor import InstanceRow, PoliciesInForce, PolicyChange, PolicyChoice, PolicyFollower
from shared.wire.clients.monitor import MonitorClient
from tests.services.launcher.suites import entry

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
            "move",
            {"job_id": "job-1"},
            "✔ decode-1 lets job-1 move to another instance: `polyphase explain job-1` shows whether its gateway has "
            "moved it.",
        ),
        (
            "move",
            {"job_id": "job-1", "to_instance": "decode-2", "result": "refused", "error": "it has ended"},
            "✘ The move of job-1, requested by ann at 03:04:05, was refused: it has ended.",
        ),
        (
            "move",
            {"job_id": "job-1", "result": "unknown", "error": "the monitor ended"},
            "? The move of job-1, requested by ann at 03:04:05, may or may not have been carried out: "
            "the monitor ended. `polyphase explain job-1` shows where it decodes.",
        ),
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
    known = [entry(name, each) for name, each in states.items()]
    found = operate.advice_on(what, "d", refusal("whatever it says"), known)
    assert advice in found if advice else found == ""


def test_advice_during_another_operation() -> None:
    known = [entry("d", "draining", operation="drain")]
    assert "one operation at a time" in operate.advice_on("flip", "d", Conflict(""), known)
    assert operate.advice_on("flip", "d", Conflict(""), []) == ""


def test_an_unknown_instance_names_those_there_are() -> None:
    refusal = NotFound("no instance 'decode1'")
    known = [entry("prefill-0"), entry("decode-1")]
    assert operate.advice_on("flip", "decode1", refusal, known) == "Did you mean decode-1? Known: prefill-0, decode-1"
    assert operate.advice_on("flip", "x", refusal, []) == "Known: none yet"


def moved(monkeypatch: pytest.MonkeyPatch, refusal: PolyphaseError | None = None) -> list[tuple[str, str]]:
    """What the monitor is to move, and to where."""
    calls: list[tuple[str, str]] = []

    async def move(_: MonitorClient, job_id: str, *, to: str, who: str) -> Operation:
        assert who.endswith("(polyphase)")
        calls.append((job_id, to))
        if refusal is not None:
            raise refusal
        return msgspec.convert({**DONE, "kind": "move", "job_id": job_id, "to_instance": to}, Operation)

    async def instances(_: str) -> list[InstanceRow]:
        return [entry("decode-0"), entry("decode-1")]

    monkeypatch.setattr(MonitorClient, "move", move)
    monkeypatch.setattr(operate, "_instances", instances)
    return calls


@pytest.mark.parametrize(
    ("found", "job_id"),
    [("chatcmpl-8f2e41-0-aa", "chatcmpl-8f2e41-0-aa"), (NotFound("no"), "8f=2Fe41"), (Unavailable("no"), "8f=2Fe41")],
)
def test_a_request_is_moved_by_a_part_of_its_id(
    monkeypatch: pytest.MonkeyPatch, found: str | PolyphaseError, job_id: str
) -> None:
    calls = moved(monkeypatch)

    async def find(urls: tuple[str, ...], wanted: str) -> str:
        assert (urls, wanted) == (("http://s",), "8f/e41")
        if isinstance(found, PolyphaseError):
            raise found
        return found

    monkeypatch.setattr(operate, "find_job", find)
    line = ["move-request", "8f/e41", "--to", "decode-0", *URL, "--scheduler", "http://s"]
    plain, as_json = RUN.invoke(cli.app, line), RUN.invoke(cli.app, [*line, "--json"])
    assert calls == [(job_id, "decode-0")] * 2
    assert f"decode-1 lets {job_id} move to decode-0" in " ".join(plain.output.split())
    assert json.loads(as_json.output)["job_id"] == job_id


def test_a_move_needs_no_suite_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = moved(monkeypatch)
    assert RUN.invoke(cli.app, ["move-request", "job-1", *URL, "--data-dir", str(tmp_path)]).exit_code == 0
    assert calls == [("job-1", "")]


@pytest.mark.parametrize(
    ("to", "advice"), [("decode-7", "Known: decode-0, decode-1"), ("decode-1", "`polyphase requests` lists requests.")]
)
async def test_advice_after_a_move_of_or_to_what_is_unknown(
    monkeypatch: pytest.MonkeyPatch, to: str, advice: str
) -> None:
    moved(monkeypatch, NotFound("there is none"))
    with pytest.raises(NotFound, match="there is none\\n") as refusal:
        await operate.move_request("job-1", to, "http://m", ())
    assert refusal.value.message.endswith(advice)
    with pytest.raises(InvalidRequest, match="the request id is empty"):
        await operate.move_request(" ", to, "http://m", ())


RUN = CliRunner()
URL = ["--monitor", "http://m"]


def answer(trouble: str = "", *, all_follow: bool = False) -> PoliciesInForce:
    file, change = PolicySpec("adaptive"), PolicyChange("anna (polyphase)", 1.0)
    policies = {
        "placement": PolicyChoice("adaptive", file=file),
        "split": PolicyChoice("fraction", {"fraction": 0.5}, file, change),
    }
    followers = [
        PolicyFollower("scheduler", "s0", 3, follows=True),
        PolicyFollower("instance", "p0", 2, follows=all_follow, trouble="" if all_follow else "unknown prefill order"),
    ]
    return PoliciesInForce(3, trouble, policies, {}, followers)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, PolicySpec | None]]]]:
    calls: list[tuple[str, dict[str, PolicySpec | None]]] = []

    async def act(url: str, change: dict[str, PolicySpec | None], who: str, token: str) -> PoliciesInForce:
        assert who.endswith("(polyphase)")
        calls.append((url, change))
        return answer()

    monkeypatch.setattr(operate, "apply_policies", act)
    return calls


def test_words() -> None:
    assert change_of(["placement=least_load", "sjf:window=4", "role_flip=off", "step_budget=on"]) == {
        "placement": PolicySpec("least_load"),
        "prefill_order": PolicySpec("sjf", {"window": 4}),
        "role_flip": PolicySpec("off"),
        "step_budget": PolicySpec("on"),
    }
    assert change_of(["adaptive"]) == {k: PolicySpec("adaptive") for k in ("placement", "split", "dispatch")}
    routes = change_of(['placement=plan:routes=[["p","d",1],["","e",2]]'])["placement"]
    assert routes is not None
    assert routes.parameters == {"routes": [["p", "d", 1], ["", "e", 2]]}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["split=none", "full"], "'full': a policy of kind split is named twice"),
        (["fastest"], "no policy 'fastest'; known: placement: adaptive"),
        (["off"], "'off' is of several kinds; write step_budget=off or role_flip=off"),
        (["split=fraction:share=0.5"], "policy 'split=fraction:share=0.5': split policy 'fraction' has no parameter"),
        (["split=fraction:fraction=half"], "fraction.fraction must be of type float, not 'half'"),
        (["where=full"], "no kind of policy 'where'; known: placement, split"),
        (["split="], "no name"),
    ],
)
def test_errors_name_the_words(words: list[str], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        change_of(words)


def test_resets() -> None:
    assert reset_of([]) == dict.fromkeys(KINDS)
    assert reset_of(["split"]) == {"split": None}
    with pytest.raises(InvalidRequest, match="--reset: no kind of policy 'sjf'; known: placement, split"):
        reset_of(["sjf"])


def test_the_command_asks_the_monitor(asked: list[Any]) -> None:
    for words in ([], ["split=none"], ["--reset", "split"], ["--reset"]):
        assert RUN.invoke(cli.app, ["policies", *words, *URL]).exit_code == 0
    assert [change for _, change in asked] == [{}, {"split": PolicySpec("none")}, {"split": None}, dict.fromkeys(KINDS)]
    assert {url for url, _ in asked} == {"http://m"}
    assert json.loads(RUN.invoke(cli.app, ["policies", "--json", *URL]).stdout)["revision"] == 3


def test_nothing_is_asked_for_what_is_wrong(asked: list[Any]) -> None:
    assert RUN.invoke(cli.app, ["policies", "split=best", *URL]).exit_code == 1
    assert asked == []


def test_the_table_says_who_chose_what_and_who_does_not_follow() -> None:
    out = io.StringIO()
    show_policies(Console(file=out, width=160), answer(trouble="the database has not answered"))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert any("split fraction:fraction=0.5 anna (polyphase), 1970-01-01" in line for line in lines)
    assert any("placement adaptive the cluster file" in line for line in lines)
    assert "followed by 1 of 2 schedulers and instances" in lines
    assert "instance p0 follows revision 2: unknown prefill order" in lines
    assert lines[-1] == "the database has not answered"


def test_choices_say_what_each_does_and_which_is_in_force() -> None:
    out = io.StringIO()
    in_force = {kind: PolicyChoice("least_load" if kind == "placement" else "off") for kind in KINDS}
    operate.show_choices(Console(file=out, width=80), in_force)
    text = out.getvalue()
    assert all(len(line) <= 80 for line in text.splitlines())
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "* least_load The instance that would finish this prefill first." in lines
    assert "* off Only operators flip roles." in lines
    assert all(name in text for table in registry.KINDS.values() for name in table)
    assert "Source" not in text


def test_every_policy_says_what_it_does() -> None:
    for table in registry.KINDS.values():
        for name, made in table.items():
            said = operate.what_it_does(made)
            assert said.endswith("."), name
            assert len(said) < 200, name


def test_without_a_suite_it_says_how_to_start_one(tmp_path: Path) -> None:
    result = RUN.invoke(cli.app, ["policies", "--data-dir", str(tmp_path)])
    assert "polyphase up" in str(result.exception)


class Monitor:
    """All follow a change after so many questions."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.asked = 0

    async def __aenter__(self) -> "Monitor":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing to close."""

    async def set_policies(self, change: object, who: str) -> PoliciesInForce:
        return self._now()

    async def policies(self) -> PoliciesInForce:
        self.asked += 1
        self.left -= 1
        return self._now()

    def _now(self) -> PoliciesInForce:
        return answer(all_follow=self.left <= 0)


@pytest.mark.parametrize(("after", "follow"), [(0, True), (3, True), (10**9, False)])
async def test_a_change_waits_a_little_until_all_follow(
    monkeypatch: pytest.MonkeyPatch, after: int, follow: bool
) -> None:
    monitor = Monitor(after)
    monkeypatch.setattr(operate, "MonitorClient", lambda url, token: monitor)
    monkeypatch.setattr(suite, "POLL_S", 0.001)
    monkeypatch.setattr(operate, "FOLLOWED_S", 0.3)
    found = await operate.apply_policies("http://m", {"split": PolicySpec("none")}, "anna")
    assert [one.follows for one in found.followers] == [True, follow]
    if follow:
        assert monitor.asked == after


async def test_a_change_that_must_be_followed_names_the_processes_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "POLL_S", 0.001)
    change = {"split": PolicySpec("none")}
    for after, schedulers, late in ((10**9, 0, "p0 unknown prefill order"), (0, 2, "a scheduler")):
        with pytest.raises(DeadlineExceeded, match=f"late: {late}"):
            await suite.change_policies(cast(MonitorClient, Monitor(after)), change, "anna", schedulers, 0.05)
