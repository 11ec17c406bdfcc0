"""`bench predictor`: figures and aims of its parts, drawn prompts, and the arms of `worth`."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from benchmarks import predictor_worth as worth
from benchmarks.predictor import BUCKETS, SHARES, Call, Drawn, Generator, latency_aims, latency_figures
from benchmarks.predictor_worth import ARMS, MAJORITY, NONE, ORACLE, TRAINED, StandIn, number_of, predictors, prompt_of
from services.launcher.cluster_file import load_cluster
from services.worker.engines.emulated_tokens import token_at
from shared.errors import Busy
from shared.sim.prediction import Prediction
from shared.wire.messages import PREDICT, PredictRequest
from shared.wire.rpc_client import RpcClient
from shared.wire.sockets import Sockets
from tests.ports import free_address

CALLS = [(0.010, "classifier"), (0.020, "observed"), (0.030, "classifier"), (0.5, "")]


def test_a_call_without_an_answer_counts_in_shares_and_not_in_latencies() -> None:
    assert latency_figures("x", CALLS, 250.0, 2.0) == {
        "x_answers_per_s": 1.5,
        "x_by_classifier_per_s": 1.0,
        "x_by_classifier_share": 0.5,
        "x_not_answered_share": 0.25,
        "x_late": 1.0,
        "x_p50_ms": 20.0,
        "x_p99_ms": 30.0,
    }
    assert "x_p50_ms" not in latency_figures("x", CALLS[3:], 250.0, 1.0)


@pytest.mark.parametrize(
    ("cells", "met"),
    [
        ([], [False, False]),
        ([(CALLS[:3], 250.0)], [True, True]),
        ([(CALLS[:3] * 400, 1000.0), (CALLS, 1000.0)], [False, True]),  # the worst one
        ([([(0.5, "observed")], 250.0)], [True, False]),
    ],
)
def test_the_aims_are_of_the_worst_concurrency(cells: list[tuple[list[Call], float]], met: list[bool]) -> None:
    figures: dict[str, float] = {}
    for number, (calls, timeout_ms) in enumerate(cells):
        figures |= latency_figures(f"x{number}", calls, timeout_ms, 1.0)
    assert [aim["met"] for aim in latency_aims(figures).values()] == met


GENERATOR, MANY = Generator.like_sharegpt(), 20_000


@pytest.fixture(scope="module")
def drawn() -> list[Drawn]:
    return GENERATOR.draw(MANY, 3)


def test_draws_follow_the_table_and_only_both_words_reach_the_optimum(drawn: list[Drawn]) -> None:
    counts = np.zeros(GENERATOR.joint.shape)
    for one in drawn:
        counts[BUCKETS.of(one.output_tokens), one.verb, one.topic] += 1.0 / MANY
    assert counts == pytest.approx(GENERATOR.joint, abs=0.005)
    assert counts.sum(axis=(1, 2)) == pytest.approx(SHARES, abs=0.012)
    assert counts.max(axis=0).sum() == pytest.approx(GENERATOR.optimum, abs=0.012)
    assert max(SHARES) < GENERATOR.optimum_of_one < 0.8 * GENERATOR.optimum < 0.6
    assert GENERATOR.draw(50, 1) == GENERATOR.draw(50, 1) != GENERATOR.draw(50, 2)


ANSWERS = np.array([10] * 50 + [250] * 30 + [450] * 20)  # of 200 tokens a bucket: three of them
KNOWN = Prediction(width_tokens=200, buckets=4, confusion=((0.9, 0.1, 0.0, 0.0),) * 2 + ((0.0, 0.2, 0.8, 0.0),) * 2)


def test_arms_differ_in_confusion_alone() -> None:
    found = predictors(KNOWN, ANSWERS)
    assert tuple(found) == ARMS
    assert found[NONE] is None
    others = {arm: one for arm, one in found.items() if one is not None}
    assert {(one.prior, one.width_tokens, one.buckets) for one in others.values()} == {((0.5, 0.3, 0.2, 0.0), 200, 4)}
    assert set(others[MAJORITY].predict(ANSWERS, 1)) == {0}
    assert others[MAJORITY].as_prediction(0).shares == pytest.approx((0.5, 0.3, 0.2, 0.0))
    assert others[ORACLE].predict(ANSWERS, 1).tolist() == others[ORACLE].buckets_of(ANSWERS).tolist()
    assert all(others[ORACLE].as_prediction(at).confidence == 1.0 for at in range(3))


def test_buckets_stretch_with_the_answers() -> None:
    prior = (0.5, 0.3, 0.2, 0.0)  # a mean of 0.5 × 20 + 0.3 × 60 + 0.2 × 100 = 48 tokens
    short = Prediction(width_tokens=40, buckets=4, confusion=KNOWN.confusion, prior=prior)
    for known, width in ((short, round(40 * ANSWERS.mean() / 48)), (KNOWN, 200)):
        stretched = predictors(known, ANSWERS)[TRAINED]
        assert stretched is not None
        assert stretched.width_tokens == width


def test_a_prompt_tells_its_number() -> None:
    numbers = (0, 1, 899, 900, 12_345)
    assert [number_of(prompt_of(number, worth.MIN_PROMPT)) for number in numbers] == list(numbers)
    assert len(prompt_of(7, 50)) == 50
    assert max(prompt_of(12_345, 500)) < 4096  # the demo model's vocabulary
    assert number_of([1, 2, 3]) == number_of([5] * 20) == -1


async def test_the_stand_in_answers_gateways_as_its_arm_would() -> None:
    address, stand_in = free_address(), StandIn(predictors(KNOWN, ANSWERS), ANSWERS, seed=3)
    with pytest.raises(Busy):
        stand_in.answer(prompt_of(60, 20))
    stand_in.arm = ORACLE
    assert stand_in.answer(prompt_of(60, 20)).lower_tokens == 200  # the 61st: 250 tokens
    with pytest.raises(Busy):
        stand_in.answer(prompt_of(len(ANSWERS), 20))
    sockets = Sockets()
    client = RpcClient(sockets, address)
    try:
        async with stand_in.serving(address), asyncio.timeout(10):
            answer = await client.call(PREDICT, PredictRequest(prompt_of(0, 20), 20, 512), timeout_s=5)
    finally:
        client.close()
        sockets.close()
    assert (answer.bucket, answer.shares[0]) == (0, 1.0)


def test_live_answers_end_where_their_stop_token_is_the_first_of_its_kind(tmp_path: Path) -> None:
    drawn = worth.short_requests(500, 1, None)
    assert drawn.prompt_tokens.min() >= worth.MIN_PROMPT
    longest = int(drawn.output_tokens.max())
    assert longest < worth.LIVE_MAX_TOKENS
    assert len({token_at(at) for at in range(20, 20 + longest)}) == longest
    assert len(load_cluster(worth.cluster_into(tmp_path)).instance_ids) == 4
