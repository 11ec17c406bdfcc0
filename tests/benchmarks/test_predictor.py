"""`polyphase bench predictor`: figures and aims of its parts, drawn prompts, and the arms of `worth`."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks import predictor
from benchmarks import predictor_worth_sim as sim
from benchmarks.predictor_bayes import (
    BUCKETS,
    FILLER,
    FROM_HEAD,
    FROM_TAIL,
    SHARES,
    TOPICS,
    VERBS,
    Drawn,
    Generator,
    aim_of,
)
from benchmarks.predictor_latency import Call, Cell, aims_of, cell_figures, environment, real_prompts
from benchmarks.predictor_worth import NO_WORSE, goodput_aims
from benchmarks.predictor_worth_live import (
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
from benchmarks.predictor_worth_sim import (
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
from predictor.settings import PredictorSettings
from predictor.train import default_epochs, default_learning_rate
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
from tools.client import StreamResult

CALLS = [Call(0.010, "classifier"), Call(0.020, "observed"), Call(0.030, "classifier"), Call(0.5, "")]


def test_a_call_without_an_answer_counts_in_shares_and_not_in_latencies() -> None:
    figures = cell_figures("x", CALLS, 2.0)
    assert figures["x_answers_per_s"] == 1.5
    assert figures["x_by_classifier_per_s"] == 1.0
    assert (figures["x_by_classifier_share"], figures["x_not_answered_share"]) == (0.5, 0.25)
    assert (figures["x_p50_ms"], figures["x_p99_ms"]) == (20.0, 30.0)


def test_a_cell_without_any_answer_has_no_latency() -> None:
    assert cell_figures("x", [Call(0.1, "")], 1.0) == {
        "x_answers_per_s": 0.0,
        "x_by_classifier_per_s": 0.0,
        "x_by_classifier_share": 0.0,
        "x_not_answered_share": 1.0,
    }


@pytest.mark.parametrize(
    ("cells", "answered", "in_time"),
    [
        ([], False, False),
        ([Cell("x", 250.0, CALLS[:3], 1.0)], True, True),
        ([Cell("x", 1000.0, CALLS, 1.0)], False, True),
        ([Cell("x", 1000.0, CALLS[:3] * 400, 1.0), Cell("y", 1000.0, CALLS, 1.0)], False, True),  # the worst one
        ([Cell("x", 250.0, [Call(0.5, "observed")], 1.0)], True, False),
    ],
)
def test_the_aims_are_of_the_worst_cell(cells: list[Cell], answered: bool, in_time: bool) -> None:
    aims = aims_of(cells)
    assert aims["share answered"]["met"] is answered
    assert aims["calls past their deadline"]["met"] is in_time


@pytest.mark.parametrize(("ratio", "met"), [(0.949, False), (0.95, True), (1.01, True)])
def test_the_aim_is_a_share_of_the_optimum(ratio: float, met: bool) -> None:
    assert aim_of(ratio)["accuracy of the optimum"]["met"] is met


def test_prompts_are_of_mixed_lengths() -> None:
    lengths = sorted(len(ids) for ids in real_prompts())
    assert 20 <= lengths[0] < 40
    assert 700 < lengths[-1] <= 1000
    assert 100 < lengths[len(lengths) // 2] < 200
    assert real_prompts() == real_prompts()


def test_the_process_reads_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in environment(20_000, "tcp://127.0.0.1:20001", Path("a"), Path("b"), "cpu", 2000.0).items():
        monkeypatch.setenv(key, value)
    settings = PredictorSettings.load()
    assert (settings.port, settings.rpc_address, settings.checkpoint) == (20_000, "tcp://127.0.0.1:20001", Path("a"))
    assert (settings.model, settings.timeout_ms) == ("b", 2000.0)


def test_parts_are_run_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def part(name: str) -> Any:
        return lambda: {"figures": {name: 1.0}, "aims": {}, "notes": [name]}

    monkeypatch.setattr(predictor, "PARTS", {"bayes": part("bayes"), "latency": part("latency")})
    assert predictor.run_predictor_bench(["latency"])["figures"] == {"latency": 1.0}
    assert predictor.run_predictor_bench()["notes"] == ["bayes", "latency"]
    with pytest.raises(InvalidRequest, match="unknown part luck; known: bayes, latency"):
        predictor.run_predictor_bench(["luck"])


def test_training_from_nothing_has_defaults_of_its_own() -> None:
    assert (default_epochs(""), default_learning_rate("")) == (3.0, 5e-5)
    assert default_epochs("tiny") > 3.0
    assert default_learning_rate("base") < default_learning_rate("small")


MANY = 20_000


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator.like_sharegpt()


@pytest.fixture(scope="module")
def drawn(generator: Generator) -> list[Drawn]:
    return generator.draw(MANY, 3)


def test_probabilities_sum_to_one(generator: Generator) -> None:
    assert generator.joint.sum() == pytest.approx(1.0)
    assert generator.joint.sum(axis=(1, 2)) == pytest.approx(SHARES)
    assert np.allclose(generator.posterior.sum(axis=0), 1.0)


def test_the_exact_optimum_is_what_brute_force_finds(generator: Generator) -> None:
    rng = np.random.default_rng(7)
    cells = rng.choice(generator.joint.size, size=400_000, p=generator.joint.ravel())
    bucket, verb, topic = np.unravel_index(cells, generator.joint.shape)
    right = sum(
        np.bincount(bucket[(verb == one) & (topic == other)], minlength=6).max()
        for one in range(6)
        for other in range(6)
    )
    assert right / cells.size == pytest.approx(generator.optimum, abs=0.004)


def test_it_takes_both_words(generator: Generator) -> None:
    assert 0.6 < generator.optimum < 0.75
    assert max(SHARES) < generator.optimum_of_one < 0.8 * generator.optimum


def test_lengths_are_shaped_like_sharegpts(drawn: list[Drawn]) -> None:
    seen = Counter(BUCKETS.of(one.output_tokens) for one in drawn)
    assert [seen[bucket] / MANY for bucket in range(len(SHARES))] == pytest.approx(SHARES, abs=0.012)


def test_labels_are_drawn_from_the_posterior(generator: Generator, drawn: list[Drawn]) -> None:
    (verb, topic), count = Counter((one.verb, one.topic) for one in drawn).most_common(1)[0]
    assert count / MANY == pytest.approx(generator.evidence[verb, topic], abs=0.006)
    seen = Counter(BUCKETS.of(one.output_tokens) for one in drawn if (one.verb, one.topic) == (verb, topic))
    assert [seen[at] / count for at in range(6)] == pytest.approx(generator.posterior[:, verb, topic], abs=0.05)


def test_the_optimum_is_reached_by_the_table_and_by_nobody_else(generator: Generator, drawn: list[Drawn]) -> None:
    best = generator.joint.argmax(axis=0)
    guesses = [int(best[one.verb, one.topic]) for one in drawn]
    assert generator.expected_accuracy(drawn, guesses) == pytest.approx(generator.optimum_on(drawn))
    assert generator.optimum_on(drawn) == pytest.approx(generator.optimum, abs=0.005)
    assert generator.best_accuracy(drawn) == pytest.approx(generator.optimum, abs=0.012)
    assert generator.expected_accuracy(drawn, [1] * MANY) == pytest.approx(SHARES[1], abs=0.012)


def test_each_prompt_has_one_verb_and_one_topic_where_a_predictor_sees_them(drawn: list[Drawn]) -> None:
    for one in drawn[:2000]:
        words = one.prompt.split()
        said = [at for at, word in enumerate(words) if word not in FILLER]
        assert {words[at] for at in said} & set(VERBS[one.verb])
        assert {words[at] for at in said} & set(TOPICS[one.topic])
        assert len(said) == 2
        if len(words) > 60:
            assert all(at < FROM_HEAD or at >= len(words) - FROM_TAIL for at in said)


def test_equal_seeds_draw_equal_prompts(generator: Generator) -> None:
    assert generator.draw(50, 1) == generator.draw(50, 1) != generator.draw(50, 2)


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
    monkeypatch.setattr("benchmarks.predictor_worth_sim.SHIPPED", tmp_path / "none.yaml")
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
    met = {name: aim["met"] for name, aim in goodput_aims(figures).items()}
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
