"""One real engine with little room for KV, behind a whole suite: what `bench engine` changes its policies on."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from lab.bench.random_llama import LlamaShape, make_llama
from lab.demo.run import on_free_ports
from services.launcher.cluster_file import Cluster
from services.launcher.model_source import PROJECT
from services.launcher.up import RunningSuite, running_suite
from shared.domain.instance import Role
from shared.domain.route import PolicySpec
from shared.errors import Unavailable

ENGINE = "engine"
# 26 million parameters: computing a burst of prompts takes seconds, beside which what the services add is small.
SHAPE = LlamaShape(4096, 512, 1408, 8, 8, 4, 4096)
MAX_MODEL_LEN, CHUNK, SEATS = 1024, 256, 32
KV_TOKENS, BLOCK = 4096, 32
PATIENT = "patient"
WHO = "polyphase bench engine"
_FLOAT32_BYTES = 4
_PREEMPTIONS = "vllm:num_preemptions"


@dataclass(frozen=True, slots=True)
class OneEngine:
    """The running suite."""

    running: RunningSuite

    async def follow(self, order: PolicySpec, admission: PolicySpec) -> None:
        """Go by these once nobody has work."""
        suite = self.running.suite
        await suite.wait_idle()
        await suite.set_policies({"prefill_order": order, "decode_admission": admission}, WHO)

    async def preemptions(self) -> int:
        """So far. Raises Unavailable."""
        entry = (await self.running.suite.instances())[ENGINE]
        async with httpx.AsyncClient(base_url=entry["info"]["http"], timeout=10, trust_env=False) as http:
            try:
                text = (await http.get("/metrics")).raise_for_status().text
            except httpx.HTTPError as error:
                raise Unavailable(f"{ENGINE}: {error}") from error
        return counted(text)


@asynccontextmanager
async def one_engine(folder: Path, console: Console) -> AsyncIterator[OneEngine]:
    """The suite. Raises what `running_suite` raises."""
    model = make_llama(folder / "model", SHAPE, PROJECT / "models" / "demo")
    cluster = on_free_ports(Cluster.model_validate(cluster_of(model)))
    async with running_suite(cluster, folder / "data", console) as running:
        yield OneEngine(running)


def cluster_of(model: Path) -> dict[str, Any]:
    """The cluster file.

    The only instance decodes, so it computes whole requests: order and admission meet in one engine, and neither
    placement nor KV transfers have a part in what is measured.
    """
    head_bytes = 2 * SHAPE.num_key_value_heads * SHAPE.head_dim * _FLOAT32_BYTES
    return {
        "name": "bench engine",
        "model": str(model),
        "served_model_name": "engine",
        "max_model_len": MAX_MODEL_LEN,
        "gateway": {"dtype": "float32", "slo": {PATIENT: {"ttft_s": 30.0, "tpot_s": 1.0}}},
        "predictor": {"bucket_tokens": 32, "bucket_count": 16},
        "dashboard": {"enabled": False},
        "instance_defaults": {"engine": "vllm", "accelerator": "cpu", "dtype": "float32", "threads": 1},
        "instances": [
            {
                "id": ENGINE,
                "role": Role.DECODE.value,
                "chunk_size": CHUNK,
                "max_seqs": SEATS,
                "block_size": BLOCK,
                "kv_cache_bytes": (KV_TOKENS + BLOCK) * SHAPE.num_hidden_layers * head_bytes,  # a block is vLLM's own
            }
        ],
    }


def counted(metrics: str) -> int:
    """Preemptions, of what the instance's `/metrics` says. Raises Unavailable where it does not say it."""
    for family in text_string_to_metric_families(metrics):
        if family.name == _PREEMPTIONS:
            return int(sum(sample.value for sample in family.samples if sample.name.endswith("_total")))
    raise Unavailable(f"{ENGINE} does not tell {_PREEMPTIONS}")
