"""An answer that one real engine has begun goes on in another one, and in the same one, as if it had not moved."""

from typing import Any

import numpy as np
import pytest

from tests.services.worker.engines.own_engine import found_by
from tests.services.worker.engines.resumed_run import AFTER, TOKENS, kinds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
Found = dict[str, Any]
SCRIPT = "tests.services.worker.engines.resumed_run"


@pytest.fixture(scope="module", params=[False, True], ids=["one step at a time", "overlapping"])
def begun(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """With vLLM's asynchronous scheduling and without; so are the answers' rests, the other way round. The second of
    the engines that these move to has no prefix cache.
    """
    source = found_by(SCRIPT, tmp_path_factory.mktemp("source"), request.param)
    target = found_by(SCRIPT, tmp_path_factory.mktemp("target"), not request.param, source, not request.param)
    return {"source": source, **target}


def same(rest: Found, whole: Found, after: int) -> bool:
    """Whether this is what the whole answer has after so many tokens."""
    if [rest["tokens"], rest["end"]] != [whole["tokens"][after:], whole["end"]] or rest["prompt_logprobs"]:
        return False
    rows = whole["rows"][after:]
    return len(rest["rows"]) == len(rows) and all(
        ids == expected and np.allclose(np.frombuffer(values, "<f4"), np.frombuffer(wanted, "<f4"), atol=2e-3)
        for (ids, values), (expected, wanted) in zip(rest["rows"], rows, strict=True)
    )


@pytest.mark.parametrize("kind", kinds())
def test_an_answer_goes_on_as_if_it_had_not_moved(begun: Found, kind: str) -> None:
    answer, rests = begun["source"][kind], begun["rests"][kind]
    whole = answer["whole"]
    assert len(answer["states"]) >= 3
    for after in answer["states"]:
        assert answer["firsts"][after] == whole["tokens"][:after]
        assert same(rests[after], whole, after), (after, rests[after], whole)
        assert same(answer["rests"][after], whole, after), (after, answer["rests"][after], whole)


def test_an_answer_whose_state_is_lost_is_generated_again_and_given_out_once(begun: Found) -> None:
    for kind, rests in begun["lost"].items():
        whole = begun["source"][kind]["whole"]
        assert all(same(rest, whole, after) for after, rest in rests.items())


def test_known_tokens_are_computed_in_one_step(begun: Found) -> None:
    """The first new token comes from that step; without the state each known token takes a step."""
    later = TOKENS - AFTER[-1] - 1
    assert begun["decodes"] == [later, later, TOKENS - 1]


def test_an_answer_that_leaves_again_and_again_is_the_same(begun: Found) -> None:
    """At whichever moments it does."""
    for kind, answer in begun["hopping"].items():
        whole = begun["source"][kind]["whole"]
        assert answer == [whole["tokens"], whole["end"]], kind
