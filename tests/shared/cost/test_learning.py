"""Step rates learned from an instance's own steps, and the link rate that its imports show."""

from collections.abc import Iterator
from random import Random

import pytest

from shared.cost.learning import LinkLearner, StepLearner
from shared.cost.library import Library
from shared.cost.step import Batch, StepModel
from shared.cost.step_rates import profile_batches, step_rates_of
from shared.domain.kv import Codec
from shared.domain.rates import LinkRate, StepForm, StepRates, StepSource

BUDGET, SEATS = 512, 64
TRUE = Library.built_in().step_model("A10", "Llama-3-8B")
WRONG = step_rates_of(Library.built_in().step_model("A100-SXM-80", "Llama-3-8B").step_time_s, BUDGET, SEATS)


def batches(seed: int) -> Iterator[Batch]:
    rng = Random(seed)
    every = [batch for of_kind in profile_batches(BUDGET, SEATS).values() for batch in of_kind]
    while True:
        yield rng.choice(every)


def off(rates: StepRates, model: StepModel, slower: float = 1.0) -> dict[str, float]:
    """By kind, the mean error of predicted step times."""
    found: dict[str, list[float]] = {}
    for kind, of_kind in profile_batches(BUDGET, SEATS).items():
        for batch in of_kind:
            tokens, before = batch.prefill[0] if batch.prefill else (0, 0)
            said = rates.mixed_s(tokens, before, batch.decode_count, batch.decode_context_tokens)
            found.setdefault(kind, []).append(abs(said / (model.step_time_s(batch) * slower) - 1.0))
    return {kind: sum(errors) / len(errors) for kind, errors in found.items()}


class Serving:
    """An instance that steps, `slower` than its model, with noise and outliers."""

    def __init__(self, start: StepRates = WRONG, outliers: float = 0.02) -> None:
        self.learner = StepLearner(start, BUDGET, SEATS)
        self.now = 1000.0
        self.slower = 1.0
        self._rng = Random(1)
        self._batches = batches(2)
        self._outliers = outliers

    def step(self, batch: Batch | None = None) -> None:
        batch = batch or next(self._batches)
        seconds = TRUE.step_time_s(batch) * self.slower * self._rng.uniform(0.95, 1.05)
        self.now += seconds
        hiccup = 10.0 if self._rng.random() < self._outliers else 1.0
        self.learner.add(batch, seconds * hiccup, self.now)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.step()

    @property
    def rates(self) -> StepRates:
        return self.learner.rates(self.now)


def test_a_start_that_is_a_third_of_the_truth_is_corrected_in_seconds() -> None:
    serving = Serving()
    assert max(off(serving.rates, TRUE).values()) > 0.5
    serving.run(20.0)
    found, possible = off(serving.rates, TRUE), off(step_rates_of(TRUE.step_time_s, BUDGET, SEATS), TRUE)
    assert all(found[kind] < possible[kind] + 0.05 for kind in found)  # three linear forms cannot do better


def test_a_slower_instance_is_seen_within_five_seconds_and_a_faster_one_too() -> None:
    serving = Serving()
    serving.run(60.0)
    serving.slower = 2.0
    serving.run(5.0)
    assert max(off(serving.rates, TRUE, 2.0).values()) < 0.12
    serving.run(200.0)
    assert max(off(serving.rates, TRUE, 2.0).values()) < 0.1
    serving.slower = 1.0
    serving.run(5.0)
    assert max(off(serving.rates, TRUE).values()) < 0.12


def test_outliers_hardly_count() -> None:
    calm, rough = Serving(outliers=0.0), Serving(outliers=0.1)
    for serving in (calm, rough):
        serving.run(60.0)
    assert max(off(rough.rates, TRUE).values()) < max(off(calm.rates, TRUE).values()) + 0.05


def test_one_kind_of_step_tells_of_the_others() -> None:
    """An instance that only decodes: its prefill is as much slower than the start as its decodes are."""
    serving = Serving()
    decodes = profile_batches(BUDGET, SEATS)["decode"]
    for number in range(300):
        serving.step(decodes[number % len(decodes)])
    errors = off(serving.rates, TRUE)
    assert errors["decode"] < 0.05
    assert errors["prefill"] < off(WRONG, TRUE)["prefill"] / 2
    assert serving.rates.decode.steps == 300
    assert serving.rates.prefill.steps == 0


def test_the_error_is_that_of_the_steps() -> None:
    serving = Serving(outliers=0.0)
    serving.run(60.0)
    for form in (serving.rates.prefill, serving.rates.decode, serving.rates.mixed):
        assert 0.005 < form.error < 0.1


def test_nothing_seen_is_the_start_and_no_time_is_negative() -> None:
    start = Serving().rates
    assert start.source is StepSource.CATALOGUE
    assert start.decode_s(8, 8000) == pytest.approx(WRONG.decode_s(8, 8000), rel=1e-6)
    serving = Serving(StepRates(StepForm(0.01), StepForm(0.01), StepForm(0.01)))
    for _ in range(3):
        serving.step()
    assert serving.rates.source is StepSource.LEARNED
    for form in (serving.rates.prefill, serving.rates.decode, serving.rates.mixed):
        assert min(form.fixed_s, form.token_s, form.position_s, form.sequence_s, form.context_s) >= 0.0
    serving.learner.add(Batch((), 1, 100), 0.0, serving.now)  # no time: no step
    assert serving.rates.decode.steps <= 3


MB = 1 << 20


def raw(links: LinkLearner, exporter: str, size: int, seconds: float) -> None:
    links.add(exporter, Codec.RAW, size, size, seconds)


def test_the_start_holds_until_a_large_import() -> None:
    links = LinkLearner(LinkRate(1e9, 0.001))
    raw(links, "p", 1000, 0.002)
    assert links.rate == LinkRate(1e9, 0.001)
    raw(links, "p", 10 * MB, 0.01)
    assert links.rate == LinkRate(10 * MB / 0.01, 0.002)
    assert LinkLearner(None).rate is None


def test_imports_that_share_the_way_do_not_make_it_slow() -> None:
    links = LinkLearner(None)
    for number in range(32):
        raw(links, "p", 10 * MB, 0.01 if number % 2 else 0.05)
    assert links.rate is not None
    assert links.rate.bytes_s == pytest.approx(10 * MB / 0.01)


def test_a_link_that_has_become_slower_is_seen() -> None:
    links = LinkLearner(None)
    for seconds in (*[0.01] * 100, *[0.1] * 32):
        raw(links, "p", 10 * MB, seconds)
    assert links.rate is not None
    assert links.rate.bytes_s == pytest.approx(100 * MB)


def test_slow_exporters_are_named() -> None:
    links = LinkLearner(None)
    for name, seconds in (("fast", 0.01), ("usual", 0.012), ("slow", 0.04)):
        raw(links, name, 10 * MB, seconds)
    assert links.rate is not None
    assert links.rate.slow == {"slow": pytest.approx(10 * MB / 0.04)}
    assert links.rate.from_s("slow") < links.rate.from_s("fast") == links.rate.from_s("never seen")


def test_it_is_bounded_and_ignores_nonsense() -> None:
    links = LinkLearner(None)
    for number in range(1000):
        raw(links, f"p{number}", 10 * MB, 0.01 * (1 + number))
    assert links.rate is not None
    assert len(links.rate.slow) <= 16
    assert len(links._peers) <= 64
    raw(links, "p", -1, 1.0)
    raw(links, "p", 10, 0.0)
    assert "p" not in links._peers


def test_what_came_coded_says_how_fast_that_is_and_nothing_bad_of_the_link() -> None:
    links = LinkLearner(None)
    raw(links, "near", 100 * MB, 0.1)
    for name, seconds in (("near", 1.0), ("far", 4.0)):
        links.add(name, Codec.INT8, 200 * MB, 110 * MB, seconds)
    links.add("near", Codec.INT4, 200 * MB, 60 * MB, 0.5)
    assert links.rate is not None
    assert links.rate.bytes_s == pytest.approx(1000 * MB)
    assert links.rate.coded == {"int8": 200 * MB, "int8 far": 50 * MB, "int4": 400 * MB}
    assert links.rate.coded_from_s("int8", "far") == 50 * MB
    assert links.rate.coded_from_s("int8", "near") == links.rate.coded_from_s("int8", "new") == 200 * MB
    assert links.rate.coded_from_s("fp8", "near") is None


def test_a_link_that_has_recovered_is_seen_by_coded_transfers_too() -> None:
    links = LinkLearner(None)
    for _ in range(32):
        raw(links, "p", 10 * MB, 1.0)
    for _ in range(32):
        links.add("p", Codec.INT8, 200 * MB, 110 * MB, 1.0)
    assert links.rate is not None
    assert links.rate.bytes_s == pytest.approx(110 * MB)


def test_before_a_link_is_measured_coded_transfers_are_kept_beside_the_start() -> None:
    links = LinkLearner(LinkRate(1e9, 0.001))
    links.add("p", Codec.INT8, 200 * MB, 110 * MB, 1.0)
    assert links.rate == LinkRate(1e9, 0.001, coded={"int8": 200 * MB})
