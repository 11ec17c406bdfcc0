"""The login, and the rights of an account."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from streamlit import config
from streamlit.testing.v1 import AppTest

from dashboard.console import shared_api
from dashboard.dashboard_settings import DashboardSettings
from dashboard.login import Account, KeyFile, NotAllowed, Tickets
from services.launcher.cluster_keys import add_key
from shared.errors import Unauthorized
from shared.runtime.keys import LOOK, OPERATE
from tests.dashboard.pages import button, confirm, has, html, opened


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """API keys of a read-only account, of an operator, and one without a role."""
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


def test_without_a_key_each_page_is_the_login_form(page: AppTest, keys: dict[str, str], cluster: Any) -> None:
    for path in ("", "instances", "plan"):
        opened(page, path).run()
        assert not page.exception
        assert page.text_input(key="login_key")
        assert "polyphase-demo" not in html(page)
    assert cluster.reads == 0


@pytest.mark.parametrize(("name", "text"), [("wrong", "Unknown API key"), ("bot", "no dashboard role")])
def test_keys_that_are_refused(page: AppTest, keys: dict[str, str], name: str, text: str) -> None:
    entered(page, keys.get(name, "pp-wrong"))
    assert not page.exception
    assert text in page.error[0].value
    assert "Good: SLO" not in html(page)


def test_a_read_only_account_has_no_buttons_and_no_calls(page: AppTest, keys: dict[str, str], cluster: Any) -> None:
    entered(opened(page, "instances"), keys["ann"])
    assert "p0" in html(page)
    assert not has(page, "flip-p0")
    assert not has(opened(page, "requests", request="job-2").run(), "move-job-2")
    ann = Account("ann", OPERATE, keys["ann"])  # as if the page had shown the buttons
    with pytest.raises(NotAllowed, match="'ann' has the role 'look', which changes nothing"):
        shared_api(DashboardSettings.load()).change(ann, lambda: pytest.fail("called"))
    assert cluster.posts == []


def test_the_audit_names_the_operator(page: AppTest, keys: dict[str, str], cluster: Any) -> None:
    entered(opened(page, "instances"), keys["ben"])
    confirm(page, "flip-p0")
    assert cluster.posts[0][3] == "ben"


def test_a_key_that_is_removed_from_the_file(page: AppTest, keys: dict[str, str], tmp_path: Path) -> None:
    entered(page, keys["ben"])
    assert "Good: SLO" in html(page)
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump([one for one in yaml.safe_load(file.read_text()) if one["name"] != "ben"]))
    page.run()
    assert page.text_input(key="login_key")
    assert "Unknown API key" in page.error[0].value


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
    assert "listens on 0.0.0.0 and requires no login" in page.error[0].value
    assert cluster.reads == 0


def test_an_accounts_representation_has_no_secret(keys: dict[str, str], tmp_path: Path) -> None:
    account = KeyFile(tmp_path / "keys.yaml").account(keys["ben"])
    assert keys["ben"] not in repr(account)
    with pytest.raises(Unauthorized):
        KeyFile(tmp_path / "keys.yaml").account("")


def test_a_ticket_is_valid_until_it_is_void() -> None:
    tickets = Tickets()
    one, other = tickets.issue("pp-a"), tickets.issue("pp-a")
    assert one != other
    assert "pp-a" not in one
    assert tickets.secret(one) == "pp-a"
    tickets.void(one)
    assert tickets.secret(one) is None
    assert tickets.secret("") is None
    assert tickets.secret(other) == "pp-a"
