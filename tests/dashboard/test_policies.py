"""The Policies page."""

import re
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from dashboard.policies_page import parse_parameters
from shared.errors import InvalidRequest
from tests.dashboard.pages import button, confirm, finish, has, html, opened, shows


@pytest.fixture
def policies(page: AppTest) -> AppTest:
    return opened(page, "policies").run()


def test_policies_their_author_and_the_processes_that_lag(policies: AppTest) -> None:
    assert shows(policies, "fraction (fraction = 0.5)", "<b>anna</b>", "1 of 2 processes use revision 3")
    assert re.search(r"<b>d0</b>.*not yet", html(policies))


def test_a_change_after_its_confirmation(policies: AppTest, cluster: Any) -> None:
    policies.text_input(key="policy_parameters-split-fraction").set_value("fraction: 0.25").run()
    button(policies, "policy_change").click().run()
    assert "split: fraction → fraction (fraction = 0.25)" in policies.markdown[0].value
    assert cluster.policy_changes == []
    button(policies, "confirm").click().run()
    finish(policies)
    assert cluster.policy_changes == [({"split": {"name": "fraction", "parameters": {"fraction": 0.25}}}, "dashboard")]
    assert policies.success[0].value.startswith("The split policy has been changed: fraction → fraction")
    assert not has(policies, "confirm")


def test_back_to_the_cluster_file(policies: AppTest, cluster: Any) -> None:
    policies.selectbox(key="policy_kind").select("placement").run()
    policies.selectbox(key="policy_name-placement").select("as in the cluster file").run()
    confirm(policies, "policy_change")
    assert cluster.policy_changes == [({"placement": None}, "dashboard")]


def test_a_refusal(policies: AppTest, cluster: Any) -> None:
    cluster.refusal = InvalidRequest("split policy 'fraction' has no parameter 'part'")
    confirm(policies, "policy_change")
    assert "was refused: split policy 'fraction' has no parameter 'part'" in policies.warning[0].value


@pytest.mark.parametrize("text", ["fraction", "a: [", "}{"])
def test_invalid_parameters(policies: AppTest, text: str) -> None:
    policies.text_input(key="policy_parameters-split-fraction").set_value(text).run()
    button(policies, "policy_change").click().run()
    assert not has(policies, "confirm")
    assert "Write parameters as name: value" in policies.warning[0].value


def test_parameters() -> None:
    assert parse_parameters("") == {}
    assert parse_parameters("a: 1, b: two, c: [1, 2]") == {"a": 1, "b": "two", "c": [1, 2]}
