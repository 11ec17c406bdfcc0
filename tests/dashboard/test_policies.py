"""The page Policies."""

import re
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from dashboard.policies_page import parameters_of
from shared.errors import InvalidRequest
from tests.dashboard.pages import button, finish, has, html, opened


@pytest.fixture
def policies(page: AppTest) -> AppTest:
    return opened(page, "policies").run()


def test_who_chose_them_and_who_does_not_follow(policies: AppTest) -> None:
    assert not policies.exception
    shown = html(policies)
    assert "fraction (fraction = 0.5)" in shown
    assert "<b>anna</b>" in shown
    assert re.search(r"<b>d0</b>.*not yet", shown)
    assert "1 of 2 follow revision 3" in shown


def test_one_is_changed_after_a_question(policies: AppTest, cluster: Any) -> None:
    policies.text_input(key="policy_parameters-split-fraction").set_value("fraction: 0.25").run()
    button(policies, "policy_change").click().run()
    assert "split: fraction → fraction (fraction = 0.25)" in policies.markdown[0].value
    assert cluster.policy_changes == []
    button(policies, "confirm").click().run()
    finish(policies, "policies_operations")
    assert cluster.policy_changes == [({"split": {"name": "fraction", "parameters": {"fraction": 0.25}}}, "dashboard")]
    assert policies.success[0].value.startswith("Changed split")
    assert not has(policies, "confirm")


def test_back_to_the_cluster_file(policies: AppTest, cluster: Any) -> None:
    policies.selectbox(key="policy_kind").select("placement").run()
    policies.selectbox(key="policy_name-placement").select("as the cluster file says").run()
    button(policies, "policy_change").click().run()
    button(policies, "confirm").click().run()
    finish(policies, "policies_operations")
    assert cluster.policy_changes == [({"placement": None}, "dashboard")]


def test_a_refusal_names_what_is_wrong(policies: AppTest, cluster: Any) -> None:
    cluster.refusal = InvalidRequest("split policy 'fraction' has no parameter 'part'")
    button(policies, "policy_change").click().run()
    button(policies, "confirm").click().run()
    finish(policies, "policies_operations")
    assert "has no parameter 'part'" in policies.warning[0].value


@pytest.mark.parametrize("text", ["fraction", "a: [", "}{"])
def test_parameters_that_are_none(policies: AppTest, cluster: Any, text: str) -> None:
    policies.text_input(key="policy_parameters-split-fraction").set_value(text).run()
    button(policies, "policy_change").click().run()
    assert not has(policies, "confirm")
    assert "written as name: value" in policies.warning[0].value


def test_parameters() -> None:
    assert parameters_of("") == {}
    assert parameters_of("a: 1, b: two, c: [1, 2]") == {"a": 1, "b": "two", "c": [1, 2]}
