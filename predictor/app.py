"""The predictor's HTTP interface."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, cast

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException

from predictor.bodies import MAX_OBSERVATIONS, Observation, PredictBody, UseBody
from predictor.limit import BodyLimit
from predictor.loading import Loaded
from predictor.metrics import Metrics, timed
from predictor.rpc import open_rpc
from predictor.service import Predictor
from predictor.settings import PredictorSettings
from shared.errors import InvalidRequest
from shared.runtime.http import error_response, service_app
from shared.runtime.tasks import background

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
