"""The real engine under requests that no front end lets through: each fails alone, and the others keep their pace."""

from typing import Any

import pytest

from tests.services.worker.engines.own_engine import found_by

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """With asynchronous scheduling; engines of `test_vllm_pipeline` and `test_vllm_forced` run without it, too."""
    answers = found_by("tests.services.worker.engines.engine_run", tmp_path_factory.mktemp("engine"))
    assert answers["overlapping"] == 2
    return answers


def test_a_request_that_cannot_be_computed_fails_alone_and_says_why(found: dict[str, Any]) -> None:
    ends = found["refusals"]["ends"]
    assert {name: end[0] for name, end in ends.items()} == dict.fromkeys(ends, "refused") | {"grammar": "error"}
    assert ends["too long"][1] == "the prompt must have 1 to 2047 tokens, got 3995"
    assert "token ids must be 0 to 4095" in ends["not a token"][1]
    assert ends["budget"][1].startswith("thinking_token_budget 5: this instance has no reasoning parser")
    assert found["refusals"]["steady"] == ["length", 300]


def test_log_probabilities_keep_their_shape_also_where_there_are_none(found: dict[str, Any]) -> None:
    assert found["scored"] == {
        "1": [0, 4, 0, 0, 1, 2, 2],
        "2": [1, 4, 4, 4, 1, 2, 2],
        "700": [699, 4, 699 * 4, 699 * 4, 1, 2, 2],
    }


def test_a_seed_draws_the_same_answer_however_its_prompt_was_cut(found: dict[str, Any]) -> None:
    seeded = found["seeded"]
    assert seeded["ends"] == ["length"] * 4
    assert seeded["tokens"] == [seeded["tokens"][0]] * 4


def test_a_dear_grammar_holds_up_nobody_and_its_abort_frees_all(found: dict[str, Any]) -> None:
    grammars = found["grammars"]
    assert grammars["fine"] in ("length", "stop")
    assert grammars["compiling"]
    assert grammars["gap_s"] < 8.0  # of a machine that pauses; the compilation takes longer
    assert found["freed"]["free"] == found["freed"]["total"]
    assert found["freed"]["waiting"] == 0


def test_an_engine_that_waits_for_a_grammar_does_not_spin(found: dict[str, Any]) -> None:
    assert 0 <= found["grammars"]["turns_a_second"] < 1500


def test_a_full_staging_pool_does_not_hold_up_the_engine(found: dict[str, Any]) -> None:
    staging = found["staging"]
    assert staging["refused"] > 20
    assert staging["held"] > 0
    assert staging["refusal_s"] < 0.01  # of most: the machine may pause in one
