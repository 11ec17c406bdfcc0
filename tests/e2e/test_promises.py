"""The whole suite, once, with real engines: every promise of the demo, each a test of its own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from rich.console import Console

from benchmarks.demo import run
from benchmarks.demo.client import ApiClient, Prompts
from benchmarks.suite import on_free_ports
from services.launcher.up import UpOptions, cluster_of, running_suite

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

# In the order of `run.steps`; the length is compared below, so that none can be forgotten.
PROMISES = (
    "it_starts",
    "it_answers",
    "answer_lengths_are_predicted",
    "tokens_are_identical",
    "any_split_is_identical",
    "zeroed_kv_is_noticed",
    "the_first_token_does_not_wait_for_the_transfer",
    "a_client_that_leaves_frees_everything",
    "roles_flip_under_load",
    "a_lost_decode_instance_costs_nothing",
    "a_lost_prefill_instance_costs_nothing",
    "the_control_plane_may_die",
    "bad_input_is_refused",
)

# The demo's to judge: a test says nothing of speed on a shared machine.
TIMED = {"ready to serve", "answered by the classifier in time"}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def steps(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[run.Step, ...]]:
    """One running suite for all tests of this file."""
    cluster = on_free_ports(cluster_of(UpOptions(Path("demo"), dashboard=False)))
    folder = tmp_path_factory.mktemp("suite")
    async with (
        running_suite(cluster, folder, Console(stderr=True)) as running,
        ApiClient(running.plan.api_url, running.plan.model) as api,
    ):
        yield run.steps(running, api, await Prompts.of(api))


async def test_every_promise_has_its_test(steps: tuple[run.Step, ...]) -> None:
    assert len(steps) == len(PROMISES)


@pytest.mark.parametrize("number", range(len(PROMISES)), ids=PROMISES)
async def test_promise(steps: tuple[run.Step, ...], number: int) -> None:
    section = await steps[number]()
    assert section.checks, f"{section.title}: nothing was checked"
    failures = [check for check in section.failures if check.name not in TIMED]
    assert not failures, "\n".join(f"{check.name}: want {check.want}, got {check.got}" for check in failures)
