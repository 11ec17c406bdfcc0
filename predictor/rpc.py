"""The predictor's RPC, for gateways: an HTTP call costs them a millisecond of their loop for each request."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from predictor.metrics import Metrics, timed
from predictor.query import Query
from predictor.service import Predictor
from predictor.settings import PredictorSettings
from shared.domain.job import LengthPrediction
from shared.wire.messages import PREDICT, PredictRequest
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Sockets

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
