"""Who may come in, and what they may do."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from streamlit import config
from streamlit.testing.v1 import AppTest

from dashboard import resources
from dashboard.accounts import Account, KeyFile, NotAllowed, Tickets
from dashboard.dashboard_settings import DashboardSettings
from dashboard.operations import Action, Intent
from services.launcher.cluster_keys import add_key
from shared.domain.instance import Role
from shared.errors import Unauthorized
from shared.runtime.keys import LOOK, OPERATE
from tests.dashboard.pages import button, finish, has, html, opened


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Secrets by role: one who looks, one who operates, one for the API only."""
    file = tmp_path / "keys.yaml"
    made = {
        "ann": add_key(file, "ann", role=LOOK),
        "ben": add_key(file, "ben", role=OPERATE),
        "bot": add_key(file, "bot"),
    }
    monkeypatch.setenv("POLYPHASE_DASHBOARD_API_KEYS_FILE", str(file))
    return made


def entered(page: AppTest, secret: str) -> AppTest:
    page.run().text_input(key="login_key").set_value(secret)
    return page.button(key="login_submit").click().run()


def test_without_a_key_there_is_nothing_to_see(page: AppTest, keys: dict[str, str], cluster: Any) -> None:
    for path in ("", "instances", "plan"):
        opened(page, path).run()
        assert not page.exception
        assert page.text_input(key="login_key")
        assert "polyphase-demo" not in html(page)
    assert cluster.reads == 0


@pytest.mark.parametrize(("name", "said"), [("wrong", "not known here"), ("bot", "opens the API only")])
def test_a_key_that_opens_nothing(page: AppTest, keys: dict[str, str], name: str, said: str) -> None:
    entered(page, keys.get(name, "pp-wrong"))
    assert not page.exception
    assert said in page.error[0].value
    assert "Good: SLO" not in html(page)


def test_one_who_looks_sees_no_buttons_and_is_refused_where_it_is_posted(
    page: AppTest, keys: dict[str, str], cluster: Any
) -> None:
    entered(opened(page, "instances"), keys["ann"])
    assert "p0" in html(page)
    assert not has(page, "flip-p0")
    api, ann = (
        resources.api(DashboardSettings.load()),
        Account("ann", OPERATE, keys["ann"]),
    )  # as if the page were wrong
    with pytest.raises(NotAllowed, match="'ann' may look and not operate"):
        api.operate(Intent(Action.FLIP, "p0", Role.PREFILL, 0, last_ready=False), "4f", ann)
    with pytest.raises(NotAllowed):
        api.set_policies({"split": None}, ann)
    assert cluster.posts == []
    assert cluster.policy_changes == []


def test_one_who_operates_is_named_in_the_audit(page: AppTest, keys: dict[str, str], cluster: Any) -> None:
    entered(opened(page, "instances"), keys["ben"])
    button(page, "flip-p0").click().run()
    button(page, "confirm").click().run()
    finish(page)
    assert cluster.posts[0][3] == "ben"


def test_a_key_taken_out_of_the_file_ends_it(page: AppTest, keys: dict[str, str], tmp_path: Path) -> None:
    entered(page, keys["ben"])
    assert "Good: SLO" in html(page)
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump([one for one in yaml.safe_load(file.read_text()) if one["name"] != "ben"]))
    page.run()
    assert page.text_input(key="login_key")
    assert "not known here" in page.error[0].value


def test_logging_out(page: AppTest, keys: dict[str, str]) -> None:
    entered(page, keys["ben"])
    button(page, "logout").click().run()
    assert page.text_input(key="login_key")
    page.run()
    assert page.text_input(key="login_key")


def test_without_keys_only_loopback_is_served(page: AppTest, cluster: Any) -> None:
    config.set_option("server.address", "0.0.0.0")
    page.run()
    assert not page.exception
    assert "listens on 0.0.0.0 and asks nobody for a key" in page.error[0].value
    assert cluster.reads == 0


def test_no_secret_is_shown_where_an_account_is(keys: dict[str, str], tmp_path: Path) -> None:
    account = KeyFile(tmp_path / "keys.yaml").account(keys["ben"])
    assert keys["ben"] not in repr(account)
    with pytest.raises(Unauthorized):
        KeyFile(tmp_path / "keys.yaml").account("")


def test_a_ticket_is_good_until_it_is_void() -> None:
    tickets = Tickets()
    one, other = tickets.issue("pp-a"), tickets.issue("pp-a")
    assert one != other
    assert "pp-a" not in one
    assert tickets.secret(one) == "pp-a"
    tickets.void(one)
    assert tickets.secret(one) is None
    assert tickets.secret("") is None
    assert tickets.secret(other) == "pp-a"
