"""The HTTP interface over an in-memory transport, with a fake classifier where one is needed."""

import asyncio
import threading
from pathlib import Path
from shutil import rmtree
from typing import Any

import msgspec
import pytest

from predictor.checkpoint import META_FILE, BrokenCheckpoint
from predictor.loading import Loaded
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
        assert first["source"] == "observed"
        assert (first["lower_tokens"], first["upper_tokens"], first["confidence"]) == (0, 901, 0.0)
        assert "quantiles" not in first
        fed = await client.post("/v1/observations", json=[{"prompt_tokens": 2000, "output_tokens": 410}] * 50)
        assert fed.json() == {"accepted": 50, "observations": 50}
        ids = {"prompt_token_ids": [1, 2, 3], "prompt_tokens": 1800}
        found = (await client.post("/v1/predict", json=ids)).json()
        assert (found["bucket"], found["lower_tokens"], found["upper_tokens"]) == (2, 400, 600)
        assert found["confidence"] > 0.9
        about = (await client.get("/v1/model")).json()
        assert about["source"] == "observed"
        assert about["checkpoint"] == {"path": None, "state": "missing", "error": None, "metadata": None, "runs": None}
        assert about["observed"]["observations"] == 50


async def test_health_and_metrics(serve: Any) -> None:
    async with serve(PLAIN) as client:
        assert (await client.get("/health")).json() == {"status": "ok", "service": "predictor"}
        await client.post("/v1/predict", json={"prompt": "hello"})
        text = (await client.get("/metrics")).text
        assert 'polyphase_predictor_latency_seconds_count{source="observed"} 1.0' in text
        assert "polyphase_predictor_classifier_answers 0.0" in text


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
        assert about["checkpoint"]["state"] == "broken"
        assert about["checkpoint"]["error"] == "weights.bin: torn"
        assert (await client.post("/v1/predict", json={"prompt": "x"})).json()["source"] == "classifier"  # the old one
        rmtree(folder)
        assert (await client.post("/v1/model/reload")).json()["source"] == "observed"


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


async def test_where_the_classifier_cannot_answer_in_time_observed_lengths_do(
    serve: Any, fake: Any, on_disk: Any
) -> None:
    async with serve(on_disk, lambda _: Loaded(fake, None)) as client:
        await client.post("/v1/model/reload")
        await client.post("/v1/observations", json=[{"prompt_tokens": 1, "output_tokens": 410}] * 50)
        fake.gate.clear()
        running = asyncio.create_task(client.post("/v1/predict", json={"prompt": "a", "timeout_ms": 20_000}))
        assert await asyncio.to_thread(fake.started.wait, 20)
        late = (await client.post("/v1/predict", json={"prompt": "b", "timeout_ms": 20})).json()
        assert (late["source"], late["lower_tokens"], late["model"]) == ("observed", 400, "")
        waiting = asyncio.create_task(client.post("/v1/predict", json={"prompt": "c", "timeout_ms": 20_000}))
        while (await client.get("/v1/model")).json()["pending"] < 2:
            pass
        busy = (await client.post("/v1/predict", json={"prompt": "d"})).json()
        assert (busy["source"], busy["lower_tokens"]) == ("observed", 400)
        fake.gate.set()
        assert [(await one).json()["source"] for one in (running, waiting)] == ["classifier"] * 2
        assert fake.seen == ["a", "c"]
        metrics = (await client.get("/metrics")).text
        assert 'polyphase_predictor_fallbacks_total{cause="busy"} 1.0' in metrics
        assert 'polyphase_predictor_fallbacks_total{cause="deadline_exceeded"} 1.0' in metrics
        assert (await client.get("/v1/model")).json()["fallbacks"] == {"busy": 1, "deadline_exceeded": 1}


async def test_probabilities_and_quantiles(serve: Any, fake: Any, on_disk: Any) -> None:
    async with serve(on_disk, lambda _: Loaded(fake, None)) as client:
        await client.post("/v1/model/reload")
        said = (await client.post("/v1/predict", json={"prompt": "a", "max_tokens": 350})).json()
        assert said["shares"] == pytest.approx([0.05, 0.1, 0.8, 0.05])
        assert said["quantiles"] == pytest.approx({"0.1": 150, "0.5": 243.75, "0.9": 293.75, "0.99": 340})
        assert said["mean"] == pytest.approx(0.05 * 50.5 + 15 + 200 + 0.05 * 325)


async def test_a_classifier_that_is_no_better_gives_way_and_comes_back(serve: Any, fake: Any, on_disk: Any) -> None:
    """It always says bucket 2, which the answers are in, at first, nearly never."""
    async with serve(on_disk, lambda _: Loaded(fake, None)) as client:
        await client.post("/v1/model/reload")

        async def served(times: int, tokens: int) -> set[str]:
            """Ask, and tell how it went, as gateways and schedulers do."""
            sources = set()
            for _ in range(times):
                said = (await client.post("/v1/predict", json={"prompt": "a"})).json()
                sources.add(said["source"])
                told = {"model": said["model"], "classified": said["classified"], "expected_tokens": 100.0}
                await client.post("/v1/observations", json=[{"prompt_tokens": 1, "output_tokens": tokens} | told])
            return sources

        assert await served(1, 50) == {"classifier"}
        await served(230, 50)
        about = (await client.get("/v1/model")).json()
        assert (about["source"], about["reality"]["believed"]) == ("observed", False)
        assert "no better than the commonest bucket" in about["why"]
        assert about["reality"]["recent"][-1] == [100.0, 50]
        metrics = (await client.get("/metrics")).text
        assert 'polyphase_predictor_accuracy{of="classifier"} 0.0' in metrics
        assert "polyphase_predictor_classifier_answers 0.0" in metrics
        forced = (await client.post("/v1/model/use", json={"use": "classifier"})).json()
        assert (forced["source"], forced["why"]) == ("classifier", "")
        await client.post("/v1/model/use", json={"use": "auto"})
        right = [
            {"prompt_tokens": 1, "output_tokens": 50 + 100 * at, "model": about["reality"]["model"], "classified": at}
            for at in (1, 2)
        ]
        await client.post("/v1/observations", json=right * 200)
        assert await served(1, 250) == {"classifier"}
        assert (await client.get("/v1/model")).json()["why"] == ""


async def test_one_that_its_own_test_split_finds_no_better_is_not_believed(serve: Any, fake: Any, on_disk: Any) -> None:
    fake.meta = msgspec.structs.replace(fake.meta, baselines={"majority": 1.0})
    async with serve(on_disk, lambda _: Loaded(fake, None)) as client:
        about = (await client.post("/v1/model/reload")).json()
        assert about["source"] == "observed"
        assert "its own test split" in about["why"]


async def test_switched_off_it_is_not_asked(serve: Any, fake: Any, on_disk: Any) -> None:
    settings = on_disk.model_copy(update={"use": "observed"})
    async with serve(settings, lambda _: Loaded(fake, None)) as client:
        assert (await client.post("/v1/model/reload")).json()["why"] == "switched off"
        for _ in range(10):
            assert (await client.post("/v1/predict", json={"prompt": "a"})).json()["source"] == "observed"
    assert fake.seen == []


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


async def test_a_fault_of_the_classifier_is_nobodys_but_its_own(serve: Any, fake: Any, on_disk: Any) -> None:
    def fail(_: list[list[int]]) -> list[list[float]]:
        raise RuntimeError("out of memory")

    fake.batch = fail
    async with serve(on_disk, lambda _: Loaded(fake, None)) as client:
        await client.post("/v1/model/reload")
        assert (await client.post("/v1/predict", json={"prompt": "x"})).json()["source"] == "observed"
        assert (await client.get("/v1/model")).json()["fallbacks"] == {"unavailable": 1}
