"""Policies as a person writes them."""

from typing import Any

import pytest

from shared.domain.policies import PolicySet
from shared.domain.route import PolicySpec
from shared.errors import InvalidRequest
from shared.policy import registry
from shared.policy.registry import from_file, from_words, in_words


def test_a_file_names_some_and_the_suites_defaults_hold_for_the_rest() -> None:
    said = {"split": {"name": "fraction", "fraction": 0.5}, "prefill_order": "sjf", "step_budget": False}
    assert from_file({}) == PolicySet()
    assert from_file(said) == PolicySet(
        split=PolicySpec("fraction", {"fraction": 0.5}), prefill_order=PolicySpec("sjf"), step_budget=PolicySpec("off")
    )
    assert from_file({"role_flip": False, "step_budget": True}) == PolicySet()  # YAML's off


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"split": "halves"}, "split: unknown split policy 'halves'; known: adaptive, balanced, cronus"),
        ({"split": None}, "split: expected a policy's name, or {name: …, and its parameters}, not None"),
        ({"split": {"fraction": 0.5}}, "split: expected a policy's name"),
        ({"split": {"name": "full", "parameters": {}}}, "split: split policy 'full' has no parameter 'parameters'"),
        ({"role_flip": True}, "role_flip: unknown role flip policy 'on'; known: idle, off, predictive, pressure"),
        ({"splitt": "full"}, "splitt: no kind of policy 'splitt'; known: placement"),
    ],
)
def test_errors_name_the_kind_and_the_choices(said: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        from_file(said)
    assert error.value.message.startswith(says)


@pytest.mark.parametrize("kind", registry.KINDS)
def test_words_are_read_as_they_are_written(kind: str) -> None:
    for name in registry.KINDS[kind]:
        spec = PolicySpec(name)
        assert from_words(f"{kind}={in_words(spec)}") == {kind: spec}


@pytest.mark.parametrize(
    "spec",
    [
        PolicySpec("plan", {"routes": [["p", "d", 1.5], ["", "e", 2]]}),
        PolicySpec("single", {"instance": "p-0"}),
        PolicySpec("workload", {"penalty": "linear", "theta": 0.25}),
    ],
)
def test_parameters_of_every_type(spec: PolicySpec) -> None:
    assert from_words(f" placement = {in_words(spec)} ") == {"placement": spec}
