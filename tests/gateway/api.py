"""The real API layer over a cluster without engines."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from gateway.edge import Edge
from gateway.job import Job
from gateway.settings import GatewaySettings
from shared.wire.messages import JobReport, TokenStep
from tests.gateway.cluster import Cluster, until

if TYPE_CHECKING:
    from gateway.core import JobRunner

MODEL = Path(__file__).parents[2] / "models" / "demo"
PROMPT = [400, 401, 402, 403]
HELLO = [{"role": "user", "content": "Hello"}]
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class Api:
    """The application, with the cluster behind it."""

    def __init__(self, client: httpx.AsyncClient, cluster: Cluster, edge: Edge, settings: GatewaySettings) -> None:
        self.client = client
        self.settings = settings
        self.cluster = cluster
        self.admission = edge.admission
        self.edge = edge
        self.app: Any = edge.app
        self.state: Any = self.app.state
        self.core: Any = self.state.engine_client._core

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        """Fields may be anything that Python's JSON writes, such as NaN."""
        content = json.dumps({"model": "demo", **body})
        return await self.client.post(path, content=content, headers={"Content-Type": "application/json", **headers})

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, **body})

    async def chat(self, **body: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 6, "temperature": 0, **body})

    async def final_reports(self, count: int) -> list[JobReport]:
        """Of the jobs that workers have seen since `reset`, once there are so many."""

        def final() -> list[JobReport]:
            workers = self.cluster.workers
            ids = {request.job.job_id for worker in workers for request in (*worker.prefills, *worker.decodes)}
            return [report for report in self.cluster.reports if report.phase.final and report.job_id in ids]

        await until(lambda: len(final()) >= count)
        return final()

    async def idle(self) -> None:
        """No job is left in the gateway, nor in vLLM's books, and vLLM's output handler lives."""
        await until(lambda: not self.core._jobs and not self.admission.jobs and not self.admission.tokens)
        llm = self.state.engine_client
        processor = llm.output_processor
        books = (processor.request_states, processor.external_req_ids, processor.parent_requests)
        assert (*map(len, books), llm.errored) == (0, 0, 0, False)

    @contextmanager
    def running_jobs(self, runner: "JobRunner") -> Iterator[None]:
        """`runner` runs the jobs in the pipeline's place."""
        pipeline, self.core._pipeline = self.core._pipeline, runner
        try:
            yield
        finally:
            self.core._pipeline = pipeline

    def reset(self) -> None:
        self.cluster.reports.clear()
        for worker in self.cluster.workers:
            worker.reset()


class Engine:
    """Runs jobs with one token each turn of the event loop. The hook `before` may wait, fail, or give tokens itself."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.ended: list[Job] = []
        self.before: Any = None

    async def run(self, job: Job) -> None:
        self.jobs.append(job)
        try:
            while not job.finished:
                known = len(job.tokens)
                if self.before is not None:
                    await self.before(job)
                await asyncio.sleep(0)
                if len(job.tokens) != known:
                    continue
                last = len(job.tokens) + 1 == job.spec.max_tokens
                job.accept(TokenStep([300 + len(job.tokens) % 90], "length" if last else ""))
        finally:
            self.ended.append(job)


class Listening:
    """A running HTTP server: only a real connection can be broken."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.socket: socket.socket = server.servers[0].sockets[0]
        self.port: int = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def buffer_little(self, size: int) -> None:
        with socket.fromfd(self.socket.fileno(), self.socket.family, self.socket.type) as real:
            real.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)


@asynccontextmanager
async def listening(app: Any, *, lifespan: str = "auto", **options: Any) -> AsyncIterator[Listening]:
    from gateway.app import http_server

    server = http_server(app, "127.0.0.1", 0, **options)
    server.config.lifespan = lifespan
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started, 30.0)
    yield Listening(server)
    server.should_exit = True
    await serving


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream that ended well."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def text_of(events: list[Any]) -> str:
    """The text of an answer, or of the events of a stream."""
    choices = [choice for event in events if isinstance(event, dict) for choice in event["choices"]]
    return "".join(
        choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content") or ""
        for choice in choices
    )
