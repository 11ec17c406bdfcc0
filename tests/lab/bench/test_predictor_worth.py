"""`bench predictor --part worth`: its arms, the stand-in that answers for them, and what it makes of runs."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lab.bench import predictor_worth_sim as sim
from lab.bench.predictor_worth import NO_WORSE, aims_of
from lab.bench.predictor_worth_live import (
    CLUSTER,
    LEAST_PROMPT,
    MAX_TOKENS,
    Answer,
    Run,
    StandIn,
    cluster_into,
    figures_of,
    number_of,
    pointing_to,
    policies_of,
    prompt_of,
    run_of,
    short_requests,
)
from lab.bench.predictor_worth_sim import (
    ARMS,
    MAJORITY,
    NONE,
    ORACLE,
    PAPER,
    TRAINED,
    Case,
    Seen,
    accuracy,
    arms,
    gain,
    requests_of,
    trained,
)
from lab.client import StreamResult
from services.launcher.cluster_file import load_cluster
from services.launcher.plan import make_plan
from services.worker.engines.emulated_scheduler import token_at
from shared.domain.policies import KINDS
from shared.errors import Busy, InvalidRequest
from shared.sim.prediction import Prediction
from shared.wire.messages import PREDICT, PredictRequest
from shared.wire.rpc_client import RpcClient
from shared.wire.sockets import Sockets
from tests.ports import free_address

ANSWERS = np.array([10] * 50 + [250] * 30 + [450] * 20)  # of 200 tokens a bucket: three of them
KNOWN = Prediction(width_tokens=200, buckets=4, confusion=((0.9, 0.1, 0.0, 0.0),) * 2 + ((0.0, 0.2, 0.8, 0.0),) * 2)


def test_arms_differ_in_confusion_alone() -> None:
    of_arm = arms(KNOWN, ANSWERS)
    assert tuple(of_arm) == ARMS
    assert of_arm[NONE] is None
    told = [one for one in of_arm.values() if one is not None]
    assert {one.prior for one in told} == {(0.5, 0.3, 0.2, 0.0)}
    assert {(one.width_tokens, one.buckets) for one in told} == {(200, 4)}


def test_how_often_each_arm_is_right() -> None:
    of_arm = arms(KNOWN, ANSWERS)
    right = [accuracy(one) for one in of_arm.values() if one is not None]
    assert right == pytest.approx([0.5, 0.5 * 0.9 + 0.3 * 0.1 + 0.2 * 0.8, 1.0])


def test_the_majority_knows_how_lengths_are_spread_and_nothing_of_a_request() -> None:
    majority = arms(KNOWN, ANSWERS)[MAJORITY]
    assert majority is not None
    assert set(majority.predict(ANSWERS, 1)) == {0}
    said = majority.as_prediction(0)
    assert said.shares == pytest.approx((0.5, 0.3, 0.2, 0.0))
    assert said.mean == pytest.approx(float(ANSWERS.mean()), rel=0.5)


def test_the_oracle_is_right_of_all() -> None:
    oracle = arms(KNOWN, ANSWERS)[ORACLE]
    assert oracle is not None
    assert oracle.predict(ANSWERS, 1).tolist() == oracle.buckets_of(ANSWERS).tolist()
    assert all(oracle.as_prediction(at).confidence == 1.0 for at in range(3))


def test_buckets_stretch_with_the_answers() -> None:
    prior = (0.5, 0.3, 0.2, 0.0)  # a mean of 0.5 × 20 + 0.3 × 60 + 0.2 × 100 = 48 tokens
    short = Prediction(width_tokens=40, buckets=4, confusion=KNOWN.confusion, prior=prior)
    stretched = arms(short, ANSWERS)[TRAINED]
    assert stretched is not None
    assert stretched.width_tokens == round(40 * ANSWERS.mean() / 48)
    unstretched = arms(PAPER, ANSWERS)[TRAINED]
    assert unstretched is not None
    assert unstretched.width_tokens == PAPER.width_tokens


def test_an_evaluation_is_read_and_named(tmp_path: Path) -> None:
    file = tmp_path / "prediction.yaml"
    rows = [[0.7, 0.3], [0.4, 0.6]]
    said = {"width_tokens": 40, "buckets": 2, "confusion": rows, "prior": [0.5, 0.5]}
    file.write_text(yaml.safe_dump({"prediction": said}))
    found = trained(file)
    assert found.prediction.buckets == 2
    assert accuracy(found.prediction) == pytest.approx(0.65)
    assert str(file) in found.source
    file.write_text("prediction: {colour: red}")
    with pytest.raises(InvalidRequest, match="colour"):
        trained(file)


def test_without_an_evaluation_the_papers_figure_stands_in_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.bench.predictor_worth_sim.SHIPPED", tmp_path / "none.yaml")
    assert trained().prediction == PAPER
    assert "stand-in" in trained().source


@pytest.mark.parametrize("kind", sim.KINDS)
def test_without_tables_lengths_are_made_like_theirs(kind: str, tmp_path: Path) -> None:
    drawn = requests_of(kind, 400, 1, tmp_path)
    assert len(drawn) == 400
    assert np.array_equal(drawn.output_tokens, requests_of(kind, 400, 1, None).output_tokens)
    assert not np.array_equal(drawn.output_tokens, requests_of(kind, 400, 2, None).output_tokens)
    assert 150 < drawn.output_tokens.mean() < 500


def seen(goodput: float, jct_s: float, at: float = 10.0) -> Seen:
    return Seen(goodput, at, jct_s, 2 * jct_s, 100.0, 0.9, 0.05, 0.2, 0.4)


def test_figures_are_medians_over_seeds_and_gains_of_pairs() -> None:
    seeds = [
        {arm: seen(base + more, 5.0 - more) for arm, more in zip(ARMS, (0.0, 0.1, 1.0, 2.0), strict=True)}
        for base in (10.0, 20.0, 10.0)
    ]
    found = {Case("azure", sim.DEFAULT, seed): runs for seed, runs in enumerate(seeds)}
    figures = sim.figures_of(found)
    assert figures["sim_azure_default_none_goodput_per_s"] == 10.0
    assert figures["sim_azure_default_trained_goodput_over_none"] == 1.1
    assert figures["sim_azure_default_oracle_jct_mean_over_none"] == 0.6
    assert np.isnan(gain([{NONE: seen(0.0, 1.0), TRAINED: seen(1.0, 1.0)}], TRAINED, "goodput"))


def test_aims_are_of_the_default_policies() -> None:
    figures = {
        f"sim_{kind}_default_trained_goodput_over_none": got for kind, got in zip(sim.KINDS, (1.05, 0.9), strict=True)
    }
    met = {name: aim["met"] for name, aim in aims_of(figures).items()}
    assert list(met.values()) == [True, False]
    assert 0.9 < NO_WORSE < 1.0


def test_a_prompt_tells_its_number() -> None:
    numbers = (0, 1, 899, 900, 12_345)
    assert [number_of(prompt_of(number, LEAST_PROMPT)) for number in numbers] == list(numbers)
    assert len(prompt_of(7, 50)) == 50
    assert max(prompt_of(12_345, 500)) < 4096  # the demo model's vocabulary
    assert number_of([1, 2, 3]) == number_of([5] * 20) == -1


def test_the_stand_in_says_what_its_arm_would() -> None:
    of_arm = arms(KNOWN, ANSWERS)
    stand_in = StandIn(of_arm, ANSWERS, seed=3)
    prompt = prompt_of(60, 20)  # the 61st: 250 tokens
    with pytest.raises(Busy):
        stand_in.answer(prompt)
    stand_in.arm = ORACLE
    assert (stand_in.answer(prompt).lower_tokens, stand_in.answer(prompt).upper_tokens) == (200, 400)
    stand_in.arm = MAJORITY
    assert stand_in.answer(prompt).bucket == 0
    with pytest.raises(Busy):
        stand_in.answer(prompt_of(len(ANSWERS), 20))


async def test_the_stand_in_answers_gateways() -> None:
    address = free_address()
    stand_in = StandIn(arms(KNOWN, ANSWERS), ANSWERS, seed=3)
    stand_in.arm = ORACLE
    sockets = Sockets()
    client = RpcClient(sockets, address)
    try:
        async with stand_in.serving(address), asyncio.timeout(10):
            said = await client.call(PREDICT, PredictRequest(prompt_of(0, 20), 20, 512), timeout_s=5)
    finally:
        client.close()
        sockets.close()
    assert (said.bucket, said.shares[0]) == (0, 1.0)


def test_live_answers_end_where_their_stop_token_is_the_first_of_its_kind() -> None:
    drawn = short_requests(500, 1, None)
    assert drawn.prompt_tokens.min() >= LEAST_PROMPT
    assert drawn.output_tokens.max() < MAX_TOKENS
    longest = int(drawn.output_tokens.max())
    tokens = [token_at(at) for at in range(20, 20 + longest)]
    assert len(set(tokens)) == longest


def test_the_gateway_asks_the_stand_in(tmp_path: Path) -> None:
    cluster = load_cluster(cluster_into(tmp_path))
    gateway = cluster.gateway.model_copy(update={"env": pointing_to("tcp://127.0.0.1:9")})
    plan = make_plan(cluster.model_copy(update={"gateway": gateway}), tmp_path)
    env = next(one.env for one in plan.processes if one.name == "gateway")
    assert env["POLYPHASE_GATEWAY_PREDICTORS"] == '["tcp://127.0.0.1:9"]'
    assert len(plan.instance_ids) == sum(entry.get("count", 1) for entry in CLUSTER["instances"])


def test_words_become_a_change_of_all_policies() -> None:
    change = policies_of("tetri_mean")
    assert set(change) == set(KINDS)
    admission = change["decode_admission"]
    assert admission is not None
    assert (admission.name, admission.parameters) == ("reserve_dynamic", {"end": "mean"})
    assert change["prefill_order"] is None
    assert policies_of(sim.DEFAULT)["decode_admission"] is None


def live(**more: Any) -> Run:
    return Run(**{**dict.fromkeys(Run.__dataclass_fields__, 1.0), **more})


def test_a_live_run_counts_what_failed() -> None:
    good = Answer(11, StreamResult(1.0, 2.0, 11, 1.5))
    late = Answer(11, StreamResult(100.0, 101.0, 11, 100.5))
    workload = short_requests(4, 1, None)
    run = run_of([good, late, Answer(11, None), good], workload, lost=2.0, simulated_s=1.0, foreign=0.1)
    assert (run.attainment, run.failed, run.preemptions) == (0.5, 1, 500.0)
    assert run.jct_mean_s == pytest.approx((1.5 + 100.5 + 1.5) / 3)


def test_live_gains_are_of_pairs_of_a_round() -> None:
    found = {("default", NONE): [live(jct_mean_s=4.0), live(jct_mean_s=8.0)]}
    found["default", TRAINED] = [live(jct_mean_s=2.0), live(jct_mean_s=4.0)]
    assert figures_of(found)["live_default_trained_jct_mean_over_none"] == 0.5
