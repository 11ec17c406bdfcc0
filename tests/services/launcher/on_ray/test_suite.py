"""A suite on three Ray nodes: an instance is killed, a node is lost, two join."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from rich.console import Console

from benchmarks.demo.report import Section
from benchmarks.deploy.ray_check import CHECKS, CLUSTER, RaySuite, place_on_ray
from tests.patient_clusters import patient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]
EMULATED = {"engine": "emulated", "accelerator": "A10", "emulated_model": "Llama-3-8B", "emulated_step_s": 0.006}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def checked() -> AsyncIterator[RaySuite]:
    """One for all tests of this file, which are in the order of what happens to it."""
    async with place_on_ray(Console(stderr=True), patient({**CLUSTER, "instance_defaults": EMULATED})) as found:
        yield found


@pytest.mark.parametrize("title", CHECKS)
async def test_check(checked: RaySuite, title: str) -> None:
    section = Section(title)
    await CHECKS[title](checked, section)
    assert section.findings, f"{title}: nothing was checked"
    failures = [each for each in section.failures if not each.timed]
    assert not failures, [f"{each.name}: want {each.want}, got {each.got}" for each in failures]
