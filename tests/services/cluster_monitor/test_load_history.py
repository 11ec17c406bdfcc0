import numpy as np
import pytest

from services.cluster_monitor.load_history import FIGURES, LoadBook
from shared.domain.instance import InstanceState
from tests.shared.policy.views import decode, prefill


def at(figure: str) -> int:
    return FIGURES.index(figure)


def test_means_over_a_step() -> None:
    book = LoadBook()
    assert book.sample([decode("d-0", time_s=1.0, running=2, free_blocks=500), prefill("p-0")], 1_000.0) == []
    assert book.sample([decode("d-0", time_s=1.0, running=4, free_blocks=250)], 1_005.0) == []
    over = book.sample([decode("d-0", time_s=1.0, running=9)], 1_010.0)
    assert [(step.step_s, step.start_s, step.samples) for step in over] == [(10, 1_000, 2)]
    step = over[0]
    assert step.who == [("d-0", "decode", "ready"), ("p-0", "prefill", "ready")]
    assert step.means[0, at("running")] == 3.0
    assert step.means[0, at("kv_used")] == pytest.approx(0.625)
    assert step.means[1, at("running")] == 0.0
    assert np.isnan(step.means[1, at("kv_used")])  # no heartbeat yet
    totals = step.totals
    assert (totals.running, totals.ready_prefill, totals.ready_decode) == (6.0, 1.0, 2.0)
    assert (totals.kv_used_decode, totals.kv_samples_decode, totals.kv_samples_prefill) == (1.25, 2, 0)


def test_longer_steps_take_all_samples() -> None:
    book = LoadBook()
    for now in range(1_020, 1_080, 10):
        book.sample([decode("d-0", time_s=1.0, running=now)], float(now))
    over = book.sample([], 1_080.0)
    assert [(step.step_s, step.start_s, step.samples) for step in over] == [(10, 1_070, 1), (60, 1_020, 6)]
    assert over[1].means[0, at("running")] == np.mean(range(1_020, 1_080, 10))


def test_a_dead_instance_has_a_state_and_no_figures() -> None:
    book = LoadBook()
    book.sample([decode("d-0", time_s=1.0, running=4)], 1_000.0)
    book.sample([decode("d-0", state=InstanceState.DEAD, time_s=1.0, running=4)], 1_010.0)
    ten = next(step for step in book.open() if step.step_s == 10)
    assert ten.who == [("d-0", "decode", "dead")]
    assert np.isnan(ten.means).all()
    assert ten.totals.running == 0.0


def test_who_flips_has_its_last_role_in_a_step() -> None:
    book = LoadBook()
    book.sample([decode("x", time_s=1.0)], 1_000.0)
    book.sample([prefill("x", time_s=1.0)], 1_001.0)
    assert book.open()[0].who == [("x", "prefill", "ready")]
