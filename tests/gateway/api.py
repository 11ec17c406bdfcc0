"""The real API layer over a cluster without engines: one for all tests here, since vLLM takes seconds to start."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from gateway.edge import Edge
from gateway.settings import GatewaySettings
from shared.wire.messages import JobReport
from tests.gateway.cluster import Cluster
from tests.gateway.worker import Worker

if TYPE_CHECKING:
    from gateway.core import JobRunner

MODEL = Path(__file__).parents[2] / "models" / "demo"
PROMPT = [400, 401, 402, 403]


class Api:
    """The application and the cluster behind it."""

    def __init__(self, client: httpx.AsyncClient, cluster: Cluster, edge: Edge, settings: GatewaySettings) -> None:
        self.client = client
        self.settings = settings
        self.cluster = cluster
        self.admission = edge.admission
        self.edge = edge
        self.app: Any = edge.app

    async def complete(self, **body: Any) -> httpx.Response:
        full = {"model": "demo", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, **body}
        return await self.client.post("/v1/completions", json=full)

    async def chat(self, **body: Any) -> httpx.Response:
        said = [{"role": "user", "content": "Hello"}]
        full = {"model": "demo", "messages": said, "max_tokens": 6, "temperature": 0, **body}
        return await self.client.post("/v1/chat/completions", json=full)

    async def final_reports(self, count: int) -> list[JobReport]:
        """Those of the jobs that workers have seen since `renew`; waits until there are so many."""

        def final() -> list[JobReport]:
            seen = {request.job.job_id for worker in self.workers for request in (*worker.prefills, *worker.decodes)}
            return [report for report in self.cluster.reports if report.phase.final and report.job_id in seen]

        await until(lambda: len(final()) >= count)
        return final()

    @contextmanager
    def running_jobs(self, runner: "JobRunner") -> Iterator[None]:
        """That runs the jobs, not the pipeline."""
        core = self.app.state.engine_client._core
        pipeline, core._pipeline = core._pipeline, runner
        try:
            yield
        finally:
            core._pipeline = pipeline

    @property
    def workers(self) -> list[Worker]:
        return [self.cluster.prefill, *self.cluster.decodes]

    def renew(self) -> None:
        """Every worker as new, nothing reported."""
        self.cluster.reports.clear()
        for worker in self.workers:
            worker.renew()


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """A real server: only a real connection can be broken."""
    from gateway.app import http_server

    server = http_server(app, "127.0.0.1", 0)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started, 30.0)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await serving


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def events(response: httpx.Response) -> list[Any]:
    lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
