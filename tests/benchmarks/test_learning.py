"""`bench learning`: its suite, what is compared, and the shares of a slowed instance."""

from pathlib import Path

import pytest

from benchmarks.learning import (
    BATCHES,
    CORES,
    FEWEST,
    OUTPUT,
    PROMPT,
    Episode,
    Placed,
    apart,
    beside,
    busy_others,
    cluster_of,
    compare,
    kind_of,
    median_error,
    placed,
    report,
    share,
    steady,
    windows,
)
from services.launcher.cluster_file import Cluster
from shared.cost.library import Library
from shared.cost.rates_file import CalibratedKind, Kind, ScaledSteps
from shared.cost.step import Batch
from shared.cost.step_rates import step_rates_of
from shared.domain.instance import Role
from shared.domain.rates import Rates, StepForm, StepRates
from shared.sim.measured import LiveInstance
from shared.wire.messages import StepRecord
from tests.services.fake_worker import make_info

TRUE = ScaledSteps(Library.built_in().step_model("cpu", "Llama-3-8B"))
FEW, MANY = FEWEST - 1, FEWEST


def told(slower: float = 1.0, steps: tuple[int, int, int] = (MANY, MANY, MANY)) -> StepRates:
    """The best that linear forms can say of `TRUE`, `slower`."""
    forms = step_rates_of(lambda batch: slower * TRUE.step_time_s(batch), 256, 16)
    counted = zip((forms.prefill, forms.decode, forms.mixed), steps, strict=True)
    return StepRates(*(StepForm(*(getattr(form, name) for name in NAMES), steps=count) for form, count in counted))


NAMES = ("fixed_s", "token_s", "position_s", "sequence_s", "context_s")


def records(counts: dict[str, int]) -> list[StepRecord]:
    batches = [BATCHES[kind][number % 6] for kind, count in counts.items() for number in range(count)]
    return [
        StepRecord(
            number=number,
            ended_s=float(number),
            seconds=TRUE.step_time_s(batch),
            cpu_s=0.0,
            prefill=batch.prefill,
            decode_count=batch.decode_count,
            decode_context_tokens=batch.decode_context_tokens,
        )
        for number, batch in enumerate(batches)
    ]


def test_the_cluster_is_valid_and_starts_without_rates() -> None:
    cluster = Cluster.model_validate(cluster_of(Path("model")))
    assert cluster.instance_ids == tuple(CORES)
    assert [one.role for one in cluster.instances] == [Role.DECODE, Role.DECODE, Role.PREFILL]
    assert not any("rates_file" in one.extra for one in cluster.instances)


def test_batches_are_of_their_kind() -> None:
    for kind, batches in BATCHES.items():
        assert {kind_of(batch) for batch in batches} == {kind}
        assert len(set(batches)) == len(batches)


def test_rates_that_are_right_are_hardly_off_and_others_are_by_as_much() -> None:
    steps = records(dict.fromkeys(BATCHES, MANY))
    right, wrong = compare("i", told(), TRUE, steps), compare("i", told(1.3), TRUE, steps)
    assert [one.kind for one in right] == ["prefill", "decode", "mixed"]
    assert max(one.mean_error for one in right) < 0.1
    for one, other in zip(right, wrong, strict=True):
        assert other.off == pytest.approx([1.3 * (off + 1.0) - 1.0 for off in one.off])
        assert other.measured_off == pytest.approx([1.3 * (off + 1.0) - 1.0 for off in one.measured_off])
    assert median_error(wrong) == pytest.approx(0.3, abs=0.05)


def test_what_was_hardly_served_or_calibrated_is_not_compared() -> None:
    every = dict.fromkeys(BATCHES, MANY)
    assert [one.kind for one in compare("i", told(steps=(MANY, FEW, MANY)), TRUE, records(every))] == [
        "prefill",
        "mixed",
    ]
    assert [one.kind for one in compare("i", told(), TRUE, records(every | {"prefill": FEW}))] == ["decode", "mixed"]


def test_alike_instances_are_calibrated_each_by_itself() -> None:
    one, other = (LiveInstance(make_info(name, ""), Role.DECODE, "here") for name in ("a", "b"))
    assert one.kind == other.kind
    found = apart((one, other))
    assert found[0].kind != found[1].kind
    assert [each.info for each in found] == [one.info, other.info]


def test_how_many_others_computed_at_the_same_time() -> None:
    def step(ended_s: float, seconds: float) -> StepRecord:
        return StepRecord(0, ended_s, seconds, 0.0, (), 1, 100)

    steps = {"a": [step(1.0, 1.0), step(3.0, 1.0)], "b": [step(1.0, 0.5)], "c": [], "d": [step(1.0, 1.0)]}
    assert busy_others(steps) == pytest.approx({"a": 0.75, "b": 2.0, "c": 0.0, "d": 1.5})


def test_a_calibration_beside_others_is_slower_by_its_curve() -> None:
    found = CalibratedKind(
        kind=Kind("vllm", "cpu", "Llama-3-8B", "float32", 1, 1),
        geometry="Llama-3-8B",
        instances=("a",),
        samples=100,
        mape_percent=0.0,
        naive_mape_percent=0.0,
        bias_percent=0.0,
        compute_factor=1.0,
        bandwidth_factor=1.0,
        step_s=0.0,
        sequence_s=0.0,
        scale=2.0,
        chunk_s=0.01,
        slowdown=(1.0, 1.5),
        saturation_tokens=64,
        rates=Rates(),
    )
    batch = BATCHES["mixed"][0]
    alone = found.step_times(Library.built_in()).step_time_s(batch)
    assert beside(found, 0.0).step_time_s(batch) == pytest.approx(alone)
    assert beside(found, 0.5).step_time_s(batch) == pytest.approx(1.25 * alone)


def work(at_s: float, slowed_part: float) -> list[Placed]:
    """A second of it, a tenth of it at a time."""
    slowed = round(10 * slowed_part)
    return [Placed(at_s + 0.1 * number, "a" if number < slowed else "b", 50) for number in range(10)]


def test_shares_are_of_tokens_over_all_episodes() -> None:
    some = [Placed(9.0, "a", 30), Placed(9.5, "b", 10), Placed(11.0, "b", 40), Placed(31.0, "b", 20)]
    episodes = [Episode("a", 10.0), Episode("b", 30.0)]
    assert share(some, episodes, -1.0, 0.0) == 0.75
    assert share(some, episodes, 0.0, 2.0) == pytest.approx(20 / 60)
    assert share(some, episodes, 5.0, 6.0) is None
    assert windows(some, episodes, -2.0, 2.0) == [(-2.0, 0.75), (0.0, pytest.approx(1 / 3))]


def test_what_found_no_place_is_left_out() -> None:
    row = {"arrived_s": 1.0, "decode_instance": "a", "prompt_tokens": 40, "output_tokens": 2}
    assert placed([row, row | {"decode_instance": ""}]) == [Placed(1.0, "a", 42)]


def judged(after: float) -> dict[str, dict[str, object]]:
    """A share of 0.4 until 100 s, of `after` from 5 s later on."""
    some = [one for at in range(80, 130) for one in work(at, 0.4 if at < 105 else after)]
    right = compare("i", told(), TRUE, records(dict.fromkeys(BATCHES, MANY)))
    return report(right, some, [Episode("a", 100.0)])["aims"]


def test_aims() -> None:
    assert all(aim["met"] for aim in judged(0.2).values())
    missed = [name for name, aim in judged(0.3).items() if not aim["met"]]
    assert missed == ["share_left_within_10_s", "share_left_from_10_to_20_s"]
    wrong = compare("i", told(1.4), TRUE, records({"prefill": 0, "decode": MANY, "mixed": MANY}))
    aims = report(wrong, [], [])["aims"]
    assert not any(aim["met"] for aim in aims.values())
    assert aims["prefill_off_mean_percent"]["got"] == "not measured"


def test_a_steady_load_is_as_dense_as_was_asked() -> None:
    shots = steady(5.0, 100.0, 1)
    assert 400 < len(shots) < 600
    assert shots[-1].at_s < 100.0
    assert all(PROMPT[0] <= one.prompt_tokens <= PROMPT[1] for one in shots)
    assert all(OUTPUT[0] <= one.output_tokens <= OUTPUT[1] for one in shots)


def test_kinds() -> None:
    assert [kind_of(batch) for batch in (Batch(((4, 0),)), Batch((), 1, 5), Batch(((4, 0),), 1, 5))] == list(BATCHES)
