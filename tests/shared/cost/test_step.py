"""Step times of an engine, and of data-parallel engines in lockstep."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cost.geometry import ExpertSplit, kv_capacity_tokens
from shared.cost.library import Library
from shared.cost.step import Batch, StepModel
from shared.cost.step_variants import Lockstep
from shared.errors import InvalidRequest

# Devices with tables of their own, like another, and with defaults only; models of each kind of attention and MLP.
PAIRS = (
    ("A100", "Llama-3-8B", 1),
    ("H100", "Qwen3-32B", 2),
    ("4090", "Llama-3.1-8B", 1),
    ("A10", "Qwen2-7B", 1),
    ("MI300X", "Mixtral-8x7B", 1),
    ("V100", "OPT-13B", 2),
    ("H200", "DeepSeek-V2-Lite", 1),
    ("CPU", "OPT-125M", 1),
    ("L40S", "Gemma-2-9B", 1),
    ("Gaudi3", "Qwen3-30B-A3B", 1),
    ("T4", "Mistral-7B", 2),
)


@pytest.fixture(scope="module")
def models(library: Library) -> tuple[StepModel, ...]:
    return tuple(library.step_model(device, model, degree) for device, model, degree in PAIRS)


CHUNKS = st.lists(st.tuples(st.integers(1, 2048), st.integers(0, 8192)), max_size=4)
COUNTS = st.integers(0, 256)
BATCHES = st.builds(
    lambda chunks, count, mean: Batch(tuple(chunks), count, count * mean), CHUNKS, COUNTS, st.integers(1, 8192)
)
KINDS = st.integers(0, len(PAIRS) - 1)


def test_an_empty_step_costs_nothing(models: tuple[StepModel, ...]) -> None:
    assert models[0].step_time_s(Batch()) == 0.0
    assert models[0].decode_span_s(0, 0, 10) == 0.0
    assert models[0].decode_span_s(4, 100, 0) == 0.0


def test_orders_of_magnitude(library: Library) -> None:
    a100 = library.step_model("A100", "Llama-3-8B")
    # 16 GB of weights at 2 TB/s are 8 ms; a prompt of 1024 tokens is 16 TFLOP, 53 ms at 312 TFLOPS.
    assert 8e-3 < a100.decode_time_s(1, 1000) < 14e-3
    assert 53e-3 < a100.prefill_time_s(1024) < 90e-3
    assert a100.decode_time_s(64, 64_000) < 2.5 * a100.decode_time_s(1, 1000)


def test_a_decode_step_reads_all_weights_and_kv_at_no_more_than_the_peak(models: tuple[StepModel, ...]) -> None:
    for model in models:
        if model.geometry.experts or model.geometry.window_layers:
            continue
        g = model.geometry  # an untied input embedding is looked up, not read whole
        read = g.weight_bytes() - (0 if g.tied_embeddings else 2 * g.vocab * g.hidden) + 16_000 * g.kv_bytes_per_token()
        least = read / model.tensor_parallel / model.accelerator.bandwidth_bytes_s
        assert model.decode_time_s(16, 16_000) > 0.95 * least


@given(KINDS, BATCHES, st.integers(1, 512))
def test_more_work_never_takes_less(models: tuple[StepModel, ...], kind: int, batch: Batch, more: int) -> None:
    model = models[kind]
    base = model.step_time_s(batch) * (1 - 1e-9)
    prefill, count, contexts = batch.prefill, batch.decode_count, batch.decode_context_tokens
    grown = [Batch((*prefill, (more, 0)), count, contexts)]
    if prefill:
        (tokens, context), *others = prefill
        grown += [
            Batch((chunk, *others), count, contexts) for chunk in ((tokens + more, context), (tokens, context + more))
        ]
    if count:
        grown += [Batch(prefill, count, contexts + more), Batch(prefill, count + 1, contexts + contexts // count)]
    assert all(model.step_time_s(one) >= base for one in grown)


@given(KINDS, CHUNKS, COUNTS, CHUNKS, COUNTS, st.integers(1, 8192))
def test_one_step_is_cheaper_than_two(
    models: tuple[StepModel, ...],
    kind: int,
    chunks: list[tuple[int, int]],
    count: int,
    more_chunks: list[tuple[int, int]],
    more: int,
    mean: int,
) -> None:
    # All decodes have one context: a step knows no more of theirs than the mean, and is priced at it.
    model = models[kind]
    one, other = Batch(tuple(chunks), count, count * mean), Batch(tuple(more_chunks), more, more * mean)
    both = Batch((*one.prefill, *other.prefill), count + more, (count + more) * mean)
    apart = model.step_time_s(one) + model.step_time_s(other)
    together = model.step_time_s(both)
    # A tenth: hundreds of decodes of a few positions, where a tile for each query head costs more than its reads
    # (RTX 4090's table: 3.2 times the attention for 128 decodes of 16).
    assert together <= 1.1 * (apart + (most_lost_s(model, both) if both.prefill else 0.0))
    assert together >= max(model.step_time_s(one), model.step_time_s(other)) * (1 - 1e-3)


def most_lost_s(model: StepModel, batch: Batch) -> float:
    """The most that decodes lose beside a prefill chunk: KV read once for each query head instead of each KV head.

    Kernels that pack the query heads lose nothing. RTX 4090's table has 3.98 times the attention where 4 query heads
    share a KV head, RTX PRO 6000's 7.6 times where 8 do (128 decodes of 16384): so two steps can be cheaper than one.
    """
    count, contexts = batch.decode_count, batch.decode_context_tokens
    if not count or model.efficiencies.varlen_for(model.kv_dtype).packs_groups:
        return 0.0
    of_context_s = model.decode_time_s(count, contexts) - model.decode_time_s(count, 0)
    return (model.geometry.heads / model.geometry.kv_heads - 1.0) * of_context_s


@pytest.mark.parametrize("device", ["A100", "A30", "A10", "4090", "RTX-PRO-6000-Server", "L40S", "H100", "H200"])
@pytest.mark.parametrize("model", ["Llama-3-8B", "Qwen2-7B"])
def test_a_prefill_token_makes_decodes_dearer_by_no_more_than_the_reads_of_a_group(
    library: Library, device: str, model: str
) -> None:
    # The first example found: on an A100 this token made the step 4.7 times as long, where four reads are the most.
    cost, mixed = library.step_model(device, model), Batch(((1, 0),), 120, 637_560)
    apart = cost.decode_time_s(120, 637_560) + cost.prefill_time_s(1)
    assert cost.step_time_s(mixed) <= apart + most_lost_s(cost, mixed)


@pytest.mark.parametrize(("device", "least", "most"), [("A100", 2.0, 3.0), ("4090", 3.0, 4.0), ("H200", 1.0, 1.25)])
def test_what_a_prefill_token_costs_follows_from_cache_and_units(
    library: Library, device: str, least: float, most: float
) -> None:
    # 120 decodes of 5313 beside one chunk. 216 tiles run at a time on an A100, so that two of four query heads share
    # a read; 128 on an RTX 4090, where its table has 3.9 times the attention; an H200's kernel packs the four.
    cost = library.step_model(device, "Llama-3-8B")
    ratio = cost.step_time_s(Batch(((1, 0),), 120, 637_560)) / cost.decode_time_s(120, 637_560)
    assert least < ratio < most


@given(KINDS, st.integers(1, 200), st.integers(1, 9000), st.integers(1, 3000))
def test_a_span_is_its_steps(models: tuple[StepModel, ...], kind: int, count: int, mean: int, steps: int) -> None:
    model = models[kind]
    one_by_one = sum(model.decode_time_s(count, count * mean + i * count) for i in range(steps))
    assert model.decode_span_s(count, count * mean, steps) == pytest.approx(one_by_one, rel=1e-9)


def test_tensor_parallelism_helps_a_large_model_but_not_for_free(library: Library) -> None:
    times = [library.step_model("H100", "Llama-3.1-70B", t, 1, "fp8").decode_time_s(32, 32_000) for t in (1, 2, 4, 8)]
    for one, two in pairwise(times):
        assert one / 2.0 < two < one


def test_tensor_parallelism_over_a_slow_link_costs_more(library: Library) -> None:
    fast, slow = (library.step_model(name, "Llama-3-8B", 4) for name in ("A100-SXM-80", "L40S"))
    alone = [library.step_model(name, "Llama-3-8B") for name in ("A100-SXM-80", "L40S")]
    gain_fast = alone[0].prefill_time_s(2048) / fast.prefill_time_s(2048)
    gain_slow = alone[1].prefill_time_s(2048) / slow.prefill_time_s(2048)
    assert gain_fast > gain_slow


def test_pipeline_parallelism_adds_hops_to_a_step(library: Library) -> None:
    one, two = (library.step_model("A100", "Llama-2-70B", 2, stages) for stages in (1, 2))
    assert one.decode_time_s(8, 8000) < two.decode_time_s(8, 8000) < 1.05 * one.decode_time_s(8, 8000)


def test_a_chunked_prompt_costs_more_than_a_whole_one(library: Library) -> None:
    model = library.step_model("A100", "Llama-3-8B")
    chunks = sum(model.prefill_time_s(512, context) for context in range(0, 4096, 512))
    assert model.prefill_time_s(4096) < chunks < 1.5 * model.prefill_time_s(4096)


def test_precision_of_weights_and_kv(library: Library) -> None:
    half, quarter = (library.step_model("H100", "Llama-3-8B", 1, 1, dtype) for dtype in ("bf16", "fp8"))
    assert quarter.decode_time_s(1, 100) < 0.7 * half.decode_time_s(1, 100)
    assert quarter.kv_dtype == "bf16"


def test_the_order_of_calls_changes_nothing(library: Library) -> None:
    batches = [Batch(((512, 7),), 3, 99), Batch((), 200, 90_000), Batch(((3000, 0), (1, 5)), 0, 0)]
    first, second = (library.step_model("A10", "Llama-3-8B") for _ in range(2))
    forward = [first.step_time_s(batch) for batch in batches]
    assert [second.step_time_s(batch) for batch in reversed(batches)] == forward[::-1]


@pytest.mark.parametrize(
    ("degrees", "said"),
    [((0, 1), "at least 1"), ((1, 0), "at least 1"), ((1, 99), "exceeds the 32 layers of Llama-3-8B")],
)
def test_impossible_degrees(library: Library, degrees: tuple[int, int], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        library.step_model("A100", "Llama-3-8B", *degrees)


MODEL, CARD = "Qwen3-30B-A3B", "RTX-PRO-6000-Server"


@pytest.fixture(scope="module")
def engine(library: Library) -> StepModel:
    return library.step_model(CARD, MODEL, experts=ExpertSplit(ranks=2, engines=2))


@pytest.fixture(scope="module")
def group(engine: StepModel) -> Lockstep:
    return Lockstep(engine)


def test_a_rank_reads_its_own_experts_alone(library: Library, engine: StepModel) -> None:
    alone = library.step_model(CARD, MODEL)
    # 128 tokens reach all experts: half of them on each of two ranks, but for the traffic between the two.
    assert engine.experts_time_s(128) < 0.7 * alone.experts_time_s(128)
    assert engine.decode_time_s(64, 64_000) < alone.decode_time_s(64, 64_000)


def test_experts_that_are_cut_are_all_on_every_rank(library: Library) -> None:
    dealt, cut = (library.step_model("H200", MODEL, 4, 1, "bf16", ExpertSplit(ranks)) for ranks in (4, 1))
    # One token picks 8 of 128: dealt to four ranks it reads two whole ones of each, cut a quarter of all eight.
    assert dealt.experts_time_s(1) == pytest.approx(cut.experts_time_s(1), rel=0.3)
    assert ExpertSplit(8, 4).cut(4) == 2
    assert ExpertSplit().cut(2) == 2


def test_decodes_are_dealt_evenly(engine: StepModel, group: Lockstep) -> None:
    assert group.decode_time_s(128, 128_000) == engine.decode_time_s(64, 64_000)
    assert group.decode_time_s(3, 3000) == engine.decode_time_s(2, 2000)
    assert group.decode_time_s(0, 0) == 0.0
    assert group.decode_segments(128, 128_000, 50) == engine.decode_segments(64, 64_000, 50)
    assert group.decode_segments(0, 0, 50) == engine.decode_segments(0, 0, 50) == ((50, 0.0, 0.0),)


def test_a_prompt_of_one_engine_holds_up_the_other(engine: StepModel, group: Lockstep) -> None:
    with_prompt = group.step_time_s(Batch(((2000, 0),), 100, 100_000))
    assert with_prompt > 2.0 * group.decode_time_s(100, 100_000)
    # Half the prompts on each engine: the parts besides the experts are half as long, the experts the same.
    two = group.step_time_s(Batch(((1000, 0), (1000, 0)), 100, 100_000))
    assert engine.experts_time_s(2100) < two < with_prompt


@given(st.integers(1, 2048), st.integers(0, 200), st.integers(1, 4000), st.integers(1, 500))
def test_more_tokens_take_longer(group: Lockstep, prompt: int, count: int, mean: int, more: int) -> None:
    base = group.step_time_s(Batch(((prompt, 0),), count, count * mean))
    assert group.step_time_s(Batch(((prompt + more, 0),), count, count * mean)) >= base * (1 - 1e-9)


def test_engines_that_share_experts_have_more_room_for_kv(library: Library) -> None:
    device, geometry = library.catalogue.get(CARD), library.geometry(MODEL)
    alone, shared = (kv_capacity_tokens(device, geometry, experts=ExpertSplit(n, n)) for n in (1, 2))
    freed = geometry.expert_parameters() / 2 * 2.0
    assert shared - alone == pytest.approx(freed / geometry.kv_bytes_per_token(), rel=1e-3)
    assert 28e9 < geometry.expert_parameters() < 30e9  # of 30.5 billion
    assert library.geometry("Llama-3-8B").expert_parameters() == 0
