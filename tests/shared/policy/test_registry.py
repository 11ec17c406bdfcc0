"""Policies as a person writes them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.domain.policies import KINDS, PolicySet
from shared.domain.route import PolicySpec
from shared.errors import InvalidRequest
from shared.policy import registry
from shared.policy.decode_admission import PredictedEnd
from shared.policy.dispatch import PowerOfTwo
from shared.policy.papers.cronus import CronusSplit
from shared.policy.papers.huawei import Penalty, Workload
from shared.policy.papers.tetriinfer import IdleFlip, ReserveStatic
from shared.policy.papers.thunderserve import PlanRoute, PlanRoutes
from shared.policy.registry import from_file, from_words, in_words
from shared.policy.split import FractionSplit

DOCS = Path(__file__).parents[3] / "docs"


def test_every_name_makes_its_policy() -> None:
    for kind, table in registry.KINDS.items():
        for name in table:
            assert registry.make(kind, PolicySpec(name)).name == name
            assert getattr(registry, kind)(name).name == name


def test_parameters_are_checked_and_converted() -> None:
    assert registry.split("fraction", {"fraction": 1}) == FractionSplit(1.0)
    made = registry.dispatch("power_of_two", {"end": "upper", "unpredicted_tokens": 7})
    assert made == PowerOfTwo(PredictedEnd.UPPER, 7)
    assert registry.placement("workload", {"penalty": "linear"}) == Workload(penalty=Penalty.LINEAR)
    assert registry.split("cronus", {"include_zero": False, "budget": 256}) == CronusSplit(False, 256)
    assert registry.decode_admission("reserve_static", {"end": "upper"}) == ReserveStatic(PredictedEnd.UPPER)
    assert registry.role_flip("idle", {"for_s": 5}) == IdleFlip(for_s=5.0)
    routes = [["p", "d", 3], ["", "e", 0.5]]
    assert registry.placement("plan", {"routes": routes}) == PlanRoutes(
        (PlanRoute("p", "d", 3.0), PlanRoute("", "e", 0.5))
    )


@pytest.mark.parametrize(
    ("make", "name", "parameters", "says"),
    [
        (registry.placement, "best", {}, "known: adaptive, least_load, memory, plan, round_robin"),
        (registry.split, "full", {"fraction": 0.5}, "no parameter 'fraction'; it takes no parameters"),
        (registry.split, "fraction", {"share": 0.5}, "it takes fraction"),
        (registry.split, "fraction", {"fraction": "half"}, "must be of type float"),
        (registry.split, "fraction", {"fraction": True}, "must be of type float"),
        (registry.split, "fraction", {"fraction": 1.5}, "0..1"),
        (registry.dispatch, "power_of_two", {"end": "top"}, "one of lower, middle, upper"),
        (registry.prefill_order, "sjf", {"window": 1.5}, "must be of type int"),
        (registry.placement, "workload", {"penalty": "steep"}, "one of exp, power, linear"),
        (registry.placement, "workload", {"theta": 0}, "theta must be positive"),
        (registry.placement, "memory", {"unpredicted_tokens": -1}, "must not be negative"),
        (registry.placement, "single", {"instance": 7}, "must be of type str"),
        (registry.placement, "plan", {"routes": [["p", "d"]]}, "must list .prefill, decode, share., not .'p', 'd'."),
        (registry.placement, "plan", {"routes": [["p", "d", "x"]]}, "must list"),
        (registry.placement, "plan", {"routes": 5}, "must list"),
        (registry.placement, "plan", {"routes": [["p", "d", 0]]}, "a positive share"),
        (registry.placement, "plan", {"routes": [["p", "", 1]]}, "needs a decode instance"),
        (registry.placement, "plan", {"routes": [["p", "d", 1], ["p", "d", 2]]}, "listed twice"),
        (registry.split, "cronus", {"include_zero": 1}, "must be of type bool"),
        (registry.split, "cronus", {"budget": -1}, "budget must not be negative"),
        (registry.split, "cronus", {"budget": True}, "must be of type int"),
        (registry.decode_admission, "reserve_static", {"unpredicted_tokens": -1}, "must not be negative"),
        (registry.decode_admission, "reserve_dynamic", {"end": "best"}, "one of lower, middle, upper"),
        (registry.role_flip, "lazy", {}, "unknown role flip policy 'lazy'; known: idle, off, predictive"),
        (registry.role_flip, "idle", {"threshold_share": 0}, "threshold_share must lie in 0..1"),
        (registry.role_flip, "idle", {"for_s": float("nan")}, "idle.for_s must be finite"),
        (registry.step_budget, "on", {"tokens": 3}, "step budget policy 'on' has no parameter 'tokens'"),
        (registry.placement, "prefix", {}, "placement policy 'prefix' was removed; use 'adaptive' instead"),
        (registry.dispatch, "least_interference", {}, "was removed; use 'power_of_two' instead"),
        (registry.prefill_order, "least_slack", {}, "was removed; use 'sjf' instead"),
        (registry.role_flip, "pressure", {"ratio": 2}, "was removed; use 'predictive' instead"),
    ],
)
def test_mistakes_are_named(make: Any, name: str, parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        make(name, parameters)


def test_kinds_are_those_of_a_policy_set_and_its_defaults_can_be_made() -> None:
    assert tuple(registry.KINDS) == KINDS
    for kind in KINDS:
        registry.make(kind, PolicySet().spec(kind))
    with pytest.raises(InvalidRequest, match="no policy 'prefix'; it was removed; use 'adaptive' instead"):
        from_words("prefix")
    assert all(not any(name in table for table in registry.KINDS.values()) for name in registry.SUCCESSORS)
    with pytest.raises(InvalidRequest, match="no kind of policy 'splitt'; known: placement, split"):
        registry.make("splitt", PolicySpec("full"))


# Policies as a person writes them


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
        ({"role_flip": True}, "role_flip: unknown role flip policy 'on'; known: idle, off, predictive"),
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


# The documentation names what the registry has


def documented() -> Iterator[tuple[str, set[str]]]:
    """The table of docs/deciding.md: a kind and the policies that it names."""
    for line in (DOCS / "deciding.md").read_text().splitlines():
        found = re.match(r"\| `(\w+)` \| (.*?) \|", line)
        if found and found[1] in KINDS:
            yield found[1], set(re.findall(r"`(\w+)`", found[2]))


def test_the_docs_name_exactly_the_policies_that_there_are() -> None:
    assert dict(documented()) == {kind: set(table) for kind, table in registry.KINDS.items()}


def test_the_policies_that_the_simulator_takes_are_those() -> None:
    (line,) = re.findall(r"^Kinds: (.*?)\. ", (DOCS / "simulate.md").read_text(), re.MULTILINE)
    assert re.findall(r"`(\w+)`", line) == list(KINDS)
