"""The predictor's interfaces: HTTP with validated and size-limited bodies, RPC for gateways, and Prometheus metrics.
Importing the module loads neither torch, transformers nor numpy.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Annotated, Any, Literal, Self, cast

import msgspec
from fastapi import APIRouter, Body, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import Request as StarletteRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from predictor.loading import Loaded, Query
from predictor.service import SOURCE, Predictor
from predictor.settings import PredictorSettings
from shared.domain.job import LengthPrediction
from shared.errors import InvalidRequest
from shared.runtime.http import error_response, json_response, service_app
from shared.runtime.tasks import background
from shared.wire.api.predictor import MAX_TOKENS, Accepted, Observation, Predicted
from shared.wire.bodies import body_of
from shared.wire.messages import PREDICT, PredictRequest
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Sockets

MAX_OBSERVATIONS = 10_000
QUANTILES = (0.1, 0.5, 0.9, 0.99)
LATENCY_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
DEADLINE_SHARE = 0.9  # of an RPC's timeout; the rest is for the way back
TokenCount = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
PositiveCount = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
router = APIRouter()


class _Body(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False, extra="forbid", strict=True, frozen=True)


class PredictBody(_Body):
    """Either `prompt`, or the last `prompt_token_ids` of the served model and the number `prompt_tokens` of all."""

    prompt: str | None = None
    prompt_token_ids: list[TokenCount] | None = Field(default=None, max_length=1 << 20)
    prompt_tokens: TokenCount | None = None
    max_tokens: PositiveCount | None = None
    timeout_ms: Annotated[float, Field(gt=0, le=60_000)] | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt is None) == (self.prompt_token_ids is None):
            raise ValueError("give exactly one of prompt and prompt_token_ids")
        try:
            (self.prompt or "").encode()
        except UnicodeEncodeError as error:  # JSON can contain half a surrogate pair
            raise ValueError("prompt is not valid Unicode") from error
        ids = self.prompt_token_ids or []
        if self.prompt_tokens is not None and self.prompt_tokens < len(ids):
            raise ValueError(
                f"prompt_tokens must be at least the number of token ids ({len(ids)}), got {self.prompt_tokens}"
            )
        return self

    def to_query(self, default_timeout_ms: float) -> Query:
        ids = self.prompt_token_ids
        return Query(
            timeout_s=(self.timeout_ms or default_timeout_ms) / 1000,
            text=self.prompt,
            token_ids=tuple(ids or ()),
            prompt_tokens=len(ids) if self.prompt_tokens is None and ids is not None else self.prompt_tokens,
            max_tokens=self.max_tokens,
        )


Observations = Annotated[list[Observation], Body(), body_of(list[Observation])]


class UseBody(_Body):
    """The source of predictions: see `PredictorSettings.use`."""

    use: Literal["auto", "classifier", "observed"]


class BodyLimit:
    """Answers 413 to a body of more than `max_bytes`, whatever its declared length, without storing it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = bytearray()
        message: Message = {"more_body": True}
        while message.get("more_body", False):
            message = await receive()
            if message["type"] != "http.request":  # the client has disconnected
                return
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                error = InvalidRequest(f"the body must have at most {self._max_bytes} bytes")
                response = error_response(StarletteRequest(scope), error)
                response.status_code = 413
                await response(scope, receive, send)
                return
        parts = iter([{"type": "http.request", "body": bytes(body), "more_body": False}])

        async def replay() -> Any:
            return next(parts, None) or await receive()

        await self._app(scope, replay, send)


class Metrics(Collector):
    """The latency of predictions, counted per call, and the predictor's state, read when scraped."""

    def __init__(self, registry: CollectorRegistry, predictor: Predictor) -> None:
        self._predictor = predictor
        self.latency_s = Histogram(
            "polyphase_predictor_latency_seconds",
            "Time to answer a prediction, by source.",
            ["source"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        predictor = self._predictor
        pending, observations = predictor.batcher.pending, predictor.observed.observations
        gauges = (
            ("pending", "Predictions that wait or run in the classifier.", pending),
            ("observations", "Finished answers learnt from.", observations),
            ("classifier_answers", "1 while the classifier is used.", predictor.source == SOURCE),
        )
        for name, help_text, value in gauges:
            yield GaugeMetricFamily(f"polyphase_predictor_{name}", help_text, value=value)
        fallbacks = CounterMetricFamily(
            "polyphase_predictor_fallbacks",
            "Predictions of observed lengths in the classifier's place.",
            labels=["cause"],
        )
        for cause, count in predictor.fallbacks.items():
            fallbacks.add_metric([cause], count)
        yield fallbacks
        accuracy = GaugeMetricFamily(
            "polyphase_predictor_accuracy", "Share of the last answers that each predicted correctly.", labels=["of"]
        )
        for name, share in (predictor.reality.accuracy.known() if predictor.reality else {}).items():
            accuracy.add_metric([name], share)
        yield accuracy


class Service:
    """What the routes need."""

    def __init__(self, settings: PredictorSettings, predictor: Predictor, metrics: Metrics) -> None:
        self.settings = settings
        self.predictor = predictor
        self._metrics = metrics

    async def predict(self, query: Query) -> tuple[LengthPrediction, float]:
        """A prediction and its latency in seconds."""
        started_mono = perf_counter()
        prediction = await self.predictor.predict(query)
        latency_s = perf_counter() - started_mono
        self._metrics.latency_s.labels(prediction.source).observe(latency_s)
        return prediction, latency_s


def build_app(settings: PredictorSettings, load: Callable[[PredictorSettings], Loaded] | None = None) -> FastAPI:
    """The service. load: replaces the loading of a checkpoint, for tests."""
    registry = CollectorRegistry()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        predictor = Predictor(settings, load)
        app.state.service = service = Service(settings, predictor, Metrics(registry, predictor))
        async with background() as tasks, open_rpc(service):
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


@asynccontextmanager
async def open_rpc(service: Service) -> AsyncIterator[None]:
    """Serve PREDICT, where an address is set. The timeout of a call is its deadline."""

    async def predict(request: PredictRequest, call: ServerCall) -> LengthPrediction:
        ids = tuple(request.prompt_token_ids)
        prompt_tokens, max_tokens = max(len(ids), request.prompt_tokens), max(1, request.max_tokens)
        query = Query(DEADLINE_SHARE * call.timeout_s, None, ids, prompt_tokens, max_tokens)
        prediction, _ = await service.predict(query)
        return prediction

    if not service.settings.rpc_address:
        yield
        return
    sockets = Sockets.from_settings(service.settings)
    try:
        async with RpcServer(sockets, service.settings.rpc_address, {PREDICT: predict}):
            yield
    finally:
        sockets.close()


def _service(request: Request) -> Service:
    return cast(Service, request.app.state.service)


AnyService = Annotated[Service, Depends(_service)]


@router.post("/v1/predict")
async def predict(body: PredictBody, service: AnyService) -> Response:
    """Predict the output length of one prompt, within its deadline."""
    prediction, latency_s = await service.predict(body.to_query(service.settings.timeout_ms))
    answer = Predicted(**msgspec.structs.asdict(prediction), latency_ms=latency_s * 1000)
    if prediction.confidence > 0.0:
        quantiles = {str(share): prediction.quantile(share) for share in QUANTILES}
        answer = msgspec.structs.replace(answer, mean=prediction.mean, quantiles=quantiles)
    return json_response(answer)


@router.post("/v1/observations")
async def observe(body: Observations, service: AnyService) -> Response:
    """Learn from finished answers, and judge the classifier by its predictions of them."""
    if len(body) > MAX_OBSERVATIONS:
        raise InvalidRequest(f"at most {MAX_OBSERVATIONS} observations are accepted at once, got {len(body)}")
    for observation in body:
        service.predictor.observe(observation)
    return json_response(Accepted(len(body), service.predictor.observed.observations))


@router.get("/v1/model")
async def model(service: AnyService) -> Response:
    """The source of predictions, the classifier's metadata, the observed histograms."""
    return json_response(service.predictor.describe())


@router.post("/v1/model/reload")
async def reload(service: AnyService) -> Response:
    """Load the checkpoint that is on disk now; 503 with the reason if it is broken, and the present one stays."""
    await service.predictor.reload()
    return json_response(service.predictor.describe())


@router.post("/v1/model/use")
async def use(body: UseBody, service: AnyService) -> Response:
    """Select the source of predictions until the next start."""
    service.predictor.use = body.use
    return json_response(service.predictor.describe())


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    """Unknown paths, wrong methods and unreadable bodies as OpenAI's error objects."""
    assert isinstance(error, HTTPException)
    response = error_response(request, InvalidRequest(str(error.detail)))
    response.status_code = error.status_code
    return response
