import pytest

from predictor.scores import score


def test_worked_example() -> None:
    truth = [0, 0, 1, 2]
    rows = [[0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.1, 0.9, 0.0], [0.6, 0.2, 0.2]]
    found = score(truth, rows, 3)
    assert (found.accuracy, found.within_one, found.majority) == (0.5, 0.75, 0.5)
    assert found.confusion == [[1, 1, 0], [0, 1, 0], [1, 0, 0]]
    # Confidences 0.9, 0.9 (both right), 0.8 (wrong), 0.6 (wrong): (2 * 0.1 + 0.8 + 0.6) / 4.
    assert found.calibration_error == pytest.approx(0.4)
    assert [bin_.count for bin_ in found.calibration] == [1, 1, 2]


def test_nothing_to_score() -> None:
    with pytest.raises(ValueError, match="0 labels"):
        score([], [], 3)
