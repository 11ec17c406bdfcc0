import pytest

from shared.cost.library import Library
from shared.cost.step import Batch
from shared.cost.step_rates import fit_form, profile_batches, saturation_tokens, step_rates_of
from shared.domain.rates import StepForm, StepRates, StepSource
from shared.errors import InvalidRequest


def test_forms_are_recovered_from_their_times() -> None:
    decodes = {"sequence_s": 2e-4, "context_s": 3e-7}
    truth = StepRates(StepForm(0.02, 1e-4, 1e-8), StepForm(0.01, **decodes), StepForm(0.03, 1e-4, 2e-8, **decodes))

    def time_s(batch: Batch) -> float:
        new, before = batch.prefill[0] if batch.prefill else (0, 0)
        return truth.mixed_s(new, before, batch.decode_count, batch.decode_context_tokens)

    found = step_rates_of(time_s, 512, 64, StepSource.FIT)
    for name in ("prefill", "decode", "mixed"):
        for term in ("fixed_s", "token_s", "position_s", "sequence_s", "context_s"):
            assert getattr(getattr(found, name), term) == pytest.approx(getattr(getattr(truth, name), term), rel=1e-6)
    assert found.source is StepSource.FIT
    assert truth.scaled(2.0).mixed_s(100, 50, 4, 900) == pytest.approx(2.0 * truth.mixed_s(100, 50, 4, 900))


def test_forms_follow_a_step_model(library: Library) -> None:
    model = library.step_model("A100", "Llama-3-8B")
    found = step_rates_of(model.step_time_s)
    for batches in profile_batches(512, 128).values():
        errors = []
        for batch in batches:
            new, before = batch.prefill[0] if batch.prefill else (0, 0)
            said = found.mixed_s(new, before, batch.decode_count, batch.decode_context_tokens)
            errors.append(abs(said / model.step_time_s(batch) - 1.0))
        assert sum(errors) / len(errors) < 0.1


def test_saturation() -> None:
    assert saturation_tokens(lambda n: max(1.0, n / 500.0)) == 512
    assert saturation_tokens(lambda n: 1.0 + n / 1000.0, share=0.5, max_tokens=4096) == 1024


def test_the_papers_chunk_size(library: Library) -> None:
    # TetriInfer: 512 tokens saturate OPT-13B on V100s.
    assert saturation_tokens(library.step_model("V100", "OPT-13B", 2).prefill_time_s) == 512


@pytest.mark.parametrize(
    ("seconds", "message"), [([1.0, 1.1], "2 samples are too few for 3"), ([1.0, 2.0, 0.0], "positive and finite")]
)
def test_samples_that_cannot_be_fitted(seconds: list[float], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        fit_form("decode", [(Batch((), 1, 100 * at), taken) for at, taken in enumerate(seconds)])
