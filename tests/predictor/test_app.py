"""The HTTP interface over an in-memory transport, with a fake classifier where one is needed."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import httpx
import msgspec
import pytest

from predictor.checkpoint import META_FILE, BrokenCheckpoint
from predictor.loading import Loaded
from predictor.settings import PredictorSettings

PLAIN = PredictorSettings()


@pytest.fixture
def on_disk(tmp_path: Path) -> PredictorSettings:
    """Settings with a checkpoint folder that is not empty; the `load` of the test returns the checkpoint."""
    (tmp_path / META_FILE).write_text("{}")
    return PredictorSettings(checkpoint=tmp_path, queue_depth=1, timeout_ms=20_000)


@pytest.fixture
async def plain(serve: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A service without a checkpoint."""
    async with serve(PLAIN) as client:
        yield client


@pytest.fixture
async def client(serve: Any, fake: Any, on_disk: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A service with the fake classifier."""
    async with serve(on_disk, lambda _: Loaded(fake, None)) as client:
        await client.post("/v1/model/reload")
        yield client


async def posted(client: httpx.AsyncClient, path: str, body: Any = None) -> Any:
    return (await client.post(path, json=body)).json()


async def about(client: httpx.AsyncClient) -> Any:
    return (await client.get("/v1/model")).json()


async def test_without_a_checkpoint_observed_lengths_are_used(plain: httpx.AsyncClient) -> None:
    assert (await plain.get("/health")).json() == {"status": "ok", "service": "predictor"}
    first = await posted(plain, "/v1/predict", {"prompt": "hello", "max_tokens": 900})
    assert first.pop("latency_ms") >= 0
    assert first["source"] == "observed"
    assert (first["lower_tokens"], first["upper_tokens"], first["confidence"]) == (0, 901, 0.0)
    assert "quantiles" not in first
    answers = [{"prompt_tokens": 2000, "output_tokens": 410}] * 50
    assert await posted(plain, "/v1/observations", answers) == {"accepted": 50, "observations": 50}
    found = await posted(plain, "/v1/predict", {"prompt_token_ids": [1, 2, 3], "prompt_tokens": 1800})
    assert (found["bucket"], found["lower_tokens"], found["upper_tokens"]) == (2, 400, 600)
    assert found["confidence"] > 0.9
    described = await about(plain)
    assert (described["source"], described["observed"]["observations"]) == ("observed", 50)
    missing = {"path": None, "state": "missing", "error": None, "metadata": None, "runs": None}
    assert described["checkpoint"] == missing
    metrics = (await plain.get("/metrics")).text
    assert 'polyphase_predictor_latency_seconds_count{source="observed"} 2.0' in metrics
    assert "polyphase_predictor_classifier_answers 0.0" in metrics
    assert "polyphase_predictor_observations 50.0" in metrics


async def test_a_checkpoint_appears_breaks_and_disappears(serve: Any, fake: Any, tmp_path: Path) -> None:
    folder = tmp_path / "later"
    broken: list[str] = []

    def load(_: PredictorSettings) -> Loaded:
        if broken:
            raise BrokenCheckpoint(broken[0])
        return Loaded(fake, None)

    async with serve(PredictorSettings(checkpoint=folder, timeout_ms=20_000), load) as client:
        folder.mkdir()
        assert (await posted(client, "/v1/model/reload"))["checkpoint"]["state"] == "missing"
        (folder / META_FILE).write_text("{}")
        loaded = await posted(client, "/v1/model/reload")
        assert (loaded["source"], loaded["checkpoint"]["state"]) == ("classifier", "loaded")
        assert loaded["checkpoint"]["metadata"]["scores"]["accuracy"] == 1.0
        found = await posted(client, "/v1/predict", {"prompt": "hello", "max_tokens": 250})
        assert (found["source"], found["bucket"], found["upper_tokens"]) == ("classifier", 2, 251)
        broken.append("weights.bin: torn")
        failed = await client.post("/v1/model/reload")
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "unavailable")
        checkpoint = (await about(client))["checkpoint"]
        assert (checkpoint["state"], checkpoint["error"]) == ("broken", "weights.bin: torn")
        assert (await posted(client, "/v1/predict", {"prompt": "x"}))["source"] == "classifier", "the one before"
        rmtree(folder)
        assert (await posted(client, "/v1/model/reload"))["source"] == "observed"


async def test_token_ids_need_the_served_models_tokenizer(serve: Any, fake: Any, on_disk: Any) -> None:
    class Served:
        def seen_text(self, token_ids: list[int]) -> str:
            return f"text of {token_ids}"

    for served, source in ((None, "observed"), (Served(), "classifier")):
        async with serve(on_disk, lambda _, served=served: Loaded(fake, served)) as client:
            assert (await posted(client, "/v1/model/reload"))["reads_token_ids"] == bool(served)
            body = {"prompt_token_ids": [5, 6], "prompt_tokens": 900}
            assert (await posted(client, "/v1/predict", body))["source"] == source
    assert fake.seen == ["text of [5, 6]"]


async def test_predictions_that_the_classifier_cannot_make_in_time(client: httpx.AsyncClient, fake: Any) -> None:
    await posted(client, "/v1/observations", [{"prompt_tokens": 1, "output_tokens": 410}] * 50)
    fake.gate.clear()
    running = asyncio.create_task(posted(client, "/v1/predict", {"prompt": "a", "timeout_ms": 20_000}))
    assert await asyncio.to_thread(fake.started.wait, 20)
    late = await posted(client, "/v1/predict", {"prompt": "b", "timeout_ms": 20})
    assert (late["source"], late["lower_tokens"], late["model"]) == ("observed", 400, "")
    waiting = asyncio.create_task(posted(client, "/v1/predict", {"prompt": "c", "timeout_ms": 20_000}))
    while (await about(client))["pending"] < 2:
        pass
    busy = await posted(client, "/v1/predict", {"prompt": "d"})
    assert (busy["source"], busy["lower_tokens"]) == ("observed", 400)
    fake.gate.set()
    assert [(await each)["source"] for each in (running, waiting)] == ["classifier"] * 2
    assert fake.seen == ["a", "c"]
    metrics = (await client.get("/metrics")).text
    assert 'polyphase_predictor_fallbacks_total{cause="busy"} 1.0' in metrics
    assert 'polyphase_predictor_fallbacks_total{cause="deadline_exceeded"} 1.0' in metrics
    assert (await about(client))["fallbacks"] == {"busy": 1, "deadline_exceeded": 1}


async def test_a_classifier_that_fails(client: httpx.AsyncClient, fake: Any) -> None:
    def fail(_: list[list[int]]) -> list[list[float]]:
        raise RuntimeError("out of memory")

    fake.batch = fail
    assert (await posted(client, "/v1/predict", {"prompt": "x"}))["source"] == "observed"
    assert (await about(client))["fallbacks"] == {"unavailable": 1}


async def test_probabilities_and_quantiles(client: httpx.AsyncClient) -> None:
    found = await posted(client, "/v1/predict", {"prompt": "a", "max_tokens": 350})
    assert found["shares"] == pytest.approx([0.05, 0.1, 0.8, 0.05])
    assert found["quantiles"] == pytest.approx({"0.1": 150, "0.5": 243.75, "0.9": 293.75, "0.99": 340})
    assert found["mean"] == pytest.approx(0.05 * 50.5 + 15 + 200 + 0.05 * 325)


async def test_a_classifier_without_a_gain_is_rejected_and_used_again_later(client: httpx.AsyncClient) -> None:
    """The fake predicts bucket 2, which at first nearly no answer is in."""

    async def serve_requests(times: int, tokens: int) -> set[str]:
        """Predictions and observations as gateways and schedulers send them; returns the sources."""
        sources = set()
        for _ in range(times):
            found = await posted(client, "/v1/predict", {"prompt": "a"})
            sources.add(found["source"])
            prediction = {"model": found["model"], "classified": found["classified"], "expected_tokens": 100.0}
            await posted(client, "/v1/observations", [{"prompt_tokens": 1, "output_tokens": tokens} | prediction])
        return sources

    assert await serve_requests(1, 50) == {"classifier"}
    await serve_requests(230, 50)
    described = await about(client)
    assert (described["source"], described["reality"]["believed"]) == ("observed", False)
    assert "no better than the commonest bucket" in described["why"]
    assert described["reality"]["recent"][-1] == [100.0, 50]
    metrics = (await client.get("/metrics")).text
    assert 'polyphase_predictor_accuracy{of="classifier"} 0.0' in metrics
    assert "polyphase_predictor_classifier_answers 0.0" in metrics
    forced = await posted(client, "/v1/model/use", {"use": "classifier"})
    assert (forced["source"], forced["why"]) == ("classifier", "")
    await posted(client, "/v1/model/use", {"use": "auto"})
    model = described["reality"]["model"]
    right = [{"prompt_tokens": 1, "output_tokens": 50 + 100 * at, "model": model, "classified": at} for at in (1, 2)]
    await posted(client, "/v1/observations", right * 200)
    assert await serve_requests(1, 250) == {"classifier"}
    assert (await about(client))["why"] == ""


async def test_a_classifier_without_a_gain_on_its_own_test_split(serve: Any, fake: Any, on_disk: Any) -> None:
    fake.meta = msgspec.structs.replace(fake.meta, baselines={"majority": 1.0})
    async with serve(on_disk, lambda _: Loaded(fake, None)) as client:
        described = await posted(client, "/v1/model/reload")
        assert described["source"] == "observed"
        assert "its own test split" in described["why"]


async def test_a_classifier_that_is_switched_off_does_not_run(serve: Any, fake: Any, on_disk: Any) -> None:
    settings = on_disk.model_copy(update={"use": "observed"})
    async with serve(settings, lambda _: Loaded(fake, None)) as client:
        assert (await posted(client, "/v1/model/reload"))["why"] == "switched off"
        for _ in range(10):
            assert (await posted(client, "/v1/predict", {"prompt": "a"}))["source"] == "observed"
    assert fake.seen == []


async def test_predictions_continue_during_a_slow_load(serve: Any, fake: Any, on_disk: Any) -> None:
    gate = threading.Event()

    def load(_: PredictorSettings) -> Loaded:
        assert gate.wait(20)
        return Loaded(fake, None)

    async with serve(on_disk, load) as client:
        reload = asyncio.create_task(posted(client, "/v1/model/reload"))
        assert (await posted(client, "/v1/predict", {"prompt": "x"}))["source"] == "observed"
        assert (await about(client))["checkpoint"]["state"] == "loading"
        gate.set()
        assert (await reload)["source"] == "classifier"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b"3",
        b"{}",
        b'{"prompt": 3}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "prompt_token_ids": [1]}',
        b'{"prompt": "a", "max_tokens": 0}',
        b'{"prompt": "a", "max_tokens": true}',
        b'{"prompt": "a", "max_tokens": 99999999999}',
        b'{"prompt": "a", "max_tokens": 1e400}',
        b'{"prompt": "a", "timeout_ms": NaN}',
        b'{"prompt": "a", "timeout_ms": 0}',
        b'{"prompt_token_ids": [-1]}',
        b'{"prompt_token_ids": ["a"]}',
        b'{"prompt": "a", "colour": "red"}',
        b'{"prompt_token_ids": [1, 2], "prompt_tokens": 1}',
    ],
)
async def test_malformed_predictions(plain: httpx.AsyncClient, body: bytes) -> None:
    answer = await plain.post("/v1/predict", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_request")


@pytest.mark.parametrize(
    "body",
    [
        {},
        [{}],
        [{"prompt_tokens": 1, "output_tokens": -1}],
        [{"prompt_tokens": "1", "output_tokens": 1}],
        [{"prompt_tokens": 1, "output_tokens": 1}, 3],
        [{"prompt_tokens": 1, "output_tokens": 1}] * 10_001,
    ],
)
async def test_malformed_observations_are_not_counted(plain: httpx.AsyncClient, body: Any) -> None:
    answer = await plain.post("/v1/observations", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    assert (await about(plain))["observed"]["observations"] == 0


async def test_other_bad_requests(serve: Any) -> None:
    async with serve(PredictorSettings(max_body_bytes=2048)) as client:
        big = await client.post("/v1/predict", json={"prompt": "x" * 3000})
        assert (big.status_code, big.json()["error"]["code"]) == (413, "invalid_request")
        unknown = await client.get("/v2/nothing")
        assert (unknown.status_code, unknown.json()["error"]["message"]) == (404, "Not Found")
        assert (await client.get("/v1/predict")).status_code == 405
        assert (await client.post("/v1/predict", json={"prompt": "x"})).status_code == 200
