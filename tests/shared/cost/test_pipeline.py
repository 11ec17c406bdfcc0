"""Pipelines of unlike stages."""

from dataclasses import replace

import pytest

from shared.cost.library import Library
from shared.cost.pipeline import Pipeline
from shared.cost.step import Batch, StepModel
from shared.errors import InvalidRequest

LIBRARY = Library.built_in()


def stage(accelerator: str, layers: int) -> StepModel:
    whole = LIBRARY.step_model(accelerator, "Llama-3-8B")
    geometry = replace(whole.geometry, layers=layers)
    return StepModel(whole.accelerator, geometry, efficiencies=whole.efficiencies)


def test_a_step_is_the_sum_of_stages_or_the_bottleneck_of_all_lanes() -> None:
    fast, slow = stage("A100-SXM-80", 16), stage("A10", 16)
    batch = Batch(((512, 0),))
    both = [fast.step_time_s(batch), slow.step_time_s(batch)]
    assert Pipeline((fast, slow), lanes=1).step_time_s(batch) == pytest.approx(sum(both))
    assert Pipeline((fast, slow), lanes=2).step_time_s(batch) == pytest.approx(2 * max(both))
    assert Pipeline((fast, slow), lanes=1, hop_s=0.01).step_time_s(batch) == pytest.approx(sum(both) + 0.01)


@pytest.mark.parametrize("lanes", [1, 2])
def test_segments_are_the_steps_one_by_one(lanes: int) -> None:
    pipeline = Pipeline((stage("A100-SXM-80", 23), stage("A10", 9)), lanes=lanes, hop_s=1e-3, hop_s_per_token=1e-7)
    for count, context in ((1, 5), (8, 800), (40, 40 * 2000)):
        at = 0
        for length, first, last in pipeline.decode_segments(count, context, 300):
            for step in range(length):
                expected = pipeline.decode_time_s(count, context + at * count)
                assert first + (last - first) / max(1, length - 1) * step == pytest.approx(expected, rel=1e-9)
                at += 1
        assert at == 300


def test_a_pipeline_needs_a_stage() -> None:
    with pytest.raises(InvalidRequest, match="at least one stage"):
        Pipeline(())
