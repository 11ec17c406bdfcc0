"""Whole runs: times worked out by hand, macro-steps against stepping, nothing lost, everything repeatable."""

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.cost.network import Link
from shared.domain.instance import Role
from shared.domain.job import Slo
from shared.domain.kv import Codec
from shared.errors import InvalidRequest
from shared.policy import registry
from shared.policy.dispatch import PowerOfTwo, RandomDispatch
from shared.policy.split import FractionSplit, NoSplit, RandomSplit
from shared.sim.cluster import simulate
from shared.sim.outcomes import Status
from shared.sim.prediction import Prediction
from shared.sim.spec import EngineLimits, FirstToken, Flip, InstanceSpec, Loss, RunSpec
from tests.shared.sim.clusters import Linear, check, drawn, instance, pair, policies, several, with_split, workload


def test_one_request_by_hand() -> None:
    # Prefill: 10 + 100 ms. KV: 100 tokens of 0.1 ms. Decode: 4 more tokens of 11 ms.
    rows = simulate(workload((1.0, 100, 5)), pair()).outcomes
    assert rows.ttft_s[0] == pytest.approx(0.110)
    assert rows.transfer_s[0] == pytest.approx(0.010)
    assert rows.jct_s[0] == pytest.approx(0.110 + 0.010 + 4 * 0.011)
    assert (rows.prefill_instance[0], rows.decode_instance[0], rows.split_tokens[0]) == (0, 1, 100)


def test_the_decode_instance_can_give_the_first_token() -> None:
    rows = simulate(workload((0.0, 100, 5)), pair(), RunSpec(first_token=FirstToken.DECODE)).outcomes
    assert rows.ttft_s[0] == pytest.approx(0.110 + 0.010 + 0.011)
    assert rows.jct_s[0] == pytest.approx(0.110 + 0.010 + 5 * 0.011)


def test_local_prefill_moves_no_kv() -> None:
    result = simulate(workload((0.0, 100, 5)), pair(), RunSpec(policies=with_split(NoSplit())))
    assert result.kv_bytes == 0.0
    assert result.outcomes.jct_s[0] == pytest.approx(0.110 + 4 * 0.011)
    assert result.outcomes.prefill_instance[0] == result.outcomes.decode_instance[0] == 1


def test_a_partial_split_computes_the_rest_at_the_decode_instance() -> None:
    result = simulate(workload((0.0, 100, 5)), pair(), RunSpec(policies=with_split(FractionSplit(0.4))))
    # 40 tokens there, their KV, then 60 tokens here, which give the first token.
    assert result.outcomes.ttft_s[0] == pytest.approx(0.050 + 0.004 + 0.070)
    assert result.kv_bytes == pytest.approx(40 * 100)


def test_a_stream_does_not_wait_behind_a_prompt_whose_kv_has_no_room() -> None:
    # The first request leaves no room for the second, which waits from its first chunk on. When the third comes, after
    # it, with its first token, the second has none yet.
    limits = EngineLimits(256, 64)
    work = workload((0.0, 250, 300), (0.3, 1_000, 5), (0.6, 100, 20))
    decode = instance("d0", Role.DECODE, kv_tokens=1_216, limits=limits)
    rows = simulate(work, [*several(2, 0, limits=limits), decode]).outcomes
    assert rows.last_token_s[0] > 3.0
    assert rows.last_token_s[1] > rows.last_token_s[0]
    assert rows.tpot_s[2] < 0.013


def test_streaming_hides_the_transfer_behind_the_prefill() -> None:
    # Chunks of 256: 266 ms each; the first one's KV (25.6 ms) is over before the second one is computed.
    work = workload((0.0, 512, 2))
    for streaming, shown in ((True, 0.0256), (False, 0.0512)):
        rows = simulate(work, pair(), RunSpec(streaming=streaming)).outcomes
        assert rows.transfer_s[0] == pytest.approx(shown)


def test_a_codec_shortens_the_transfer() -> None:
    raw, coded = (simulate(workload((0.0, 100, 5)), pair(), RunSpec(codec=c)) for c in (Codec.RAW, Codec.INT4))
    assert coded.kv_bytes == pytest.approx(raw.kv_bytes * 4.75 / 16)
    assert coded.outcomes.transfer_s[0] == pytest.approx(raw.outcomes.transfer_s[0] * 4.75 / 16)


@pytest.mark.parametrize(("mb_s", "share"), [(10.0, 1.0), (0.06, 8.75 / 16), (0.03, 4.75 / 16)])
def test_a_class_that_allows_loss_gets_it_where_the_link_would_delay_a_token(mb_s: float, share: float) -> None:
    # KV of 10 kB, and 0.1 s for a token.
    slo = Slo("c", 2.0, 0.1, lossy_kv=Codec.INT4)
    specs = [replace(one, link=Link(mb_s * 1e6, 0.0, 1.0)) for one in pair()]
    coded = simulate(workload((0.0, 100, 5)), specs, RunSpec(slo=slo))
    exact = simulate(workload((0.0, 100, 5)), specs, RunSpec(slo=Slo("c", 2.0, 0.1)))
    assert exact.kv_bytes == pytest.approx(10_000)
    assert coded.kv_bytes == pytest.approx(10_000 * share)


def test_transfers_into_one_instance_contend() -> None:
    specs = several(2, 1)
    rows = simulate(workload((0.0, 100, 5), (0.0, 100, 5)), specs).outcomes
    assert sorted(rows.transfer_s) == pytest.approx([0.010, 0.020])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "run",
    [
        RunSpec(),
        RunSpec(first_token=FirstToken.DECODE, streaming=False),
        RunSpec(policies=with_split(RandomSplit())),
        RunSpec(gateway_s=0.002, hop_s=0.001, token_s=0.0005),
    ],
    ids=["full", "decode-first", "random-split", "delays"],
)
def test_macro_steps_give_what_stepping_gives(run: RunSpec, seed: int) -> None:
    work = drawn(120, seed)
    # Little memory: requests are preempted and wait.
    specs = several(2, 3, model=Linear(context_s=1e-6), kv_tokens=1600)
    macro, steps = (simulate(work, specs, replace(run, stepwise=stepwise)) for stepwise in (False, True))
    check(macro, work, gaps=False)
    assert macro.events < steps.events
    for name in ("first_token_s", "last_token_s", "transfer_s"):
        assert getattr(macro.outcomes, name) == pytest.approx(getattr(steps.outcomes, name), rel=1e-9, abs=1e-9)
    assert (macro.outcomes.decode_instance == steps.outcomes.decode_instance).all()
    assert macro.gaps.count == steps.gaps.count
    assert macro.gaps.total_s == pytest.approx(steps.gaps.total_s)
    for one, other in zip(macro.instances, steps.instances, strict=True):
        assert one.preemptions == other.preemptions
        assert one.decode_tokens == other.decode_tokens
        assert one.busy_s == pytest.approx(other.busy_s)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(1, 300), st.integers(1, 60)), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([400, 1600, 16_000]),
    st.booleans(),
)
def test_nothing_is_lost(
    requests: list[tuple[float, int, int]], prefills: int, decodes: int, kv_tokens: int, early: bool
) -> None:
    work = workload(*sorted(requests))
    run = RunSpec(first_token=FirstToken.PREFILL if early else FirstToken.DECODE)
    check(simulate(work, several(prefills, decodes, kv_tokens=kv_tokens), run), work)


def test_preemption_recomputes() -> None:
    # Two requests of 100 + 100 tokens do not both fit into 320 tokens at their ends.
    work = workload((0.0, 100, 100), (0.0, 100, 100))
    specs = [instance("d", Role.DECODE, kv_tokens=320)]
    result = simulate(work, specs)
    check(result, work)
    assert result.instances[0].preemptions == 1
    assert result.outcomes.preemptions.sum() == 1
    assert result.instances[0].prefill_tokens > 200
    reserved = [replace(specs[0], limits=replace(specs[0].limits, reserves_output=True))]
    assert simulate(work, reserved).instances[0].preemptions == 0


def test_reserved_outputs_count_for_kv_that_comes_over_the_network() -> None:
    work = workload(*((0.0, 100, 100) for _ in range(4)))
    limits = EngineLimits(batched_tokens=256, sequences=64, reserves_output=True)
    result = simulate(work, pair(kv_tokens=420, limits=limits))
    check(result, work)
    rows = result.outcomes
    for at in rows.last_token_s:  # two of 200 tokens fit, three do not
        assert ((rows.first_token_s + rows.transfer_s < at) & (rows.last_token_s >= at)).sum() <= 2
    assert result.instances[1].preemptions == 0


def test_an_engine_that_prefills_first_lets_decodes_wait() -> None:
    limits = EngineLimits(batched_tokens=4096, sequences=64, prefill_first=True)
    work = workload((0.0, 10, 50), (0.1, 2000, 5))
    mixed, first = (
        simulate(work, [instance("d", Role.DECODE, limits=replace(limits, prefill_first=flag))])
        for flag in (False, True)
    )
    check(first, work)
    assert first.outcomes.ttft_s[1] < mixed.outcomes.ttft_s[1]
    assert first.gaps.percentile_s(1.0) > 2.0  # the first request waits for the whole prompt of the second


def test_prefill_first_by_hand() -> None:
    limits = EngineLimits(batched_tokens=100, sequences=8, prefill_first=True)
    rows = simulate(workload((0.0, 99, 3), (0.05, 99, 1)), [instance("d", Role.DECODE, limits=limits)]).outcomes
    assert rows.ttft_s[1] == pytest.approx(2 * 0.109 - 0.05)
    assert rows.jct_s[0] == pytest.approx(2 * 0.109 + 2 * 0.011)


@pytest.mark.parametrize("prefill_first", [False, True])
def test_a_prompt_that_does_not_fit_beside_a_decode_waits_for_it(prefill_first: bool) -> None:
    # The second's chunks push it out again and again; the first must go on decoding all the same.
    limits = EngineLimits(batched_tokens=100, sequences=8, prefill_first=prefill_first)
    work = workload((0.0, 32, 100), (0.05, 150, 2))
    result = simulate(work, [instance("d", Role.DECODE, kv_tokens=192, limits=limits)])
    check(result, work)
    assert result.outcomes.jct_s[0] < result.outcomes.jct_s[1] < 100.0


def test_coupled_instances_share_by_placement() -> None:
    work = drawn(60, 1)
    placement = registry.placement("round_robin")
    result = simulate(work, several(0, 3), RunSpec(policies=policies(placement=placement), migration=False))
    check(result, work)
    assert np.bincount(result.outcomes.decode_instance).tolist() == [20, 20, 20]


def test_lanes_share_an_instance() -> None:
    work = workload((0.0, 10, 20), (0.0, 10, 20))
    result = simulate(work, [instance("d", Role.DECODE, lanes=2)])
    check(result, work)
    alone = simulate(workload((0.0, 10, 20)), [instance("d", Role.DECODE)])
    assert result.outcomes.jct_s == pytest.approx([alone.outcomes.jct_s[0]] * 2)


def test_a_limit_of_prompts_holds_the_rest_back() -> None:
    work = workload(*((0.0, 100, 2) for _ in range(6)))
    specs = [instance("p", Role.PREFILL, max_prefills=2), instance("d", Role.DECODE)]
    result = simulate(work, specs)
    check(result, work)
    assert (result.outcomes.prefill_instance == 0).all()  # they wait for it rather than go elsewhere


def test_prefixes_are_computed_once() -> None:
    limits = EngineLimits(batched_tokens=256, sequences=64, prefix_cache=True)
    work = replace(workload((0.0, 64, 4), (1.0, 96, 4)), prefixes=((1, 2), (1, 2, 3)), prefix_block_tokens=32)
    result = simulate(work, pair(limits=limits))
    check(result, work)
    assert result.instances[0].prefill_tokens == 96
    assert result.outcomes.ttft_s[1] == pytest.approx(0.010 + 0.032)


def test_what_fits_nowhere_is_impossible() -> None:
    work = workload((0.0, 100, 5), (0.0, 3000, 5), (0.1, 100, 5))
    rows = simulate(work, pair(kv_tokens=1600)).outcomes
    assert rows.status.tolist() == [int(Status.COMPLETED), int(Status.IMPOSSIBLE), int(Status.COMPLETED)]


def test_equal_arguments_give_equal_results() -> None:
    work = drawn(150, 6)
    run = RunSpec(policies=policies(dispatch=PowerOfTwo()), prediction=Prediction(accuracy=0.6), seed=3)
    one, other = (simulate(work, several(2, 4), run) for _ in range(2))
    assert (one.outcomes.last_token_s == other.outcomes.last_token_s).all()
    assert one.gaps.bins == other.gaps.bins
    third = simulate(work, several(2, 4), replace(run, policies=policies(dispatch=RandomDispatch()), seed=4))
    assert (one.outcomes.decode_instance != third.outcomes.decode_instance).any()


def test_a_closed_loop_keeps_so_many_under_way() -> None:
    work = workload(*((0.0, 100, 5) for _ in range(9)))
    result = simulate(work, pair(), RunSpec(concurrency=3))
    check(result, work)
    rows = result.outcomes
    assert (work.arrival_s == 0.0).all()
    for at in sorted(rows.arrival_s)[3:]:
        assert ((rows.arrival_s <= at) & (rows.last_token_s > at)).sum() <= 3
    assert sorted(rows.arrival_s)[3:] == pytest.approx(sorted(rows.last_token_s)[:6])


def test_progress_is_told() -> None:
    told: list[int] = []
    simulate(drawn(4100, 7, rate=200.0), several(8, 8), progress=told.append)
    assert told == [2000, 4000]


@pytest.mark.parametrize(
    ("specs", "run", "message"),
    [
        ([], RunSpec(), "at least one instance"),
        ([instance("d", Role.DECODE), instance("d", Role.DECODE)], RunSpec(), "'d' is used twice"),
        ([instance("d", Role.DECODE)], RunSpec(flips=(Flip("x", 1.0),)), "flip: there is no instance 'x'"),
        ([instance("d", Role.DECODE)], RunSpec(losses=(Loss("x", 1.0),)), "loss: there is no instance 'x'"),
    ],
)
def test_specs_that_make_no_sense(specs: list[InstanceSpec], run: RunSpec, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        simulate(workload((0.0, 1, 1)), specs, run)


def test_all_policies_run() -> None:
    work = drawn(60, 8)
    rng = Random(0)
    for kind, choices in (
        ("placement", registry.PLACEMENT),
        ("split", registry.SPLIT),
        ("dispatch", registry.DISPATCH),
    ):
        for name in choices:
            if name == "plan":
                continue  # needs its routes
            chosen = policies(**{kind: getattr(registry, kind)(name)})
            run = RunSpec(policies=chosen, prediction=Prediction(), seed=rng.randrange(100))
            check(simulate(work, several(2, 2), run), work)


def test_the_folder_is_pure() -> None:
    sources = Path(__file__).parents[3] / "shared" / "sim"
    assert not [file for file in sources.glob("*.py") if "import time" in file.read_text()]
