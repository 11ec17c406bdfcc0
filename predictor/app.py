"""The predictor's HTTP interface."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException

from predictor.bodies import MAX_OBSERVATIONS, Observation, PredictBody
from predictor.limit import BodyLimit
from predictor.metrics import Metrics, timed
from predictor.rpc import open_rpc
from predictor.service import Loaded, Predictor
from predictor.settings import PredictorSettings
from shared.errors import InvalidRequest
from shared.runtime.http import error_response, service_app
from shared.runtime.tasks import background

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
            tasks.start("first load", predictor.start())
            try:
                yield
            finally:
                await predictor.lane.close()

    app = service_app("predictor", lifespan, registry)
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
    """Predict the output length of one prompt; 429 when too many wait, 504 past the deadline."""
    found, latency_s = await timed(predictor, metrics, body.to_query(settings.timeout_ms))
    return {
        "bucket": found.bucket,
        "lower_tokens": found.lower_tokens,
        "upper_tokens": found.upper_tokens,
        "confidence": found.confidence,
        "source": found.source,
        "latency_ms": latency_s * 1000,
    }


@router.post("/v1/observations")
async def observe(body: list[Observation], predictor: AnyPredictor) -> dict[str, int]:
    """Learn from finished answers: `prompt_tokens` in, `output_tokens` out."""
    if len(body) > MAX_OBSERVATIONS:
        raise InvalidRequest(f"{len(body)} observations; at most {MAX_OBSERVATIONS} at once")
    for one in body:
        predictor.observed.observe(one.prompt_tokens, one.output_tokens)
    return {"accepted": len(body), "observations": predictor.observed.observations}


@router.get("/v1/model")
async def model(predictor: AnyPredictor) -> dict[str, Any]:
    """Which source answers, the classifier's metadata, the observed histograms."""
    return predictor.describe()


@router.post("/v1/model/reload")
async def reload(predictor: AnyPredictor) -> dict[str, Any]:
    """Take the checkpoint that is on disk now; 503 with the reason when it is broken."""
    await predictor.reload()
    return predictor.describe()


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    """Unknown paths, wrong methods and unreadable bodies in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    response = error_response(request, InvalidRequest(str(error.detail)))
    response.status_code = error.status_code
    return response
