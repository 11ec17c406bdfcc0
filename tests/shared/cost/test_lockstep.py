import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cost.geometry import ExpertSplit, kv_capacity_tokens
from shared.cost.library import Library
from shared.cost.step import Batch, Lockstep, StepModel

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
