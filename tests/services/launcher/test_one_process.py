"""Gateway, scheduler and monitor as one process, for real: it serves, comes back, and ends with all of its records."""

import signal
from pathlib import Path

import httpx
import pytest
import yaml
from rich.console import Console

from benchmarks.suite import on_free_ports
from services.launcher.cluster_file import load_cluster
from services.launcher.suite import until
from services.launcher.up import RunningSuite, running_suite
from shared.domain.instance import Role
from tests.patient_clusters import patient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
INSTANCE = {"engine": "emulated", "accelerator": "A100-SXM-80", "kv_cache_bytes": 1 << 30}
CLUSTER = {
    "name": "test",
    "model": "models/demo",
    "served_model_name": "m",
    "one_process": True,
    "policies": {"placement": "least_load", "split": "full", "dispatch": "power_of_two"},
    "dashboard": {"enabled": False},
    "predictor": {"enabled": False},
    "planner": {"enabled": False},
    "instances": [{"id": name, "role": role, **INSTANCE} for name, role in (("p", "prefill"), ("d", "decode"))],
}


async def complete(http: httpx.AsyncClient, running: RunningSuite, tokens: int) -> str:
    body = {"model": "m", "prompt": [400] * 60, "max_tokens": tokens, "ignore_eos": True}
    answer = await http.post(f"{running.plan.api_url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == tokens
    return str(answer.json()["id"])


async def written(running: RunningSuite, answer: str) -> int:
    """The output tokens of a complete answer, by its row in the database; 0 where there is none."""
    (scheduler,) = running.suite.schedulers()
    async with scheduler:
        page = await scheduler.search(phase="completed")
    return sum(row.output_tokens for row in page.rows if row.job_id.startswith(answer))


async def test_it_serves_and_comes_back_and_at_its_end_no_record_is_lost(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(patient(CLUSTER)))
    cluster = on_free_ports(load_cluster(tmp_path / "cluster.yaml"))
    async with (
        running_suite(cluster, tmp_path / "data", Console(stderr=True)) as running,
        httpx.AsyncClient(timeout=120, trust_env=False) as http,
    ):
        suite = running.suite
        assert {"control", "p", "d"} <= {each.name for each in suite.state.processes}
        assert not {"gateway", "scheduler", "monitor"} & {each.name for each in suite.state.processes}
        first = await complete(http, running, 7)
        await until(lambda: written(running, first), 60, "its row")
        for name in ("gateway", "scheduler", "monitor"):  # each has its metrics, at its own port
            url = next(each.health_url for each in running.plan.processes if each.name == name)
            text = (await http.get(url.replace("/health", "/metrics"))).text
            assert f"polyphase_{name}_" in text

        old = suite.kill("control")
        await suite.restarted("control", old)
        await suite.wait_ready()
        assert await suite.ready(Role.DECODE) == ["d"]
        await complete(http, running, 9)

        last = await complete(http, running, 11)
        old = suite.kill("control", signal.SIGTERM)  # the last reports are written at its end
        await suite.restarted("control", old)
        assert await written(running, first) == 7
        assert await written(running, last) == 11
