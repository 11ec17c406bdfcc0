"""A whole worker with an emulated engine: what schedulers are told of it is what its next request finds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.worker import app
from services.worker.app import Instance
from shared.domain.instance import InstanceView, Role
from shared.domain.job import Generation, JobView
from shared.domain.prompt import PrefixDelta, block_hashes, packed
from shared.policy.prefix_index import PrefixIndex
from shared.policy.saved_tokens import saved_tokens
from shared.wire.messages import PREFILL, PREFIXES, PrefillRequest, PrefixesRequest
from shared.wire.rpc_client import RpcClient
from shared.wire.sockets import Sockets
from tests.ports import free_address, free_port
from tests.services.control_plane import until
from tests.services.worker.test_settings import settings

PROMPT = list(range(300))


@asynccontextmanager
async def worker(block_size: int) -> AsyncIterator[tuple[Instance, CollectorRegistry]]:
    registry = CollectorRegistry()
    emulated = {"engine": "emulated", "accelerator": "A100", "model": "m", "emulated_step_s": 0.001}
    ports = {"rpc_port": free_port(), "http_port": free_port(), "kv_port": free_port()}
    absent = {
        "monitor_url": "http://127.0.0.1:1",
        "heartbeat_address": free_address(),
        "broadcast_address": free_address(),
    }
    given = settings(role=Role.PREFILL, block_size=block_size, kv_cache_bytes=1 << 30, **emulated, **ports, **absent)
    async with app.running(given, registry) as instance:
        yield instance, registry


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128])
async def test_what_schedulers_are_told_is_what_the_next_request_finds(block_size: int) -> None:
    index, sockets, deltas = PrefixIndex(), Sockets(), list[PrefixDelta]()
    async with worker(block_size) as (instance, registry):
        client = RpcClient(sockets, instance.info.rpc)

        def take(delta: PrefixDelta) -> None:
            deltas.append(delta)
            assert index.apply("p0", delta)

        listening = asyncio.create_task(client.call(PREFIXES, PrefixesRequest(), timeout_s=60, on_item=take))
        await until(lambda: deltas, "the account begins")
        for number, (prompt, salt) in enumerate(
            ((PROMPT, ""), (PROMPT, "s"), ([*PROMPT[:200], *range(1000, 1200)], ""))
        ):
            prefix = block_hashes(prompt, salt)
            job = JobView(f"j{number}", len(prompt), 1, prefix=prefix)
            saved = saved_tokens(index, InstanceView(instance.info, Role.PREFILL, "ready"), job)  # type: ignore[arg-type]
            before = instance.engine.stats()
            request = PrefillRequest(job, f"t{number}", packed(prompt), Generation(b"", 1.0, salt), export=False)
            await client.call(PREFILL, request, timeout_s=10)
            hit = instance.engine.stats().hit_tokens - before.hit_tokens
            assert saved <= hit < saved + 64 + block_size
            assert (hit > 100) is (number == 2)
            held = len(prompt) // block_size * block_size // 64 * 64
            await until(lambda: index.held_tokens("p0", prefix) == held, "it is told")  # noqa: B023
        total = instance.engine.stats()
        labels = '{engine="0",model_name="m"}'
        assert f"vllm:prefix_cache_hits_total{labels} {float(total.hit_tokens)}" in _metrics(registry)
        assert f"vllm:prefix_cache_queries_total{labels} {float(total.prompt_tokens)}" in _metrics(registry)
        assert "polyphase_instance_host_tokens_total 0.0" in _metrics(registry)
        for name in ("disk_kv_bytes", "disk_lost_blocks_total", "disk_off"):
            assert f"polyphase_instance_{name} 0.0" in _metrics(registry)
        listening.cancel()
        client.close()
    sockets.close()


async def test_drafts_and_accepted_tokens_are_exported() -> None:
    async with worker(16) as (instance, registry):
        instance.engine.steps.drafted(2, 6, 3)
        instance.engine.steps.drafted(1, 3, 0)
        labels = '{engine="0",model_name="m"}'
        for name, value in (("drafts", 3.0), ("draft_tokens", 9.0), ("accepted_tokens", 3.0)):
            assert f"vllm:spec_decode_num_{name}_total{labels} {value}" in _metrics(registry)


def _metrics(registry: CollectorRegistry) -> Any:
    return generate_latest(registry).decode()
