"""The trained classifier in service: batches, precision, and reloads under load."""

import asyncio
import shutil
from typing import Any

import pytest

from predictor.loading import MIN_INPUT_TOKENS, load_from_disk
from predictor.settings import PredictorSettings
from tests.predictor.trained import folder, records, settings

pytestmark = pytest.mark.slow
__all__ = ["folder", "settings"]


def test_a_batch_and_single_rows_have_equal_results(settings: PredictorSettings) -> None:
    classifier = load_from_disk(settings).classifier
    texts = ["", "cats", *[one["prompt"] for one in list(records())[:20]], "x " * 5000]
    rows = [classifier.encode(text) for text in texts]
    assert len({len(row) for row in rows}) > 3
    together = classifier.batch(rows)
    for row, found in zip(rows, together, strict=True):
        assert found == pytest.approx(classifier.batch([row])[0], abs=1e-5)


@pytest.mark.parametrize("changes", [{"dtype": "int8"}, {"dtype": "bfloat16"}, {"input_tokens": 24}])
def test_cheaper_settings_have_nearly_equal_results(settings: PredictorSettings, changes: dict[str, Any]) -> None:
    exact = load_from_disk(settings).classifier
    cheap = load_from_disk(settings.model_copy(update=changes))
    assert cheap.runs is not None
    assert {name: cheap.runs[name] for name in changes} == changes
    agreed = 0
    for one in list(records())[:60]:
        rows = [each.batch([each.encode(one["prompt"])])[0] for each in (exact, cheap.classifier)]
        agreed += max(range(4), key=rows[0].__getitem__) == max(range(4), key=rows[1].__getitem__)
    assert agreed >= 54


def test_a_short_deadline_reduces_the_input_tokens(settings: PredictorSettings) -> None:
    hurried = load_from_disk(settings.model_copy(update={"timeout_ms": 1e-6, "dtype": "auto"}))
    assert hurried.runs is not None
    assert hurried.runs["input_tokens"] == min(32, MIN_INPUT_TOKENS)
    assert load_from_disk(settings).runs["dtype"] == "float32"  # type: ignore[index]


async def test_reloads_under_load_lose_no_request_and_a_broken_one_keeps_the_classifier(
    serve: Any, settings: PredictorSettings
) -> None:
    assert settings.checkpoint is not None
    weights, good = settings.checkpoint / "model.safetensors", settings.checkpoint.with_name("good")
    shutil.copytree(settings.checkpoint, good)
    prompts, sources, stop = [one["prompt"] for one in list(records())[:40]], list[str](), asyncio.Event()
    async with serve(settings) as client:
        await client.post("/v1/model/reload")

        async def ask(offset: int) -> None:
            while not stop.is_set():
                answer = await client.post("/v1/predict", json={"prompt": prompts[(len(sources) + offset) % 40]})
                assert answer.status_code == 200
                sources.append(answer.json()["source"])

        async with asyncio.TaskGroup() as group:
            for offset in range(8):
                group.create_task(ask(offset))
            try:
                for damage in (False, True, False):
                    if damage:
                        weights.write_bytes(weights.read_bytes()[:1000])
                    else:
                        shutil.copy(good / "model.safetensors", weights)
                    assert (await client.post("/v1/model/reload")).status_code == (503 if damage else 200)
                    about = (await client.get("/v1/model")).json()
                    assert about["checkpoint"]["state"] == ("broken" if damage else "loaded")
                    assert about["source"] == "classifier"
            finally:
                stop.set()
    assert len(sources) > 8
    assert set(sources) == {"classifier"}
