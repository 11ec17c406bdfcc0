"""The fixtures of these tests."""

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from shared.model.adapters import LoraSection
from tests.gateway.api import MODEL, Api, listening
from tests.gateway.cluster import Cluster, running_cluster


@pytest_asyncio.fixture
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """A cluster without engines; `with_settings` changes the gateway's settings."""
    async with running_cluster(**getattr(request, "param", {})) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def running_api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    """One for all tests: vLLM's API layer takes seconds to start."""
    from gateway.app import prepare_environment, running
    from gateway.auth import KeyRing
    from gateway.settings import GatewaySettings

    prepare_environment()
    async with running_cluster() as cluster:
        settings = GatewaySettings(
            schedulers=(cluster.scheduler_address,),
            model=str(MODEL),
            served_model_name="demo",
            patience_s=0.5,
            lora=LoraSection(adapters={"sql": "/adapters/sql", "org/poems": "/adapters/poems"}),
            max_model_len=2048,
            max_body_bytes=200_000,
            max_queued_jobs=64,
            max_queued_tokens=10_000,
            max_jobs_a_body=24,
            jobs_at_once=4,
            stream_interval_share=0,  # tests count events
            grammar_cpu_s=0.7,
            record_lengths=tmp_path_factory.mktemp("records") / "lengths.jsonl",
        )
        async with (
            running(settings, KeyRing(())) as edge,
            listening(edge) as server,
            httpx.AsyncClient(base_url=server.url, timeout=60) as client,
        ):
            yield Api(client, cluster, edge, settings)


@pytest.fixture
def api(running_api: Api) -> Api:
    running_api.reset()
    return running_api
