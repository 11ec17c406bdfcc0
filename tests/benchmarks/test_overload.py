import numpy as np
import pytest

from benchmarks.overload import tokens_per_s
from shared.sim.outcomes import Outcomes
from shared.sim.workload import Workload


@pytest.mark.parametrize(
    ("first_s", "last_s", "tokens"),
    [
        (1.0, 3.0, 0),  # over before
        (9.0, 11.0, 10),  # half of the answer
        (12.0, 14.0, 120),
        (19.0, 21.0, 110),
        (5.0, 25.0, 10),  # half of its time
        (20.0, 22.0, 0),
        (12.0, 12.0, 100),  # an answer of one token, by the clock: its prompt
    ],
)
def test_prompts_count_with_the_first_token_and_answers_as_they_come(
    first_s: float, last_s: float, tokens: int
) -> None:
    seen = Outcomes.empty(Workload("w", np.zeros(2), np.array([100, 100]), np.array([20, 20])))
    seen.first_token_s[0], seen.last_token_s[0] = first_s, last_s
    assert tokens_per_s(seen, np.array([True, False]), 10.0, 20.0) == pytest.approx(tokens / 10.0, abs=0.01)
