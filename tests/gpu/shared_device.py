"""A prefill and a decode instance on one device, from a cluster file: the same on a CPU and a GPU."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.jobs import records
from benchmarks.suite import on_free_ports
from services.launcher.cluster_file import Cluster
from services.launcher.model_source import resolve_model
from services.launcher.up import running_suite
from shared.domain.route import PolicySpec
from tests.patient_clusters import patient
from tools.client import ApiClient, Ask

POLICIES = {"placement": PolicySpec("least_load"), "split": PolicySpec("full"), "dispatch": PolicySpec("power_of_two")}
PROMPTS = [list(range(10, 10 + length)) for length in (20, 150, 600)]
NEW_TOKENS = 16


@dataclass(frozen=True)
class Served:
    """Of each prompt, sent twice: the answers' tokens, and whether the KV was pulled."""

    first: list[list[int]]
    second: list[list[int]]
    pulled: list[bool]


def cluster_on(accelerator: str) -> Cluster:
    """Both instances on device 0, as a cluster file says it."""
    defaults: dict[str, Any] = {"accelerator": accelerator, "kv_cache_bytes": 128 << 20}
    if accelerator != "cpu":
        defaults["devices"] = [0]
    return Cluster.model_validate(
        patient(
            {
                "name": "shared-device",
                "model": resolve_model("models/demo"),
                "max_model_len": 1024,
                "launcher": {"start_s": 900},
                "dashboard": {"enabled": False},
                "predictor": {"enabled": False},
                "planner": {"enabled": False},
                "instance_defaults": defaults,
                "instances": [{"id": "prefill-0", "role": "prefill"}, {"id": "decode-0", "role": "decode"}],
            }
        )
    )


async def two_instances(folder: Path, accelerator: str) -> Served:
    """Raises what `running_suite` raises where the two do not fit on the device."""
    async with running_suite(on_free_ports(cluster_on(accelerator)), folder, Console(stderr=True)) as running:
        await running.suite.set_policies(POLICIES, "tests")
        async with ApiClient(running.plan.api_url, running.plan.model) as api:
            asks = {turn: [_ask(turn, number) for number in range(len(PROMPTS))] for turn in ("first", "second")}
            answers = {turn: [(await api.complete(ask)).tokens for ask in each] for turn, each in asks.items()}
        found = await records(running.suite, [ask.request_id for each in asks.values() for ask in each])
        return Served(answers["first"], answers["second"], [record.pulled for record in found])


def _ask(turn: str, number: int) -> Ask:
    name = f"{turn}-{number}"
    return Ask(PROMPTS[number], NEW_TOKENS, name, salt=name)  # nothing is found in a prefix cache
