"""What `deploy/observability` has, for tests: its generator as a module, and a Prometheus that scrapes a suite."""

import asyncio
import importlib.util
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import yaml

from tests.ports import free_port
from tests.services.control_plane import until

HERE = Path(__file__).parents[2] / "deploy" / "observability"


def need(program: str) -> str:
    """Its path; without it the test is skipped."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed (Debian's package: prometheus)")
    return found


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_dashboard", HERE / "make_dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def panel_queries() -> list[str]:
    made = generator()
    return [expr for row in made.rows().values() for panel in row for _, expr in made.queries(panel)]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((HERE / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@dataclass
class Prometheus:
    """A running one."""

    http: httpx.AsyncClient

    async def get(self, path: str, **parameters: str) -> Any:
        answer = await self.http.get(f"/api/v1/{path}", params=parameters)
        body = answer.json()
        assert body["status"] == "success", f"{parameters}: {body}"
        return body["data"]

    async def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        data = await self.get("query", query=expr)
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(one["metric"], float(one["value"][1])) for one in data["result"]]

    async def number(self, expr: str) -> float:
        """The value of a query with at most one result; 0 without a result."""
        found = await self.query(expr)
        assert len(found) <= 1, f"{expr}: {found}"
        return found[0][1] if found else 0.0

    async def by(self, label: str, expr: str) -> dict[str, float]:
        return {labels[label]: value for labels, value in await self.query(expr)}


@asynccontextmanager
async def prometheus(folder: Path, monitor_url: str) -> AsyncIterator[Prometheus]:
    """A Prometheus that scrapes the processes of the monitor's discovery once a second, with our rules."""
    program, port = need("prometheus"), free_port()
    local = yaml.safe_load((HERE / "prometheus.local.yml").read_text())
    local["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    local["rule_files"] = [str(HERE / "rules.yml")]
    (discovery,) = local["scrape_configs"][0]["http_sd_configs"]
    discovery |= {"url": f"{monitor_url}/sd/prometheus", "refresh_interval": "1s"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(local))
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            program,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
            stdout=log,
            stderr=log,
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as http:
            await until(lambda: _ready(http), "Prometheus is ready", timeout_s=60)
            yield Prometheus(http)
    finally:
        process.terminate()
        await process.wait()


async def _ready(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/-/ready")).status_code == 200
    except httpx.HTTPError:
        return False
