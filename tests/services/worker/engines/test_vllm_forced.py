"""An answer that is run again repeats what is known and goes on as before, on a real engine with disturbed logits."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from services.worker.engines.vllm_patches import FORCED, ForcedTokensV2
from tests.services.worker.engines.own_engine import found_by

KNOWN = 13
KINDS = ("seed", "penalties", "seed and penalties", "least", "grammar")


@pytest.fixture(scope="module", params=[False, True], ids=["one step at a time", "overlapping"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """With vLLM's asynchronous scheduling and without."""
    return found_by("tests.services.worker.engines.forced_run", tmp_path_factory.mktemp("engine"), request.param)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_the_sampler_goes_on_as_if_it_had_chosen_the_known_tokens(found: dict[str, Any], kind: str) -> None:
    """All of its logits up to there were disturbed, which without the known tokens leads to another answer."""
    answer = found["answers"][kind]
    assert len(answer["first"]) > KNOWN
    assert answer["free"][:KNOWN] != answer["first"][:KNOWN]
    assert answer["shaken"] >= KNOWN
    assert answer["forced"] == answer["first"]
    assert len(set(answer["ends"])) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_several_runs_beside_each_other_keep_apart(found: dict[str, Any]) -> None:
    assert found["together"] == [found["answers"]["seed and penalties"]["first"]] * 4


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_is_no_token_is_refused(found: dict[str, Any]) -> None:
    assert found["refused"] == "forced token ids must be 0 to 4095"


def test_the_second_model_runner_is_given_the_same() -> None:
    """Its processors are called with slots and lengths; a prompt that goes on has none of its own tokens."""
    prompts = SimpleNamespace(np=np.array([4, 6, 9]))
    forced = ForcedTokensV2(None, SimpleNamespace(prompt_len=prompts))
    assert forced.add_request(2, SamplingParams(extra_args={FORCED: [3, 1]}))
    assert forced.add_request(1, SamplingParams(extra_args={FORCED: [2]}))
    assert not forced.add_request(0, SamplingParams())

    def chosen(lengths: dict[int, int]) -> list[int]:
        context = SimpleNamespace(
            idx_mapping_np=np.array(list(lengths)), seq_lens_upper_bound_np=np.array(list(lengths.values()))
        )
        logits = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]] * len(lengths))
        return [int(row.argmax()) for row in forced.apply(logits, context)]

    assert chosen({2: 9, 0: 4, 1: 6}) == [3, 4, 2]
    assert chosen({1: 7, 2: 10}) == [4, 1]
    assert chosen({2: 8}) == [4]
    assert not forced.add_request(2, SamplingParams())
    assert chosen({2: 9}) == [4]
