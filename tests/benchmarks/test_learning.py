"""`bench learning`: its cluster, what is compared, and the shares of a slowed instance."""

import msgspec
import pytest

from benchmarks.learning import (
    BATCHES,
    MIN_STEPS,
    Compared,
    Episode,
    Placed,
    accuracy,
    busy_others,
    compare,
    placed,
    reaction,
    share,
)
from services.global_scheduler.reports import row_of
from shared.cost.library import Library
from shared.cost.step_rates import step_rates_of
from shared.cost.step_variants import ScaledSteps
from shared.domain.job import Phase
from shared.domain.rates import StepRates
from shared.wire.messages import JobReport, StepRecord

TRUE = ScaledSteps(Library.built_in().step_model("cpu", "Llama-3-8B"))
FEW, MANY = MIN_STEPS - 1, MIN_STEPS
EVERY = dict.fromkeys(BATCHES, MANY)


def published(slower: float = 1.0, steps: dict[str, int] = EVERY) -> StepRates:
    """Linear forms fitted to `TRUE`, `slower`."""
    forms = step_rates_of(lambda batch: slower * TRUE.step_time_s(batch), 256, 16)
    known = {kind: msgspec.structs.replace(getattr(forms, kind), steps=count) for kind, count in steps.items()}
    return StepRates(**known)


def compared(
    slower: float = 1.0, learned: dict[str, int] = EVERY, calibrated: dict[str, int] = EVERY
) -> list[Compared]:
    batches = [BATCHES[kind][number % 6] for kind, count in calibrated.items() for number in range(count)]
    steps = [
        StepRecord(n, float(n), TRUE.step_time_s(one), 0.0, one.prefill, one.decode_count, one.decode_context_tokens)
        for n, one in enumerate(batches)
    ]
    return compare("i", published(slower, learned), TRUE, steps)


def test_an_error_of_the_rates_is_found() -> None:
    right, wrong = compared(), compared(1.3)
    assert [one.kind for one in right] == ["prefill", "decode", "mixed"]
    assert max(one.mean_error for one in right) < 0.1
    for one, other in zip(right, wrong, strict=True):
        assert other.off == pytest.approx([1.3 * (off + 1.0) - 1.0 for off in one.off])
        assert other.measured_off == pytest.approx([1.3 * (off + 1.0) - 1.0 for off in one.measured_off])
    assert accuracy(wrong)["figures"]["off_median_percent"] == pytest.approx(30.0, abs=5.0)


def test_kinds_with_few_steps_are_not_compared() -> None:
    assert [one.kind for one in compared(learned=EVERY | {"decode": FEW})] == ["prefill", "mixed"]
    assert [one.kind for one in compared(calibrated=EVERY | {"prefill": FEW})] == ["decode", "mixed"]


def test_how_many_others_computed_at_the_same_time() -> None:
    def step(ended_s: float, seconds: float) -> StepRecord:
        return StepRecord(0, ended_s, seconds, 0.0, (), 1, 100)

    steps = {"a": [step(1.0, 1.0), step(3.0, 1.0)], "b": [step(1.0, 0.5)], "c": [], "d": [step(1.0, 1.0)]}
    assert busy_others(steps) == pytest.approx({"a": 0.75, "b": 2.0, "c": 0.0, "d": 1.5})


def test_shares_are_of_tokens_over_all_episodes() -> None:
    row = row_of(JobReport("j", "g0", Phase.DECODE, 9.0, 28, 2, decode_instance="a"))
    found = placed([row, msgspec.structs.replace(row, decode_instance="")])
    assert found == [Placed(9.0, "a", 30)]
    work = [*found, Placed(9.5, "b", 10), Placed(11.0, "b", 40), Placed(31.0, "b", 20)]
    episodes = [Episode("a", 10.0), Episode("b", 30.0)]
    assert share(work, episodes, -1.0, 0.0) == 0.75
    assert share(work, episodes, 0.0, 2.0) == pytest.approx(20 / 60)
    assert share(work, episodes, 5.0, 6.0) is None
    figures = reaction(work, episodes)["figures"]
    assert (figures["halved_share_from_-2_s"], figures["share_before"]) == (0.75, 0.75)


@pytest.mark.parametrize(("share_after", "met"), [(0.2, True), (0.3, False)])
def test_a_slowed_instance_must_lose_half_of_its_share(share_after: float, met: bool) -> None:
    """Its share is 0.4 until 5 s after the slowdown."""
    work = [
        Placed(at + 0.1 * number, "a" if number < 10 * (0.4 if at < 105 else share_after) else "b", 50)
        for at in range(80, 130)
        for number in range(10)
    ]
    aims = reaction(work, [Episode("a", 100.0)])["aims"]
    assert [aim["met"] for aim in aims.values()] == [met, met]


def test_what_was_not_measured_misses_its_aim() -> None:
    assert all(aim["met"] for aim in accuracy(compared())["aims"].values())
    aims = accuracy(compared(1.4, calibrated=EVERY | {"prefill": 0}))["aims"] | reaction([], [])["aims"]
    assert not any(aim["met"] for aim in aims.values())
    assert aims["prefill_off_mean_percent"]["got"] == "not measured"
