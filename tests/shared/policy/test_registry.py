from collections.abc import Callable
from typing import Any

import pytest

from shared.errors import InvalidRequest
from shared.policy import registry
from shared.policy.dispatch import PowerOfTwo
from shared.policy.lengths import PredictedEnd
from shared.policy.split import FractionSplit


def test_every_name_makes_its_policy() -> None:
    makers: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
        (registry.PLACEMENT, registry.placement),
        (registry.SPLIT, registry.split),
        (registry.DISPATCH, registry.dispatch),
        (registry.PREFILL_ORDER, registry.prefill_order),
        (registry.DECODE_ADMISSION, registry.decode_admission),
    ]
    for table, make in makers:
        for name in table:
            assert make(name).name == name


def test_parameters_are_checked_and_converted() -> None:
    assert registry.split("fraction", {"fraction": 1}) == FractionSplit(1.0)
    made = registry.dispatch("power_of_two", {"end": "upper", "unpredicted_tokens": 7})
    assert made == PowerOfTwo(PredictedEnd.UPPER, 7)


@pytest.mark.parametrize(
    ("make", "name", "parameters", "says"),
    [
        (registry.placement, "best", {}, "known: least_load, round_robin"),
        (registry.split, "full", {"fraction": 0.5}, "no parameter 'fraction'; it takes no parameters"),
        (registry.split, "fraction", {"share": 0.5}, "it takes fraction"),
        (registry.split, "fraction", {"fraction": "half"}, "must be of type float"),
        (registry.split, "fraction", {"fraction": True}, "must be of type float"),
        (registry.split, "fraction", {"fraction": float("nan")}, "0..1"),
        (registry.dispatch, "power_of_two", {"end": "top"}, "one of lower, middle, upper"),
        (registry.prefill_order, "sjf", {"window": 1.5}, "must be of type int"),
    ],
)
def test_mistakes_are_named(make: Any, name: str, parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        make(name, parameters)
