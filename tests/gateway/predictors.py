"""Predictors that do as they are told, and jobs that are asked about."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from gateway.job import Job
from shared.domain.job import LengthPrediction, Slo
from shared.timeline import Span
from shared.wire.messages import PREDICT, PredictRequest
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Sockets
from tests.gateway.cluster import Cluster, make_job
from tests.gateway.worker import listen

PROMPT = list(range(1000))
LONG_S = 20.0  # nobody waits so long in a test that passes


@dataclass
class Predictor:
    """Answers with `source` after `takes_s`, while `go` is set; `refuse` is raised instead."""

    source: str = "classifier"
    refuse: Exception | None = None
    takes_s: float = 0.0
    asked: list[PredictRequest] = field(default_factory=list)
    ended: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.go.set()

    async def predict(self, request: PredictRequest, _: ServerCall) -> LengthPrediction:
        self.asked.append(request)
        try:
            await self.go.wait()
            await asyncio.sleep(self.takes_s)
        finally:
            self.ended += 1
        if self.refuse is not None:
            raise self.refuse
        return LengthPrediction(2, 400, 600, 0.8, self.source)


@asynccontextmanager
async def served(predictor: Predictor, address: str) -> AsyncIterator[None]:
    sockets = Sockets()
    server = await listen(RpcServer(sockets, address, {PREDICT: predictor.predict}))
    try:
        yield
    finally:
        predictor.go.set()
        await server.__aexit__(None, None, None)
        sockets.close()


async def run(cluster: Cluster, max_tokens: int = 4, ttft_s: float = 2 * LONG_S) -> Job:
    job, _ = make_job(PROMPT, max_tokens)
    job.spec = replace(job.spec, slo=Slo(ttft_s=ttft_s))
    async with asyncio.timeout(LONG_S):
        await cluster.pipeline.run(job)
    assert job.finished
    return job


def placement_s(job: Job) -> float:
    (placement,) = [one for one in job.timeline.spans if one.span is Span.PLACEMENT]
    return placement.ended_s - placement.started_s


async def until_asked(predictor: Predictor, count: int) -> None:
    async with asyncio.timeout(LONG_S):
        while len(predictor.asked) < count:
            await asyncio.sleep(0.005)
