"""Kinds of engines: layers, step times, memory and rates."""

from dataclasses import replace

import pytest

from shared.cost.geometry import kv_capacity_tokens
from shared.cost.kinds import EngineKind, EngineModels, Stage, even_layers
from shared.cost.library import Library
from shared.cost.pipeline import Pipeline
from shared.cost.step import Batch
from shared.errors import Incompatible, InvalidRequest

LIBRARY = Library.built_in()
GEOMETRY = LIBRARY.geometry("Llama-3-8B")  # 32 layers
PLAIN = EngineKind((Stage("A10", 32),))
UNLIKE = EngineKind((Stage("A10", 8), Stage("A100-SXM-80", 24)), 2)


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(32, 1, (32,)), (60, 4, (15,) * 4), (61, 4, (15, 15, 16, 15)), (10, 4, (2, 3, 3, 2))],
)
def test_layers_are_divided_as_vllm_divides_them(layers: int, stages: int, counts: tuple[int, ...]) -> None:
    assert even_layers(layers, stages) == counts


def test_one_stage_is_the_plain_step_model() -> None:
    models = EngineModels(LIBRARY, GEOMETRY)
    batch = Batch(((512, 0),), 8, 8000)
    assert models.times(PLAIN).step_time_s(batch) == LIBRARY.step_model("A10", "Llama-3-8B").step_time_s(batch)
    assert models.times(PLAIN) is models.times(EngineKind((Stage("A10", 32),)))


def test_stages_have_their_own_layers_and_the_tightest_memory_counts() -> None:
    models = EngineModels(LIBRARY, GEOMETRY)
    times = models.times(UNLIKE)
    assert isinstance(times, Pipeline)
    assert times.lanes == UNLIKE.lanes == 2
    part = replace(GEOMETRY, layers=24)
    tight = kv_capacity_tokens(LIBRARY.catalogue.get("A100-SXM-80"), part, tensor_parallel=2)
    loose = kv_capacity_tokens(LIBRARY.catalogue.get("A10"), replace(GEOMETRY, layers=8), tensor_parallel=2)
    assert models.kv_tokens(UNLIKE) == min(tight, loose)
    assert UNLIKE.accelerators == 4
    assert str(UNLIKE) == "2 x A10 + 2 x A100-SXM-80"


def test_layers_that_do_not_sum_up_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"\[8, 25\].* 32 of Llama-3-8B"):
        EngineModels(LIBRARY, GEOMETRY).times(EngineKind((Stage("A10", 8), Stage("A10", 25))))


def test_a_model_that_does_not_fit_says_what_is_missing() -> None:
    models = EngineModels(LIBRARY, LIBRARY.geometry("Llama-2-70B"))
    with pytest.raises(Incompatible, match=r"Llama-2-70B does not fit 1 x A10: weights of 13\d\.\d GB in 2\d\.\d GB"):
        models.require_fit(EngineKind((Stage("A10", 80),)), 4096)
    models, card = EngineModels(LIBRARY, LIBRARY.geometry("Llama-3.1-8B")), EngineKind((Stage("RTX-4090", 32),))
    assert models.require_fit(card, 32_768) > 32_768
    with pytest.raises(Incompatible, match=r"leave KV for 4\d+ tokens of a request, which may need 131072"):
        models.require_fit(card, 131_072)


def test_what_policies_know_of_a_pipeline_counts_decodes_of_all_lanes() -> None:
    models = EngineModels(LIBRARY, GEOMETRY)
    kind = EngineKind((Stage("A10", 16), Stage("A10", 16)))
    step = models.step_rates(kind, 512)
    times = models.times(kind)
    told, real = step.decode_s(64, 64 * 1024), times.decode_time_s(32, 32 * 1024)
    assert told == pytest.approx(real, rel=0.1)


def test_stages_of_a_mixture_of_experts_share_its_experts() -> None:
    """Each stage has its part of them: a pipeline of four takes about as long as the whole model over all layers."""
    geometry = LIBRARY.geometry("Mixtral-8x7B")
    models = EngineModels(LIBRARY, geometry)
    kind = EngineKind((Stage("A100-SXM-80", 8),) * 4)
    assert models.kv_tokens(kind) > 100_000
    assert sum(geometry.part(8).expert_parameters() for _ in range(4)) == geometry.expert_parameters()
    whole = LIBRARY.step_model("A100-SXM-80", "Mixtral-8x7B", 1, 4)
    assert models.times(kind).decode_time_s(8, 8192) == pytest.approx(whole.decode_time_s(8, 8192), rel=0.5)
