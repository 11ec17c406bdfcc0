"""The real engine under our policies: who enters, and when, what is computed beside decodes, and the same tokens."""

from typing import Any

import pytest

from tests.services.worker.engines.own_engine import found_by

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1200)]
LENGTHS = [300, 120, 20, 250, 60, 30, 200, 90]  # as `policy_run` submits them


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """With asynchronous scheduling; engines of `test_vllm_pipeline` and `test_vllm_forced` run without it, too."""
    return found_by("tests.services.worker.engines.policy_run", tmp_path_factory.mktemp("engine"))


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fcfs", LENGTHS),
        ("sjf", sorted(LENGTHS)),
        ("ljf", sorted(LENGTHS, reverse=True)),
        ("sjf, batches of 2", [120, 300, 20, 250, 30, 60, 90, 200]),
        # Two overtake the 300, which is next then, and so is the 120, and so on.
        ("sjf, window of 2", [20, 30, 300, 120, 60, 250, 90, 200]),
    ],
)
def test_all_that_waits_in_the_engine_is_taken_in_the_policys_order(
    found: dict[str, Any], order: str, expected: list[int]
) -> None:
    assert found["orders"][order]["entered"] == expected
    assert found["orders"][order]["ended"] == expected


def test_tokens_are_the_same_under_every_order_and_admission_and_preemptions_are_counted(found: dict[str, Any]) -> None:
    runs = {name: run for name, run in found["small_kv"].items() if name != "alone"}
    alone = found["small_kv"]["alone"]
    assert all(len(tokens) == 120 - 3 * at for at, tokens in enumerate(alone))
    for name, run in runs.items():
        assert run["tokens"] == alone, name
        assert run["told"] == run["paused"] == run["preemptions"], name
        assert run["entered"] == 8 + run["preemptions"], name


def test_reserving_admissions_preempt_less_than_greedy(found: dict[str, Any]) -> None:
    greedy, dynamic, static = (
        found["small_kv"][f"fcfs, {name}"]["preemptions"] for name in ("greedy", "reserve_dynamic", "reserve_static")
    )
    assert greedy >= 3
    assert dynamic < greedy
    assert static == 0


def test_whole_prompts_are_ordered_where_they_decode_and_wait_for_the_gate(found: dict[str, Any]) -> None:
    assert found["local_order"]["entered"] == ["local 100", "local 150", "local 200"]
    assert not any("large" in beside for beside in found["local_order"]["beside"])


def test_a_shut_gate_costs_nothing_and_opens_when_it_is_told(found: dict[str, Any]) -> None:
    shut = found["shut"]
    assert shut["turns"] <= 6  # in a second and a half
    assert shut["cpu_s"] < 0.3
    assert shut["ended"] == 0  # nobody overtook the one without room
    assert shut["entered"] == ["no room", "behind"]
    assert shut["opened_s"] < 30  # it looks by itself after 60


def test_one_that_gives_up_at_a_shut_gate_lets_the_next_one_in_and_leaves_nothing(found: dict[str, Any]) -> None:
    aborts = found["aborts"]
    assert aborts["held"] == ["too large", "small"]
    assert aborts["beside"]  # the small one ran beside the one that the large one waited for
    assert (aborts["waiting"], aborts["free"]) == (0, aborts["of"])


def test_a_prediction_that_comes_later_opens_the_gate(found: dict[str, Any]) -> None:
    assert found["late_prediction"] == {"held": True, "beside": True}


def test_imports_pass_the_gate_and_count_from_the_moment_they_have_blocks(found: dict[str, Any]) -> None:
    imports = found["imports"]
    assert imports["pulled"] == [(True, 200), (True, 200)]
    assert imports["imported"] == [imports["whole"]] * 2
    first, second, beside = imports["beside"]
    assert (first, second) == ([], ["import 1"])  # both are under way in the same step
    assert len(beside) < 2


def test_one_that_waits_for_its_grammar_keeps_nobody_out(found: dict[str, Any]) -> None:
    assert found["grammar"] == {"began": True, "compiling": True}


def test_prompts_keep_to_the_budget_that_the_tightest_target_leaves(found: dict[str, Any]) -> None:
    budget = found["budget"]
    assert max(budget["without"]) == 126  # of 128 beside two decodes
    assert budget["with"] == [45] * 8 + [40]
    assert budget["tokens with"] == budget["tokens without"]


def test_a_stream_decodes_in_the_step_after_its_kv_came_beside_a_long_prompt(found: dict[str, Any]) -> None:
    streams = found["streams"]
    assert streams["entered"] == ["stream", "heavy prompt", "long"]
    assert streams["pulled"] == [(True, 100)]
    assert streams["steps from its KV to its token"] == 0, "the first step that could have it"
    assert streams["beside it"]["stream"] == 1
    assert streams["beside it"]["long"] > 1, "the long prompt is under way"
    assert sum(streams["beside it"].values()) <= 32
    assert streams["same"]


def test_a_prompt_gives_its_blocks_up_before_a_younger_stream(found: dict[str, Any]) -> None:
    pressure = found["pressure"]
    assert pressure["preemptions"] >= 1
    assert pressure["entered"] == {"slow prompt": pressure["preemptions"] + 1, "growing stream": 1}


def test_a_chunk_size_is_changed_between_two_steps_up_to_what_the_engine_was_started_for(found: dict[str, Any]) -> None:
    chunks = found["chunks"]
    assert chunks["of 128"] == chunks["of 1024"] == [128, 72]
    assert chunks["of 48"] == [48, 48, 48, 48, 8]
    assert chunks["partly 48"] == [48, 96, 144, 192], "what is computed of a prompt does not count as queued"
    assert chunks["partly 128"] == [128]
    assert chunks["tokens 128"] == chunks["tokens 48"] == chunks["tokens 1024"]
