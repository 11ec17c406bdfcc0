"""A suite on three Ray nodes: an instance is killed, a node is lost, two join."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from rich.console import Console

from benchmarks.deploy import ray_check
from benchmarks.deploy.ray_check import FILE, STEPS, Place, standing
from services.launcher.cluster_file import load_cluster

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
EMULATED = {"engine": "emulated", "accelerator": "A10", "emulated_model": "Llama-3-8B", "emulated_step_s": 0.006}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def place() -> AsyncIterator[Place]:
    """One for all tests of this file, which are in the order of what happens to it."""
    cluster = load_cluster(FILE)
    instances = tuple(type(one).model_validate({**one.model_dump(), **EMULATED}) for one in cluster.instances)
    async with standing(Console(stderr=True), {}, cluster.model_copy(update={"instances": instances})) as found:
        yield found


@pytest.mark.parametrize("number", range(len(STEPS)), ids=[step.__name__ for step in STEPS])
async def test_step(place: Place, number: int) -> None:
    section = await ray_check.STEPS[number](place)
    assert section.checks, f"{section.title}: nothing was checked"
    assert section.ok, [f"{check.name}: want {check.want}, got {check.got}" for check in section.failures]
