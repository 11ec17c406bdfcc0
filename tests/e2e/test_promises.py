"""The whole suite, once, with real engines: every promise of the demo, each a test of its own."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import yaml
from rich.console import Console

from benchmarks.demo.checked_suite import CheckedSuite
from benchmarks.demo.checks import CHECKS
from benchmarks.demo.report import Section
from benchmarks.suite import started
from services.launcher.cluster_file import CLUSTERS
from services.launcher.up import UpOptions, cluster_of
from tests.patient_clusters import patient
from tools.client import ApiClient, Prompts

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def checked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[CheckedSuite]:
    """One running suite for all tests of this file."""
    folder = tmp_path_factory.mktemp("suite")
    content = patient(yaml.safe_load((CLUSTERS / "demo.yaml").read_text()))
    content["gateway"]["predict_timeout_s"] = 20.0
    (folder / "cluster.yaml").write_text(yaml.safe_dump(content))
    cluster = cluster_of(UpOptions(folder / "cluster.yaml", dashboard=False))
    async with (
        started(cluster, folder / "suite", Console(stderr=True)) as running,
        ApiClient(running.plan.api_url, running.plan.model) as api,
    ):
        yield CheckedSuite(running, api, await Prompts.of(api))


@pytest.mark.parametrize("title", CHECKS)
async def test_promise(checked: CheckedSuite, title: str) -> None:
    section = Section(title)
    await CHECKS[title](checked, section)
    assert section.findings, f"{title}: nothing was checked"
    failures = [finding for finding in section.failures if not finding.timed]  # speed is for the demo to judge
    assert not failures, "\n".join(f"{each.name}: want {each.want}, got {each.got}" for each in failures)
