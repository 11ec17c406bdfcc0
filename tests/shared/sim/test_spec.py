"""The policies of a run, from words."""

import pytest

from shared.domain.kv import Codec
from shared.errors import InvalidRequest
from shared.policy.dispatch import PowerOfTwo, RandomDispatch
from shared.policy.placement import LeastLoad, RoundRobin
from shared.policy.predictive_flip import PredictiveFlip
from shared.policy.prefill_order import Sjf
from shared.policy.split import FractionSplit, NoSplit
from shared.sim.spec import FirstToken, RunSpec, with_words

BASE = RunSpec(seed=7)


def test_parts_in_any_order_and_the_rest_stays() -> None:
    run = with_words(BASE, "dispatch=random + round_robin")
    assert run.policies.placement == RoundRobin()
    assert run.policies.dispatch == RandomDispatch()
    assert run.policies.split == BASE.policies.split
    assert (run.label, run.seed) == ("dispatch=random + round_robin", 7)


def test_parameters() -> None:
    run = with_words(BASE, "least_load+fraction:fraction=0.25+power_of_two+role_flip=predictive:for_s=10,most=3")
    assert run.policies.placement == LeastLoad()
    assert run.policies.split == FractionSplit(0.25)
    assert run.policies.dispatch == PowerOfTwo()
    assert run.role_flip == PredictiveFlip(most=3, for_s=10.0)


def test_order_inside_an_instance_and_settings_of_the_run() -> None:
    run = with_words(BASE, "sjf+codec=int8+first_token=decode+split=none+migration=off")
    assert isinstance(run.prefill_order, Sjf)
    assert run.codec is Codec.INT8
    assert run.first_token is FirstToken.DECODE
    assert (BASE.migration, run.migration) == (True, False)
    assert run.policies.split == NoSplit()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("fastest", "no policy 'fastest'; known: placement: "),
        ("random", r"'random' is of several kinds; write (split|dispatch)=random or"),
        ("least_load+round_robin", "two parts are of kind placement"),
        ("where=least_load", "no kind of policy 'where'; known: placement, split"),
        ("split=least_load", "unknown split policy 'least_load'"),
        ("fraction:fraction", "written key=value, not 'fraction'"),
        ("fraction:fraction=half", "fraction.fraction must be of type float"),
        ("fraction:shares=0.5", "no parameter 'shares'"),
        ("codec=zip", "codec must be one of raw, int8"),
        ("migration=maybe", "migration must be one of on, off, not 'maybe'"),
        ("codec=raw:x=1", "codec takes no parameters"),
        ("least_load+", "an empty part"),
        ("", "an empty part"),
    ],
)
def test_errors(words: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        with_words(BASE, words)
