"""A paused stream: how long its pause is expected to last, and when it goes on elsewhere."""

from random import Random

import pytest

from shared.domain.instance import InstanceView
from shared.domain.job import FirstTokenOut, JobView, Slo
from shared.domain.rates import Rates, StepForm, StepRates
from shared.errors import Stays, Unavailable
from shared.policy.adaptive import Adaptive, AdaptiveDispatch, AdaptiveSplit
from shared.policy.decode_admission import ahead_of
from shared.policy.dispatch import PowerOfTwo
from shared.policy.index import ClusterIndex
from shared.policy.overload import MOVE_LEAST_S, MOVE_SHARE, Beside, decide, moves, pause_s
from shared.policy.placement import LeastLoad, Policies
from shared.policy.split import FullSplit, NoSplit
from tests.shared.policy.views import decode, prefill, view

STEP = StepRates(StepForm(0.02, 1e-4), StepForm(0.02), StepForm(0.02, 1e-4))  # 20 ms, and 0.1 ms a prompt token
ALL = Policies(Adaptive(), AdaptiveSplit(), AdaptiveDispatch())
FULL = Policies(LeastLoad(), FullSplit(), PowerOfTwo())
LOCAL = Policies(LeastLoad(), NoSplit(), PowerOfTwo())


def test_with_room_the_pause_is_the_time_of_computing_it_again() -> None:
    assert pause_s(Beside.of([], 16), 1600, 400, 100, 16, STEP, 512) == pytest.approx(0.02 + 400 * 1e-4)
    beside = pause_s(Beside.of([(100, 50)], 16), 1600, 700, 100, 16, STEP, 513)
    assert beside == pytest.approx(2 * 0.02 + 700 * 1e-4), "two chunks of at most 512 tokens beside a decode"


def test_without_room_it_lasts_until_others_end() -> None:
    first, second = (700, 64), (700, 256)  # both fit, and nothing beside them
    both = pause_s(Beside.of([first, second], 16), 1600, 600, 100, 16, STEP, 512)
    assert both == pytest.approx(64 * 0.02 + 2 * 0.02 + 600 * 1e-4)
    longer = pause_s(Beside.of([(700, 256), second], 16), 1600, 600, 100, 16, STEP, 512)
    assert longer == pytest.approx(256 * 0.02 + 2 * 0.02 + 600 * 1e-4)


def test_one_that_would_fit_for_a_step_only_does_not_fit() -> None:
    tight = pause_s(Beside.of([(1000, 64)], 16), 1024 + 512, 512, 100, 16, STEP, 512)
    assert tight > 64 * 0.02, "its next tokens and those of the other one have no room"


def test_it_moves_only_where_that_is_clearly_sooner() -> None:
    assert moves(2.0, MOVE_SHARE * 2.0)
    assert not moves(2.0, MOVE_SHARE * 2.0 + 0.01)
    assert moves(MOVE_LEAST_S + 0.01, 0.005)
    assert not moves(MOVE_LEAST_S - 0.01, 0.0)


def d(name: str, *others: tuple[int, int]) -> InstanceView:
    """With 100 blocks of 16 tokens, and these decodes: tokens held, tokens to come."""
    held = sum(now for now, _ in others)
    return decode(
        name,
        rates=Rates(step=STEP),
        total_blocks=100,
        free_blocks=100 - -(-held // 16),
        max_seqs=64,
        decoding=len(others),
        running=len(others),
        context_tokens=held,
        kv_ahead=ahead_of(others, 16),
    )


def ask(policies: Policies, paused_s: float, *views: InstanceView, early: bool = True) -> tuple[ClusterIndex, JobView]:
    slo = Slo(first_token=FirstTokenOut.EARLY if early else FirstTokenOut.SMOOTH)
    asked = JobView("j", 500, 200, slo, begun=True, started=True, pause_s=paused_s)
    return ClusterIndex(view(*views), rng=Random(0)), asked


@pytest.mark.parametrize("policies", [ALL, FULL, LOCAL])
@pytest.mark.parametrize("early", [True, False])
def test_a_paused_job_is_placed_where_it_fits_and_the_reasons_say_what_that_saves(
    policies: Policies, early: bool
) -> None:
    p = prefill("p", rates=Rates(step=STEP), total_blocks=1000)
    index, job = ask(policies, 3.0, p, d("full", (700, 300), (800, 300)), d("free"), early=early)
    route = decide(job, index, policies, 0.0, Random(0), ("full",))
    assert route.decode is None or route.decode.instance_id == "free"
    (first, *_) = route.reasons
    assert first.what == "sooner"
    assert first.figures["pause_s"] == 3.0
    assert 0.0 < float(first.figures["elsewhere_s"]) < 1.0


@pytest.mark.parametrize("policies", [ALL, FULL, LOCAL])
def test_it_stays_where_the_others_are_as_full_or_the_pause_is_short(policies: Policies) -> None:
    p = prefill("p", rates=Rates(step=STEP), total_blocks=1000)
    full = (700, 300), (800, 300)
    index, job = ask(policies, 3.0, p, d("here", *full), d("there", *full))
    with pytest.raises(Stays, match="stays"):
        decide(job, index, policies, 0.0, Random(0), ("here",))
    index, job = ask(policies, 0.1, p, d("here", *full), d("there"))
    with pytest.raises(Stays):
        decide(job, index, policies, 0.0, Random(0), ("here",))


def test_it_has_no_other_place_without_another_instance() -> None:
    index, job = ask(ALL, 3.0, d("here", (700, 300), (800, 300)))
    with pytest.raises(Unavailable):
        decide(job, index, ALL, 0.0, Random(0), ("here",))
