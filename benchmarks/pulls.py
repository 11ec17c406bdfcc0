"""Live pulls of prefixes: the time to the first token where the instance computes the prompt, and where it pulls its KV
from an instance that holds it.

Two real engines with blocks of unlike sizes, each held to its share of the cores. The messages are those of a gateway.
The estimate is that of placement (`shared.policy.prefix_pull`), with the rates that the instances have learned.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from types import MappingProxyType
from typing import Any

import msgspec

from benchmarks.cluster_files import ClusterDict, LlamaShape, engines_on_cpu
from benchmarks.quotas import QuotaSession, measured_under_quotas
from benchmarks.results import Result, aim, at_most, progress, result
from benchmarks.suite import until_found
from services.launcher.cluster_keys import curve_key_file
from shared.domain.instance import InstanceView, Role
from shared.domain.job import Generation, JobView
from shared.domain.kv import KvHandle, TransferOutcome
from shared.domain.prompt import packed
from shared.errors import Unavailable
from shared.policy.prefix_pull import Holder
from shared.runtime.keys import read_pair
from shared.wire.messages import (
    DECODE,
    EXPORT,
    PREFILL,
    RELEASE,
    DecodeRequest,
    ExportRequest,
    PrefillRequest,
    ReleaseRequest,
    TokenStep,
)
from shared.wire.rpc_client import RpcClients
from shared.wire.sockets import Curve, Sockets

HOLDER, PULLER = "holder", "puller"
CORES = MappingProxyType({HOLDER: 0.5, PULLER: 0.9})
BLOCKS = {HOLDER: 32, PULLER: 64}
# A prompt token takes some 0.1 ms to compute, and has 4 KiB of KV.
SHAPE = LlamaShape(4096, 128, 256, 4, 4, 4, 9216)
MAX_MODEL_LEN, CHUNK = 8704, 1024
LENGTHS = (256, 384, 512, 768, 1024, 2048, 4096, 8192)  # tokens of the prefix
QUESTION, ANSWER = 64, 8  # tokens of the prompt behind the prefix, and of the answer
ROUNDS = 5  # after one that lets the instances learn
SEED = 17
OFF = 0.2  # aim: the estimated crossover is that close to the measured one
CALL_S, RATES_S = 120.0, 30.0
TABLE = "pulls of prefixes, live"


def live_pulls(rounds: int = ROUNDS, lengths: Sequence[int] = LENGTHS) -> Result:
    """Raises Unavailable where this machine allows no quotas, and where KV was not pulled."""
    work = partial(_measured, rounds, lengths)
    return asyncio.run(measured_under_quotas(SHAPE, CORES, cluster_of, work, SEED))


def cluster_of(model: Path) -> ClusterDict:
    roles = {HOLDER: Role.PREFILL, PULLER: Role.DECODE}
    instances: list[dict[str, Any]] = [
        {"id": name, "role": role.value, "block_size": BLOCKS[name]} for name, role in roles.items()
    ]
    memory = {"kv_cache_bytes": 768 << 20, "staging_bytes": 256 << 20, "inbox_bytes": 256 << 20}
    return engines_on_cpu("pulls", model, instances, MAX_MODEL_LEN, chunk_size=CHUNK, **memory)


@dataclass
class Times:
    """Seconds to the first token for one length of the prefix."""

    computed: list[float] = field(default_factory=list)
    pulled: list[float] = field(default_factory=list)
    different: int = 0  # answers that are not the same after a pull


async def _measured(rounds: int, lengths: Sequence[int], on: QuotaSession) -> Result:
    random, times = Random(SEED), {length: Times() for length in lengths}
    sockets = Sockets(Curve(*read_pair(curve_key_file(on.suite.data_dir))))
    try:
        with RpcClients(sockets) as clients:
            pair = _Pair(clients, {name: row.info.rpc for name, row in (await on.suite.instances()).items()})
            for number in range(rounds + 1):
                for length in random.sample(list(lengths), len(lengths)):
                    await _measure(pair, random, length, times[length] if number else Times())
                progress(f"pulls: round {number} of {rounds}")
    finally:
        sockets.close()
    on.check()
    return await _compared(on, times)


class _Pair:
    """Calls to both instances."""

    def __init__(self, clients: RpcClients, addresses: Mapping[str, str]) -> None:
        self._holder, self._puller = clients.to(addresses[HOLDER]), clients.to(addresses[PULLER])
        self._count = 0

    async def hold(self, prompt: list[int], salt: str) -> None:
        """Have the holder compute a prompt."""
        job, generation = self._job(len(prompt), 1), _generation(salt)
        request = PrefillRequest(job, job.job_id, packed(prompt), generation, want_token=True, export=False)
        await self._holder.call(PREFILL, request, timeout_s=CALL_S)

    async def answer(self, prompt: list[int], salt: str, pulled: int = 0) -> tuple[float, list[int]]:
        """The puller's time to the first token, and its tokens; it pulls the first `pulled` tokens' KV."""
        job, generation = self._job(len(prompt), ANSWER), _generation(salt)
        tokens, first = list[int](), list[float]()

        def step(item: TokenStep) -> None:
            tokens.extend(item.tokens)
            if item.tokens:
                first.append(time.monotonic())

        handle: KvHandle | None = None
        began = time.monotonic()
        if pulled:
            export = ExportRequest(f"{job.job_id}/p", prompt=packed(prompt[:pulled]), generation=generation)
            handle = (await self._holder.call(EXPORT, export, timeout_s=CALL_S)).handle
            if handle is None or handle.tokens < pulled:
                raise Unavailable(f"the holder has {handle.tokens if handle else 0} of {pulled} tokens")
        request = DecodeRequest(job, packed(prompt), generation, handle)
        reply = await self._puller.call(DECODE, request, timeout_s=CALL_S, on_item=step)
        if handle is not None:
            self._holder.notify(RELEASE, ReleaseRequest([handle.transfer_id]))
            if reply.transfer.outcome is not TransferOutcome.PULLED:
                raise Unavailable(f"KV was not pulled: {reply.transfer.outcome} {reply.transfer.error}")
        return first[0] - began, tokens

    def _job(self, prompt_tokens: int, max_tokens: int) -> JobView:
        self._count += 1
        return JobView(f"pulls-{self._count}", prompt_tokens, max_tokens)


def _generation(salt: str) -> Generation:
    sampling = {"temperature": 0.0, "ignore_eos": True}  # vLLM's SamplingParams
    return Generation(msgspec.msgpack.encode(sampling), time.time(), cache_salt=salt)


async def _measure(pair: _Pair, random: Random, length: int, times: Times) -> None:
    """Both ways to the first token, in either order. Salts keep each prompt from the caches of the others."""
    prompt = [random.randrange(10, SHAPE.vocab_size) for _ in range(length + QUESTION)]
    name = f"{random.getrandbits(64):x}"
    await pair.hold(prompt[: length + 1], name)
    answers: dict[bool, list[int]] = {}
    for pulls in random.sample((True, False), 2):
        took_s, answers[pulls] = await pair.answer(prompt, name if pulls else f"{name}-computed", length * pulls)
        (times.pulled if pulls else times.computed).append(took_s)
    times.different += answers[True] != answers[False]


async def _compared(on: QuotaSession, times: Mapping[int, Times]) -> Result:
    views = await until_found(partial(_learned, on), RATES_S, "the instances to learn their rates")
    lengths = sorted(times)
    computed = {length: median(times[length].computed) for length in lengths}
    pulled = {length: median(times[length].pulled) for length in lengths}
    estimated = {length: (_compute_s(views, length), _pull_s(views, length)) for length in lengths}
    rows = [
        {
            "tokens": length,
            "computed_ms": round(1e3 * computed[length], 1),
            "pulled_ms": round(1e3 * pulled[length], 1),
            "estimated_computed_ms": round(1e3 * estimated[length][0], 1),
            "estimated_pulled_ms": round(1e3 * estimated[length][1], 1),
        }
        for length in lengths
    ]
    measured = crossover([(length, computed[length] - pulled[length]) for length in lengths])
    grid = range(1, max(lengths) + 1)
    expected = crossover([(length, _compute_s(views, length) - _pull_s(views, length)) for length in grid])
    different = sum(each.different for each in times.values())
    figures = {f"pull_{row['tokens']}_{key}": value for row in rows for key, value in row.items() if key != "tokens"}
    off = abs(expected / measured - 1.0) if measured and expected else None
    crossovers = {"pull_crossover_tokens": measured, "pull_crossover_estimated_tokens": expected}
    figures |= {name: round(value) for name, value in crossovers.items() if value is not None}
    aims = {"pull_crossover_off": at_most(OFF, off), "pull_different_answers": aim(0, different, different == 0)}
    note = (
        f"pulls: {len(next(iter(times.values())).computed)} rounds, medians; blocks of {BLOCKS[HOLDER]} at the holder "
        f"({CORES[HOLDER]:g} cores), of {BLOCKS[PULLER]} at the puller ({CORES[PULLER]:g} cores)"
    )
    return result(figures, aims, [note]) | {"tables": {TABLE: rows}}


async def _learned(on: QuotaSession) -> dict[str, InstanceView] | None:
    """Both instances as placement would see them now, idle; None while they know no rates."""
    rows = await on.suite.instances()
    views = {name: InstanceView(row.info, row.role, row.state) for name, row in rows.items()}
    puller = views[PULLER].info.rates
    return views if puller.step is not None and puller.link is not None else None


def _compute_s(views: Mapping[str, InstanceView], length: int) -> float:
    return _steps_s(views, 0, length + QUESTION)


def _pull_s(views: Mapping[str, InstanceView], length: int) -> float:
    """To have the prefix pulled, and the rest of the prompt computed."""
    pull_s = Holder(views[HOLDER], length).ready_s(views[PULLER], length)
    return pull_s + _steps_s(views, length, QUESTION)


def _steps_s(views: Mapping[str, InstanceView], before: int, tokens: int) -> float:
    rates = views[PULLER].info.rates.step
    assert rates is not None
    return sum(rates.prefill_s(min(CHUNK, tokens - at), before + at) for at in range(0, tokens, CHUNK))


def crossover(gains: Sequence[tuple[int, float]]) -> float | None:
    """The length from which on a pull is faster, of lengths and the seconds that a pull gains there; between two of
    these on the line through both. None where a pull is always, or never, faster.
    """
    behind = [at for at, (before, after) in enumerate(pairwise(gain for _, gain in gains)) if before <= 0.0 < after]
    if not behind:
        return None
    (low, loss), (high, gain) = gains[behind[-1]], gains[behind[-1] + 1]
    return low + (high - low) * -loss / (gain - loss)
