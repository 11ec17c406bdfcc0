from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from shared.domain.job import OPEN_END
from shared.errors import InvalidRequest
from shared.policy.dispatch import PowerOfTwo
from shared.policy.placement import LeastLoad
from shared.sim.cluster import simulate
from shared.sim.prediction import Prediction
from shared.sim.spec import RunSpec
from tests.shared.sim.clusters import pair, policies, workload

LENGTHS = np.array([1, 199, 200, 401, 5000], dtype=np.int64)


def test_without_errors_the_true_bucket_is_said() -> None:
    assert Prediction().predict(LENGTHS, seed=1).tolist() == [0, 0, 1, 2, 9]


def test_accuracy_is_the_share_on_the_diagonal_and_the_rest_goes_to_neighbours() -> None:
    prediction = Prediction(accuracy=0.75)
    lengths = np.full(100_000, 450, dtype=np.int64)
    said = prediction.predict(lengths, seed=2)
    shares = np.bincount(said, minlength=10) / len(said)
    assert shares[2] == pytest.approx(0.75, abs=0.01)
    assert shares[1] == pytest.approx(0.125, abs=0.01)
    assert shares[3] == pytest.approx(0.125, abs=0.01)
    assert shares[[0, 4, 5, 6, 7, 8, 9]].sum() == 0


@pytest.mark.parametrize(("tokens", "neighbour"), [(10, 1), (9000, 8)])
def test_at_either_end_all_errors_go_to_the_one_neighbour(tokens: int, neighbour: int) -> None:
    said = Prediction(accuracy=0.6).predict(np.full(50_000, tokens, dtype=np.int64), seed=3)
    assert np.mean(said == neighbour) == pytest.approx(0.4, abs=0.01)


def test_a_matrix_is_followed_row_by_row() -> None:
    matrix = [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.1, 0.2, 0.7]]
    prediction = Prediction.from_matrix(matrix, width_tokens=100)
    for true, row in enumerate(matrix):
        said = prediction.predict(np.full(50_000, true * 100, dtype=np.int64), seed=4)
        assert np.bincount(said, minlength=3) / len(said) == pytest.approx(row, abs=0.01)
        assert not np.any(np.bincount(said, minlength=3)[np.array(row) == 0.0])


def test_same_seed_same_draws() -> None:
    lengths = np.arange(1, 3000, dtype=np.int64)
    prediction = Prediction(accuracy=0.5)
    assert np.array_equal(prediction.predict(lengths, 7), prediction.predict(lengths, 7))
    assert not np.array_equal(prediction.predict(lengths, 7), prediction.predict(lengths, 8))


def test_what_policies_see() -> None:
    prediction = Prediction(width_tokens=200, buckets=3, accuracy=0.8)
    middle, last = prediction.as_prediction(1), prediction.as_prediction(2)
    assert (middle.lower_tokens, middle.upper_tokens, middle.source) == (200, 400, "simulated")
    assert (last.lower_tokens, last.upper_tokens) == (400, OPEN_END)
    assert middle.confidence == pytest.approx(0.8 / (0.8 + 0.2 + 0.2))
    assert prediction.as_prediction(1) is middle


def test_a_bucket_that_is_never_said_has_no_confidence() -> None:
    assert Prediction.from_matrix([[1.0, 0.0], [1.0, 0.0]]).as_prediction(1).confidence == 0.0


def test_one_bucket_is_always_right() -> None:
    assert Prediction(buckets=1, accuracy=0.2).predict(LENGTHS, 0).tolist() == [0] * 5


@pytest.mark.parametrize(
    ("matrix", "says"),
    [
        ([[1.0, 0.0], [0.5, 0.4]], "row 1 sums to 0.9"),
        ([[1.0, 0.0], [1.5, -0.5]], "row 1 has a share outside"),
        ([[1.0, 0.0], [1.0]], "row 1 has 1 shares, not 2"),
        ([[float("nan"), 1.0], [1.0, 0.0]], "row 0 has a share outside"),
    ],
)
def test_a_bad_matrix_is_named_by_its_row(matrix: list[list[float]], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        Prediction.from_matrix(matrix)


def test_other_errors() -> None:
    with pytest.raises(InvalidRequest, match="accuracy"):
        Prediction(accuracy=1.2)
    with pytest.raises(InvalidRequest, match="width_tokens 0"):
        Prediction(width_tokens=0)
    with pytest.raises(InvalidRequest, match="2 rows"):
        Prediction(buckets=3, confusion=((1.0, 0.0), (0.0, 1.0)))


@dataclass
class Spy:
    """A policy that keeps which jobs it saw with a prediction."""

    policy: Any
    saw: list[bool] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def choose(self, job: Any, *given: Any) -> Any:
        self.saw.append(job.prediction is not None)
        return self.policy.choose(job, *given)


# A prompt of 100 tokens takes 0.11 s.
@pytest.mark.parametrize(
    ("answer_s", "placed", "dispatched"),
    [(0.0, True, True), (0.004, True, True), (0.05, False, True), (0.2, False, False)],
)
def test_who_knows_it_depends_on_how_long_the_predictor_takes(answer_s: float, placed: bool, dispatched: bool) -> None:
    placement, dispatch = Spy(LeastLoad()), Spy(PowerOfTwo())
    run = RunSpec(policies=policies(placement=placement, dispatch=dispatch), prediction=Prediction(answer_s=answer_s))
    result = simulate(workload((0.0, 100, 5), (10.0, 100, 5)), pair(), run)
    assert (placement.saw, dispatch.saw) == ([placed] * 2, [dispatched] * 2)
    waited_s = answer_s if placed else 0.0
    assert result.outcomes.first_token_s[0] == pytest.approx(0.11 + waited_s)


@pytest.mark.parametrize("name", ["answer_s", "wait_s"])
def test_times_are_not_negative(name: str) -> None:
    with pytest.raises(InvalidRequest, match="must not be negative"):
        Prediction(**{name: -1.0})  # type: ignore[arg-type]
