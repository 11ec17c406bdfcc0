"""The HTTP interface over an in-memory transport, with a fake classifier where one is needed."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from predictor.checkpoint import META_FILE, BrokenCheckpoint
from predictor.service import Loaded
from predictor.settings import PredictorSettings

PLAIN = PredictorSettings()


@pytest.fixture
def on_disk(tmp_path: Path) -> PredictorSettings:
    """Settings whose checkpoint folder has something in it; what, the `load` of the test says."""
    (tmp_path / META_FILE).write_text("{}")
    return PredictorSettings(checkpoint=tmp_path, queue_depth=1)


async def test_without_a_checkpoint_observed_lengths_answer(serve: Any) -> None:
    async with serve(PLAIN) as client:
        first = (await client.post("/v1/predict", json={"prompt": "hello", "max_tokens": 900})).json()
        assert first.pop("latency_ms") >= 0
        assert first == {"bucket": 0, "lower_tokens": 0, "upper_tokens": 901, "confidence": 0.0, "source": "observed"}
        fed = await client.post("/v1/observations", json=[{"prompt_tokens": 2000, "output_tokens": 410}] * 50)
        assert fed.json() == {"accepted": 50, "observations": 50}
        ids = {"prompt_token_ids": [1, 2, 3], "prompt_tokens": 1800}
        found = (await client.post("/v1/predict", json=ids)).json()
        assert (found["bucket"], found["lower_tokens"], found["upper_tokens"]) == (2, 400, 600)
        assert found["confidence"] > 0.9
        about = (await client.get("/v1/model")).json()
        assert about["source"] == "observed"
        assert about["checkpoint"] == {"path": None, "state": "missing", "error": None, "metadata": None}
        assert about["observed"]["observations"] == 50


async def test_health_and_metrics(serve: Any) -> None:
    async with serve(PLAIN) as client:
        assert (await client.get("/health")).json() == {"status": "ok", "service": "predictor"}
        await client.post("/v1/predict", json={"prompt": "hello"})
        text = (await client.get("/metrics")).text
        assert 'polyphase_predictor_latency_seconds_count{source="observed"} 1.0' in text
        assert "polyphase_predictor_classifier_loaded 0.0" in text


async def test_a_checkpoint_is_picked_up_dropped_and_told_broken(serve: Any, fake: Any, tmp_path: Path) -> None:
    folder = tmp_path / "later"
    broken: list[str] = []

    def load(_: PredictorSettings) -> Loaded:
        if broken:
            raise BrokenCheckpoint(broken[0])
        return Loaded(fake, None)

    async with serve(PredictorSettings(checkpoint=folder), load) as client:
        folder.mkdir()
        assert (await client.post("/v1/model/reload")).json()["checkpoint"]["state"] == "missing"
        (folder / META_FILE).write_text("{}")
        loaded = (await client.post("/v1/model/reload")).json()
        assert (loaded["source"], loaded["checkpoint"]["state"]) == ("classifier", "loaded")
        assert loaded["checkpoint"]["metadata"]["scores"]["accuracy"] == 1.0
        found = (await client.post("/v1/predict", json={"prompt": "hello", "max_tokens": 250})).json()
        assert (found["source"], found["bucket"], found["upper_tokens"]) == ("classifier", 2, 251)
        broken.append("weights.bin: torn")
        failed = await client.post("/v1/model/reload")
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "unavailable")
        about = (await client.get("/v1/model")).json()
        assert about["source"] == "observed"
        assert about["checkpoint"]["state"] == "broken"
        assert about["checkpoint"]["error"] == "weights.bin: torn"
        assert (await client.post("/v1/predict", json={"prompt": "x"})).json()["source"] == "observed"


async def test_ids_need_the_served_models_tokenizer(serve: Any, fake: Any, on_disk: Any) -> None:
    class Served:
        def seen_text(self, token_ids: list[int]) -> str:
            return f"text of {token_ids}"

    body = {"prompt_token_ids": [5, 6], "prompt_tokens": 900}
    for served, source in ((None, "observed"), (Served(), "classifier")):
        async with serve(on_disk, lambda _, served=served: Loaded(fake, served)) as client:
            assert (await client.post("/v1/model/reload")).json()["reads_token_ids"] == bool(served)
            assert (await client.post("/v1/predict", json=body)).json()["source"] == source
    assert fake.seen == ["text of [5, 6]"]


async def test_busy_and_past_the_deadline(serve: Any, fake: Any, on_disk: Any) -> None:
    async with serve(on_disk, lambda _: Loaded(fake, None)) as client:
        await client.post("/v1/model/reload")
        fake.gate.clear()
        running = asyncio.create_task(client.post("/v1/predict", json={"prompt": "a", "timeout_ms": 20_000}))
        assert await asyncio.to_thread(fake.started.wait, 20)
        late = await client.post("/v1/predict", json={"prompt": "b", "timeout_ms": 20})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        waiting = asyncio.create_task(client.post("/v1/predict", json={"prompt": "c", "timeout_ms": 20_000}))
        while (await client.get("/v1/model")).json()["pending"] < 2:
            pass
        busy = await client.post("/v1/predict", json={"prompt": "d"})
        assert (busy.status_code, busy.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(busy.headers["Retry-After"]) >= 1
        fake.gate.set()
        assert [(await running).status_code, (await waiting).status_code] == [200, 200]
        assert fake.seen == ["a", "c"]
        metrics = (await client.get("/metrics")).text
        assert 'polyphase_predictor_refused_total{code="busy"} 1.0' in metrics
        assert 'polyphase_predictor_refused_total{code="deadline_exceeded"} 1.0' in metrics


async def test_a_slow_load_does_not_stop_serving(serve: Any, fake: Any, on_disk: Any) -> None:
    gate = threading.Event()

    def load(_: PredictorSettings) -> Loaded:
        assert gate.wait(20)
        return Loaded(fake, None)

    async with serve(on_disk, load) as client:
        reload = asyncio.create_task(client.post("/v1/model/reload"))
        assert (await client.post("/v1/predict", json={"prompt": "x"})).json()["source"] == "observed"
        assert (await client.get("/v1/model")).json()["checkpoint"]["state"] == "loading"
        gate.set()
        assert (await reload).json()["source"] == "classifier"


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
        b'{"prompt": "a", "max_tokens": -5}',
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
async def test_malformed_predictions(serve: Any, body: bytes) -> None:
    async with serve(PLAIN) as client:
        answer = await client.post("/v1/predict", content=body, headers={"content-type": "application/json"})
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
async def test_malformed_observations_teach_nothing(serve: Any, body: Any) -> None:
    async with serve(PLAIN) as client:
        answer = await client.post("/v1/observations", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        assert (await client.get("/v1/model")).json()["observed"]["observations"] == 0


async def test_other_bad_requests_in_the_same_shape(serve: Any) -> None:
    async with serve(PredictorSettings(max_body_bytes=2048)) as client:
        big = await client.post("/v1/predict", json={"prompt": "x" * 3000})
        assert (big.status_code, big.json()["error"]["code"]) == (413, "invalid_request")
        unknown = await client.get("/v2/nothing")
        assert (unknown.status_code, unknown.json()["error"]["message"]) == (404, "Not Found")
        assert (await client.get("/v1/predict")).status_code == 405
        assert (await client.post("/v1/predict", json={"prompt": "x"})).status_code == 200


async def test_a_fault_of_the_classifier_is_a_clear_500(serve: Any, fake: Any, on_disk: Any) -> None:
    def fail(_: str) -> list[float]:
        raise RuntimeError("out of memory")

    fake.probabilities = fail
    async with serve(on_disk, lambda _: Loaded(fake, None)) as client:
        await client.post("/v1/model/reload")
        answer = await client.post("/v1/predict", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "out of memory")
