"""A predictor without torch: a fake classifier, and an app served in memory."""

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx
import pytest

from predictor.app import build_app
from predictor.checkpoint import CheckpointMeta, Scores
from predictor.loading import Loaded
from predictor.settings import PredictorSettings

META = CheckpointMeta(
    bucket_tokens=100,
    bucket_count=4,
    input_tokens=16,
    base="none",
    served_model="none",
    data_digest="0",
    examples={"train": 1, "val": 1, "test": 1},
    scores=Scores(1, 1.0, 1.0, 1.0, 0.0, [[1]], []),
    means=[50.0, 150.0, 250.0, 350.0],
    seed=0,
    trained_unix_s=0.0,
)


class FakeClassifier:
    """Predicts bucket 2. A call waits while `gate` is closed; `started` is set by the first call."""

    def __init__(self) -> None:
        self.meta = META
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()
        self.seen: list[str] = []
        self.texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return [len(self.texts) - 1] * 16

    def batch(self, rows: Sequence[list[int]]) -> list[list[float]]:
        self.started.set()
        assert self.gate.wait(20)
        self.seen += [self.texts[row[0]] for row in rows]
        return [[0.05, 0.1, 0.8, 0.05] for _ in rows]


Serve = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def meta() -> CheckpointMeta:
    return META


@pytest.fixture
def fake() -> FakeClassifier:
    return FakeClassifier()


@pytest.fixture
def serve() -> Serve:
    """`async with serve(settings, load) as client`: the app with its lifespan, in memory."""

    @asynccontextmanager
    async def serving(
        settings: PredictorSettings, load: Callable[[PredictorSettings], Loaded] | None = None
    ) -> AsyncIterator[httpx.AsyncClient]:
        app = build_app(settings, load)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://predictor", timeout=60) as client,
        ):
            yield client

    return serving
