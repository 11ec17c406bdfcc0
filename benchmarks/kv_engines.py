"""KV between two real engines, one prompt after the other: what each transport carries, as the instances record it.

One suite a transport, all up at once and asked in turns, so that what the machine's other guests do to one they do to
all. A prompt is one chunk, so that its pull begins when all of it is staged and what is measured is the transfer alone.
"""

import asyncio
import statistics
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.real_engines import LlamaShape, cluster_file, make_llama
from benchmarks.suite import records, started
from services.launcher.model_source import PROJECT
from services.launcher.up import RunningSuite
from shared.domain.instance import Role
from shared.domain.route import PolicySpec
from shared.errors import Unavailable
from tools.client import ApiClient, Ask

TRANSPORTS = ("tcp", "nixl") if find_spec("nixl") else ("tcp",)
# Much KV and little to compute: 32 KiB a token in float32.
SHAPE = LlamaShape(4096, 256, 512, 16, 8, 8, 4096)
TOKEN_BYTES = SHAPE.num_hidden_layers * 2 * SHAPE.num_key_value_heads * SHAPE.head_dim * 4  # of float32
MAX_MODEL_LEN = 2304
SIZES_MB = (8, 64)
ROUNDS = 7
WHO = "polyphase bench kv_engines"
POLICIES = {"placement": PolicySpec("least_load"), "split": PolicySpec("full"), "dispatch": PolicySpec("power_of_two")}


@dataclass(frozen=True, slots=True)
class Pull:
    """One import: bytes over the wire, and seconds from the first request for them to the last of them."""

    wire_bytes: int
    seconds: float


def run_kv_engines_bench(rounds: int = ROUNDS) -> dict[str, Any]:
    """Medians over `rounds` of each transport and size. Returns {"figures", "aims"}."""
    return asyncio.run(_bench(rounds))


async def _bench(rounds: int) -> dict[str, Any]:
    pulls: dict[tuple[str, int], list[Pull]] = {}
    with tempfile.TemporaryDirectory(prefix="polyphase-kv-engines-") as folder:
        async with _pairs(Path(folder)) as pairs:
            for turn in range(rounds + 1):
                for size_mb in SIZES_MB:
                    for name, pair in pairs.items():
                        pull = await _pull(pair, name, size_mb, f"{name}-{size_mb}-{turn}")
                        if turn:  # the first only warms up
                            pulls.setdefault((name, size_mb), []).append(pull)
    return _result(pulls)


@asynccontextmanager
async def _pairs(folder: Path) -> AsyncIterator[Mapping[str, RunningSuite]]:
    model = make_llama(folder / "model", SHAPE, PROJECT / "models" / "demo")
    async with AsyncExitStack() as stack:
        pairs = {}
        for name in TRANSPORTS:
            pairs[name] = await stack.enter_async_context(started(_cluster(model, name)))
            await pairs[name].suite.set_policies(POLICIES, WHO)
        yield pairs


def _cluster(model: Path, transport: str) -> dict[str, Any]:
    roles = {"p0": Role.PREFILL, "d0": Role.DECODE}
    memory = {"kv_cache_bytes": 256 << 20, "staging_bytes": 256 << 20, "chunk_size": MAX_MODEL_LEN}
    instances = [{"id": name, "role": role.value, "kv_transport": transport} for name, role in roles.items()]
    return cluster_file(f"kv-{transport}", model, instances, MAX_MODEL_LEN, **memory)


async def _pull(pair: RunningSuite, transport: str, size_mb: int, request_id: str) -> Pull:
    """Raises Unavailable when the KV was not pulled whole, or by another transport: a recomputation would look like a
    fast transfer.
    """
    tokens = (size_mb << 20) // TOKEN_BYTES
    rng = Random(request_id)
    prompt = [rng.randrange(10, SHAPE.vocab_size) for _ in range(tokens)]
    state = pair.suite.state
    async with ApiClient(state.api_url, state.model) as api:
        await api.complete(Ask(prompt, 2, request_id))
    (record,) = await records(pair.suite, [request_id])
    if not record.pulled:
        raise Unavailable(f"{request_id}: KV was not pulled: {record.outcomes}")
    (transfer,) = record.timeline.transfers
    if transfer.transport != transport:
        raise Unavailable(f"{request_id}: {transfer.transport} has carried it, not {transport}")
    return Pull(transfer.wire_bytes, transfer.ended_s - transfer.started_s)


def _result(pulls: dict[tuple[str, int], list[Pull]]) -> dict[str, Any]:
    figures: dict[str, float] = {}
    for (name, size_mb), each in pulls.items():
        rate = statistics.median(pull.wire_bytes / pull.seconds for pull in each)
        figures[f"{name}_{size_mb}mb_gb_per_s"] = round(rate / 1e9, 3)
        figures[f"{name}_{size_mb}mb_ms"] = round(statistics.median(pull.seconds for pull in each) * 1e3, 2)
    return {"figures": figures, "aims": {}}
