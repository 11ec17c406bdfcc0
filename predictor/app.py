"""The predictor's interfaces: HTTP with validated and size-limited bodies, RPC for gateways, and Prometheus
metrics. Importing the module loads neither torch, transformers nor numpy.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Annotated, Any, Literal, Self, cast

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import Request as StarletteRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from predictor.loading import Loaded, Query
from predictor.service import SOURCE, Answer, Predictor
from predictor.settings import PredictorSettings
from shared.domain.job import LengthPrediction
from shared.errors import InvalidRequest
from shared.runtime.http import error_response, service_app
from shared.runtime.tasks import background
from shared.wire.messages import PREDICT, PredictRequest
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Sockets

MAX_OBSERVATIONS = 10_000
MAX_TOKENS = 2**31 - 2
TokenCount = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class PredictBody(BaseModel):
    """Either `prompt`, or the last `prompt_token_ids` of the served model with the whole `prompt_tokens`."""

    model_config = ConfigDict(allow_inf_nan=False, extra="forbid", strict=True, frozen=True)

    prompt: str | None = None
    prompt_token_ids: list[TokenCount] | None = Field(default=None, max_length=1 << 20)
    prompt_tokens: TokenCount | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    timeout_ms: Annotated[float, Field(gt=0, le=60_000)] | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt is None) == (self.prompt_token_ids is None):
            raise ValueError("give exactly one of prompt and prompt_token_ids")
        if self.prompt is not None:
            _require_unicode(self.prompt)
        ids = self.prompt_token_ids or []
        if self.prompt_tokens is not None and self.prompt_tokens < len(ids):
            raise ValueError(f"prompt_tokens is {self.prompt_tokens}, but {len(ids)} token ids came")
        return self

    def to_query(self, default_timeout_ms: float) -> Query:
        """The same, as the service wants it."""
        ids = self.prompt_token_ids
        return Query(
            timeout_s=(self.timeout_ms or default_timeout_ms) / 1000,
            text=self.prompt,
            token_ids=tuple(ids or ()),
            prompt_tokens=len(ids) if self.prompt_tokens is None and ids is not None else self.prompt_tokens,
            max_tokens=self.max_tokens,
        )


class Observation(BaseModel):
    """One finished answer; see `predictor.service.Answer`."""

    model_config = ConfigDict(allow_inf_nan=False, extra="forbid", strict=True, frozen=True)

    prompt_tokens: TokenCount
    output_tokens: TokenCount
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    model: Annotated[str, Field(max_length=64)] = ""
    classified: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] = -1
    expected_tokens: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None

    def to_answer(self) -> Answer:
        """The same, as the service wants it."""
        return Answer(**self.model_dump())


class UseBody(BaseModel):
    """Who is to answer: see `PredictorSettings.use`."""

    model_config = ConfigDict(allow_inf_nan=False, extra="forbid", strict=True, frozen=True)

    use: Literal["auto", "classifier", "observed"]


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        raise ValueError("prompt is not valid Unicode") from error


class BodyLimit:
    """Answers 413 to a body of more than `max_bytes`, declared or not, without keeping it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body up to the bound, then hand it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = bytearray()
        message: Message = {"more_body": True}
        while message.get("more_body", False):
            message = await receive()
            if message["type"] != "http.request":  # the client is gone
                return
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                await self._refuse(scope, receive, send)
                return
        parts = iter([{"type": "http.request", "body": bytes(body), "more_body": False}])

        async def replay() -> Any:
            return next(parts, None) or await receive()

        await self._app(scope, replay, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = error_response(StarletteRequest(scope), InvalidRequest(f"body of more than {self._max_bytes} bytes"))
        response.status_code = 413
        await response(scope, receive, send)


LATENCY_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """Counters that routes feed, and gauges that read the service when scraped."""

    def __init__(self, registry: CollectorRegistry, predictor: Predictor) -> None:
        self.latency_s = Histogram(
            "polyphase_predictor_latency_seconds",
            "Time to answer a prediction, by source.",
            ["source"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        Gauge(
            "polyphase_predictor_pending", "Predictions that wait or run in the classifier.", registry=registry
        ).set_function(lambda: predictor.batcher.pending)
        registry.register(_Judged(predictor))
        Gauge("polyphase_predictor_observations", "Finished answers learnt from.", registry=registry).set_function(
            lambda: predictor.observed.observations
        )
        Gauge(
            "polyphase_predictor_classifier_answers", "1 while the classifier is believed.", registry=registry
        ).set_function(lambda: predictor.source == SOURCE)


class _Judged(Collector):
    """What is known of the classifier now."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def collect(self) -> Iterator[Metric]:
        """Read the service."""
        fallbacks = CounterMetricFamily(
            "polyphase_predictor_fallbacks", "Answers of observed lengths in the classifier's place.", labels=["cause"]
        )
        for cause, count in self._predictor.fallbacks.items():
            fallbacks.add_metric([cause], count)
        yield fallbacks
        judged = GaugeMetricFamily(
            "polyphase_predictor_accuracy", "Share of the last answers that each was right about.", labels=["of"]
        )
        reality = self._predictor.reality
        for name, share in (reality.accuracy if reality else {}).items():
            if share is not None:
                judged.add_metric([name], share)
        yield judged


async def timed(predictor: Predictor, metrics: Metrics, query: Query) -> tuple[LengthPrediction, float]:
    """A prediction and the seconds that it took, counted."""
    started_s = perf_counter()
    found = await predictor.predict(query)
    latency_s = perf_counter() - started_s
    metrics.latency_s.labels(found.source).observe(latency_s)
    return found, latency_s


_OURS = 0.9  # of a call's time: the rest is for the way back, so that its caller hears why


@asynccontextmanager
async def open_rpc(settings: PredictorSettings, predictor: Predictor, metrics: Metrics) -> AsyncIterator[None]:
    """Serve PREDICT, where an address is set. A call's own timeout is its deadline."""

    async def predict(request: PredictRequest, call: ServerCall) -> LengthPrediction:
        ids = tuple(request.prompt_token_ids)
        prompt_tokens, max_tokens = max(len(ids), request.prompt_tokens), max(1, request.max_tokens)
        query = Query(_OURS * call.timeout_s, None, ids, prompt_tokens, max_tokens)
        found, _ = await timed(predictor, metrics, query)
        return found

    if not settings.rpc_address:
        yield
        return
    sockets = Sockets.of(settings)
    try:
        async with RpcServer(sockets, settings.rpc_address, {PREDICT: predict}):
            yield
    finally:
        sockets.close()


QUANTILES = (0.1, 0.5, 0.9, 0.99)
router = APIRouter()


def build_app(settings: PredictorSettings, load: Callable[[PredictorSettings], Loaded] | None = None) -> FastAPI:
    """The service. `load` replaces the loading of a checkpoint, for tests."""
    registry = CollectorRegistry()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        predictor = Predictor(settings, load)
        app.state.predictor, app.state.settings = predictor, settings
        app.state.metrics = metrics = Metrics(registry, predictor)
        async with background() as tasks, open_rpc(settings, predictor, metrics):
            tasks.start("length classifier", predictor.batcher.run())
            tasks.start("first load", predictor.start())
            try:
                yield
            finally:
                await predictor.batcher.close()

    app = service_app("predictor", lifespan, registry, token=settings.token())
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, error_response)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.include_router(router)
    return app


def get_predictor(request: Request) -> Predictor:
    """The service's state."""
    return cast(Predictor, request.app.state.predictor)


def get_metrics(request: Request) -> Metrics:
    """The service's metrics."""
    return cast(Metrics, request.app.state.metrics)


def get_settings(request: Request) -> PredictorSettings:
    """The service's settings."""
    return cast(PredictorSettings, request.app.state.settings)


AnyPredictor = Annotated[Predictor, Depends(get_predictor)]
AnyMetrics = Annotated[Metrics, Depends(get_metrics)]
AnySettings = Annotated[PredictorSettings, Depends(get_settings)]


@router.post("/v1/predict")
async def predict(
    body: PredictBody, predictor: AnyPredictor, metrics: AnyMetrics, settings: AnySettings
) -> dict[str, Any]:
    """Predict the output length of one prompt, within its deadline; `source` says who did."""
    found, latency_s = await timed(predictor, metrics, body.to_query(settings.timeout_ms))
    told: dict[str, Any] = msgspec.to_builtins(found) | {"latency_ms": latency_s * 1000}
    if found.confidence > 0.0:
        told |= {"mean": found.mean, "quantiles": {str(share): found.quantile(share) for share in QUANTILES}}
    return told


@router.post("/v1/observations")
async def observe(body: list[Observation], predictor: AnyPredictor) -> dict[str, int]:
    """Learn from finished answers, and judge the classifier by what it had said of them."""
    if len(body) > MAX_OBSERVATIONS:
        raise InvalidRequest(f"{len(body)} observations; at most {MAX_OBSERVATIONS} at once")
    for one in body:
        predictor.observe(one.to_answer())
    return {"accepted": len(body), "observations": predictor.observed.observations}


@router.get("/v1/model")
async def model(predictor: AnyPredictor) -> dict[str, Any]:
    """Which source answers, the classifier's metadata, the observed histograms."""
    return predictor.describe()


@router.post("/v1/model/reload")
async def reload(predictor: AnyPredictor) -> dict[str, Any]:
    """Take the checkpoint that is on disk now; 503 with the reason when it is broken, and the old one answers on."""
    await predictor.reload()
    return predictor.describe()


@router.post("/v1/model/use")
async def use(body: UseBody, predictor: AnyPredictor) -> dict[str, Any]:
    """Switch the classifier off or on until the next start."""
    predictor.use = body.use
    return predictor.describe()


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    """Unknown paths, wrong methods and unreadable bodies in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    response = error_response(request, InvalidRequest(str(error.detail)))
    response.status_code = error.status_code
    return response
