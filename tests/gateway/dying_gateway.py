"""A gateway whose output handler dies under a request: `python -m tests.gateway.dying_gateway`."""

import asyncio

import httpx

from gateway.app import prepare_environment, running
from gateway.auth import KeyRing
from gateway.job import Job
from gateway.settings import GatewaySettings
from shared.wire.messages import TokenStep
from tests.gateway.api import MODEL, listening


class OneToken:
    """Runs jobs."""

    async def run(self, job: Job) -> None:
        job.accept(TokenStep([300], "length"))


async def main() -> None:
    """Until the second request is answered, which it must not be."""
    prepare_environment()
    settings = GatewaySettings(schedulers=("tcp://127.0.0.1:1",), model=str(MODEL), served_model_name="demo")
    async with (
        running(settings, KeyRing(()), OneToken()) as edge,
        listening(edge) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        llm = edge.app.state.engine_client  # type: ignore[attr-defined]

        async def die() -> None:
            raise RuntimeError("the fault of no request")

        llm._core.get_output_async = die  # from the next turn on
        for _ in range(2):
            response = await client.post("/v1/completions", json={"model": "demo", "prompt": [1], "max_tokens": 1})
            print("answered", response.status_code, flush=True)
            await asyncio.sleep(0)


if __name__ == "__main__":
    asyncio.run(main())
