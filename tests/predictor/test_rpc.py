"""The RPC answers as the HTTP API does, over a real socket, and within each call's deadline."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tokenizers import Tokenizer, models

from predictor.app import Metrics, Service, open_rpc
from predictor.examples import ServedTokenizer
from predictor.loading import Loaded
from predictor.service import Predictor
from predictor.settings import PredictorSettings
from shared.errors import InvalidRequest
from shared.runtime.tasks import background
from shared.wire.messages import PREDICT, PredictRequest
from shared.wire.rpc_client import RpcClient
from shared.wire.sockets import Sockets
from tests.ports import free_address
from tests.predictor.conftest import FakeClassifier


@asynccontextmanager
async def serving(predictor: Predictor, registry: CollectorRegistry) -> AsyncIterator[RpcClient]:
    address, sockets = free_address(), Sockets()
    try:
        async with (
            background() as tasks,
            open_rpc(Service(PredictorSettings(rpc_address=address), predictor, Metrics(registry, predictor))),
        ):
            tasks.start("batches", predictor.batcher.run())
            client = RpcClient(sockets, address)
            try:
                yield client
            finally:
                client.close()
                await predictor.batcher.close()
    finally:
        sockets.close()


async def test_observed_lengths_use_the_whole_prompts_length_and_the_limit() -> None:
    registry, predictor = CollectorRegistry(), Predictor(PredictorSettings())
    for _ in range(50):
        predictor.observed.observe(2000, 410)
        predictor.observed.observe(10, 50)
    async with serving(predictor, registry) as client:
        long = await client.call(PREDICT, PredictRequest([1, 2, 3], 1800, 900), timeout_s=20)
        short = await client.call(PREDICT, PredictRequest([1, 2, 3], 3, 900), timeout_s=20)
        assert (long.lower_tokens, long.upper_tokens, long.source) == (400, 600, "observed")
        assert (short.lower_tokens, short.upper_tokens) == (0, 200)
        capped = await client.call(PREDICT, PredictRequest([1, 2, 3], 1800, 450), timeout_s=20)
        assert capped.upper_tokens == 451
    counted = generate_latest(registry).decode()
    assert 'polyphase_predictor_latency_seconds_count{source="observed"} 3.0' in counted


async def test_the_classifier_reads_the_tokens_and_meets_the_deadline(fake: FakeClassifier, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("not read here")
    served = ServedTokenizer(Tokenizer(models.WordLevel({"one": 0, "two": 1, "three": 2}, unk_token="one")))
    registry, predictor = (
        CollectorRegistry(),
        Predictor(PredictorSettings(checkpoint=tmp_path), lambda _: Loaded(fake, served)),
    )
    await predictor.start()
    async with serving(predictor, registry) as client:
        found = await client.call(PREDICT, PredictRequest([1, 2], 2, 900), timeout_s=20)
        assert (found.bucket, found.source) == (2, "classifier")
        assert fake.seen == ["two three"]
        fake.gate.clear()
        late = await client.call(PREDICT, PredictRequest([1, 2], 2, 900), timeout_s=1.5)
        assert (late.source, late.upper_tokens, late.model) == ("observed", 901, "")
        fake.gate.set()
    assert 'fallbacks_total{cause="deadline_exceeded"} 1.0' in generate_latest(registry).decode()


async def test_an_invalid_request_does_not_affect_the_next() -> None:
    registry, predictor = CollectorRegistry(), Predictor(PredictorSettings())
    wrong: Any = {"prompt_token_ids": "words"}
    async with serving(predictor, registry) as client:
        with pytest.raises(InvalidRequest):
            await client.call(PREDICT, wrong, timeout_s=20)
        assert (await client.call(PREDICT, PredictRequest([], 0, 0), timeout_s=20)).source == "observed"
