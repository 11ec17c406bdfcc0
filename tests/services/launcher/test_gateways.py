"""Two gateway processes on one port, for real: they count together, and the other serves on when one is killed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import pytest
import yaml
from rich.console import Console

from benchmarks.suite import on_free_ports
from gateway.auth import ApiKey, create_key
from services.launcher.cluster_file import load_cluster
from services.launcher.suite import Suite, until
from services.launcher.up import running_suite
from tests.patient_clusters import patient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
BOUND, BURST = 6, 5
SLOW = {"emulated_step_s": 0.02, "emulated_prefill_s_per_token": 0.5, "chunk_size": 16, "emulated_prefix_cache": False}
QUEUED = "polyphase_gateway_queued_jobs "


@dataclass
class Client:
    """Clients of each process alone, with headers of a key with a rate, and of one without."""

    suite: Suite
    http: httpx.AsyncClient
    rated: dict[str, str]
    free: dict[str, str]

    @property
    def urls(self) -> tuple[str, ...]:
        return self.suite.state.gateway_urls

    async def models(self, url: str) -> int:
        return (await self.http.get(f"{url}/v1/models", headers=self.rated)).status_code

    async def complete(self, url: str) -> httpx.Response:
        """What lasts longer than the test: its prompt takes five minutes."""
        body = {"model": "m", "prompt": [400] * 600, "max_tokens": 2}
        return await self.http.post(f"{url}/v1/completions", json=body, headers=self.free)

    async def waiting_in_all(self, jobs: int) -> list[int]:
        """How many wait in each process once it is `jobs` in all: metrics may be a second old."""
        found: list[int] = []

        async def so_many() -> bool:
            found[:] = await self.waiting()
            return sum(found) == jobs

        await until(so_many, 60, f"{jobs} jobs to wait")
        return found

    async def waiting(self) -> list[int]:
        """As the metrics of each process have it."""
        texts = [(await self.http.get(f"{url}/metrics")).text for url in self.urls]
        lines = [next(line for line in text.splitlines() if line.startswith(QUEUED)) for text in texts]
        return [round(float(line.removeprefix(QUEUED))) for line in lines]


async def test_what_two_processes_bound_together_and_one_of_them_leaves(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        first, second = client.urls
        assert len({first, second, client.suite.state.api_url}) == 3
        codes = [await client.models(url) for url in (first, second) * BURST]
        assert codes == [200] * BURST + [429] * BURST

        posts = {url: [asyncio.create_task(client.complete(url)) for _ in range(4)] for url in (first, second)}
        everyone = [post for some in posts.values() for post in some]
        await until(lambda: sum(post.done() for post in everyone) == 8 - BOUND, 60, "two posts to be refused")
        refused = [post.result() for post in everyone if post.done()]
        assert {answer.status_code for answer in refused} == {429}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        before = await client.waiting_in_all(BOUND)

        killed, other = client.suite.state.pid("gateway-0"), client.suite.state.pid("gateway-1")
        client.suite.kill("gateway-0")
        broken = await asyncio.gather(*posts[first], return_exceptions=True)
        assert sum(isinstance(one, httpx.HTTPError) for one in broken) == before[0]
        async with httpx.AsyncClient(timeout=60, trust_env=False) as fresh:
            assert (await fresh.get(f"{client.suite.state.api_url}/health")).status_code == 200
        await client.suite.restarted("gateway-0", killed)
        assert client.suite.state.pid("gateway-1") == other
        assert await client.waiting_in_all(before[1]) == [0, before[1]]
        assert await client.models(first) == 429  # the key's rate is as it was

        again = [asyncio.create_task(client.complete(url)) for url in (first, second) * 4]
        await until(lambda: sum(post.done() for post in again) == 8 - before[0], 60, "the others to be refused")
        await client.waiting_in_all(BOUND)
        for post in (*posts[second], *again):
            post.cancel()


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Client]:
    """A suite whose only prefill instance takes half a second for a token."""
    (rated_secret, rated), (free_secret, free) = create_key("rated", 0.001, BURST), create_key("free")
    (folder / "keys.yaml").write_text(yaml.safe_dump([_as_kept(rated), _as_kept(free)]))
    instance = {"engine": "emulated", "accelerator": "A100-SXM-80", "kv_cache_bytes": 1 << 30}
    content = {
        "name": "test",
        "model": "models/demo",
        "served_model_name": "m",
        "gateway": {
            "processes": 2,
            "max_queued_jobs": BOUND,
            "caller_share": 1.0,
            "api_keys_file": str(folder / "keys.yaml"),
        },
        "policies": {"placement": "least_load", "split": "full", "dispatch": "power_of_two"},
        "dashboard": {"enabled": False},
        "predictor": {"enabled": False},
        "planner": {"enabled": False},
        "instances": [{"id": "p", "role": "prefill", **instance, **SLOW}, {"id": "d", "role": "decode", **instance}],
    }
    (folder / "cluster.yaml").write_text(yaml.safe_dump(patient(content)))
    cluster = on_free_ports(load_cluster(folder / "cluster.yaml"))
    limits = httpx.Limits(max_connections=None)
    async with (
        running_suite(cluster, folder / "data", Console(stderr=True)) as suite,
        httpx.AsyncClient(timeout=300, trust_env=False, limits=limits) as http,
    ):
        headers = [{"Authorization": f"Bearer {secret}"} for secret in (rated_secret, free_secret)]
        yield Client(suite.suite, http, *headers)


def _as_kept(key: ApiKey) -> dict[str, object]:
    return {**asdict(key), "classes": list(key.classes)}
