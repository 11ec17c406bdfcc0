"""`polyphase policies`: words in, a table or JSON out."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from services.launcher import cli, operate
from services.launcher.operate import change_of, reset_of, show_policies
from shared.domain.policies import KINDS
from shared.domain.route import PolicySpec
from shared.errors import InvalidRequest
from shared.policy import registry

RUN = CliRunner()
URL = ["--monitor", "http://m"]


def answer(**changes: Any) -> dict[str, Any]:
    plain = {"name": "adaptive", "parameters": {}, "file": {"name": "adaptive", "parameters": {}}, "changed": None}
    chosen = {**plain, "name": "fraction", "parameters": {"fraction": 0.5}}
    chosen["changed"] = {"who": "anna (polyphase)", "since_s": 1.0}
    told = [
        {"process": "scheduler", "name": "s0", "revision": 3, "follows": True, "trouble": ""},
        {"process": "instance", "name": "p0", "revision": 2, "follows": False, "trouble": "unknown prefill order"},
    ]
    found = {"revision": 3, "trouble": "", "policies": {"placement": plain, "split": chosen}, "followers": told}
    return {**found, **changes}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, PolicySpec | None]]]]:
    calls: list[tuple[str, dict[str, PolicySpec | None]]] = []

    async def act(url: str, change: dict[str, PolicySpec | None], who: str, token: str) -> dict[str, Any]:
        assert who.endswith("(polyphase)")
        calls.append((url, change))
        return answer()

    monkeypatch.setattr(operate, "change_policies", act)
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
    in_force = {kind: {"name": "least_load" if kind == "placement" else "off"} for kind in KINDS}
    operate.show_choices(Console(file=out, width=80), in_force)
    text = out.getvalue()
    assert all(len(line) <= 80 for line in text.splitlines())
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "* least_load The instance that would finish this prefill first." in lines
    assert "* off Only people flip roles." in lines
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

    async def set_policies(self, change: object, who: str) -> dict[str, Any]:
        return self._now()

    async def policies(self) -> dict[str, Any]:
        self.asked += 1
        self.left -= 1
        return self._now()

    def _now(self) -> dict[str, Any]:
        return answer(followers=[{**one, "follows": self.left <= 0} for one in answer()["followers"]])


@pytest.mark.parametrize(("after", "follow"), [(0, True), (3, True), (10**9, False)])
async def test_a_change_waits_a_little_until_all_follow(
    monkeypatch: pytest.MonkeyPatch, after: int, follow: bool
) -> None:
    monitor = Monitor(after)
    monkeypatch.setattr(operate, "MonitorClient", lambda url, token: monitor)
    monkeypatch.setattr(operate, "POLICY_POLL_S", 0.001)
    monkeypatch.setattr(operate, "FOLLOWED_S", 0.3)
    found = await operate.change_policies("http://m", {"split": PolicySpec("none")}, "anna")
    assert [one["follows"] for one in found["followers"]] == [follow] * 2
    if follow:
        assert monitor.asked == after
