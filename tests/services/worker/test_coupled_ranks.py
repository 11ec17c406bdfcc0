"""Two data-parallel ranks of one instance, whose experts are divided between them, as processes beside a plain one."""

import asyncio
import json
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from vllm import SamplingParams

from benchmarks.engine_client import PROCESSES
from benchmarks.engine_process import own_process
from benchmarks.model_families import FAMILIES, VOCABULARY, make_model
from services.launcher.ports import free_alone
from services.launcher.suite import until
from services.worker.engines.vllm_ranks import CoupledRanks
from services.worker.settings import DATA_PARALLEL_PORTS
from shared.domain.instance import Role
from shared.domain.job import Generation, JobView
from shared.domain.kv import KvHandle, TransferOutcome
from shared.domain.prompt import packed
from shared.domain.route import InstanceRef
from shared.errors import PolyphaseError
from shared.wire.messages import (
    DECODE,
    DRAIN,
    FLIP,
    PREFILL,
    RESUME,
    DecodeReply,
    DecodeRequest,
    DrainRequest,
    FlipRequest,
    PrefillRequest,
    ResumeRequest,
    TokenStep,
)
from shared.wire.rpc_client import RpcClients
from shared.wire.sockets import Sockets

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
LENGTHS = (1, 2, 31, 32, 33, 64, 65, 128, 200, 257, 300, 511)
TOKENS, LONG = 12, 150
PATIENCE_S = 60.0
WORKER_PORTS = 4


class Worker:
    """One worker. Its process is a fork of one that has imported vLLM."""

    def __init__(self, name: str, model: Path, folder: Path, port: int, **settings: Any) -> None:
        self.name, self.log = name, folder / f"{name}-{uuid.uuid4().hex[:6]}"
        given = {
            "instance_id": name,
            "role": "decode",
            "model": str(model),
            "dtype": "float32",
            "kv_cache_bytes": 32 << 20,
            "max_model_len": 1024,
            "chunk_size": 128,
            "rpc_port": port,
            "http_port": port + 1,
            "kv_port": port + 2,
            "monitor_url": "http://127.0.0.1:1",
            "heartbeat_address": "tcp://127.0.0.1:1",
            "broadcast_address": "tcp://127.0.0.1:1",
            **settings,
        }
        given["engine_args"] = json.dumps({"skip_tokenizer_init": True, **settings.get("engine_args", {})})
        env = {f"POLYPHASE_WORKER_{key.upper()}": str(value) for key, value in given.items()}
        self.log.touch()
        self.tokens = 0
        self.process = PROCESSES.Process(target=run_worker, args=(str(self.log), env), name=name)
        self.process.start()
        self.rpc, self.http = f"tcp://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"
        self._entered = ExitStack()
        self.clients = self._entered.enter_context(RpcClients(Sockets()))

    async def ready(self) -> None:
        await until(lambda: self.ended or "instance is ready" in self.log.read_text(), 200, "the instance")
        assert not self.ended, self.log.read_text()[-6000:]

    @property
    def ended(self) -> bool:
        return self.process.exitcode is not None

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self._entered.close()

    async def decode(self, prompt: list[int], handle: KvHandle | None = None, tokens: int = TOKENS) -> list[int]:
        """Greedy tokens; nothing is found in a prefix cache. With a handle, its KV is pulled."""
        got: list[int] = []

        def add(step: Any) -> None:
            if isinstance(step, TokenStep):
                got.extend(step.tokens)
                self.tokens += len(step.tokens)

        request = DecodeRequest(job(prompt, tokens), packed(prompt), generation(tokens), handle)
        reply = await self.clients.to(self.rpc).call(DECODE, request, timeout_s=PATIENCE_S, on_item=add)
        assert isinstance(reply, DecodeReply)
        if handle is not None:
            assert reply.transfer.outcome is TransferOutcome.PULLED, reply.transfer
        return got

    async def export(self, prompt: list[int], target: InstanceRef) -> KvHandle:
        name = uuid.uuid4().hex
        request = PrefillRequest(job(prompt, TOKENS), name, packed(prompt), generation(TOKENS), decode=target)
        reply = await self.clients.to(self.rpc).call(PREFILL, request, timeout_s=PATIENCE_S)
        assert reply.handle is not None
        return reply.handle

    async def flip(self, role: Role) -> None:
        rpc = self.clients.to(self.rpc)
        await rpc.call(DRAIN, DrainRequest(timeout_s=PATIENCE_S), timeout_s=PATIENCE_S)
        await rpc.call(FLIP, FlipRequest(role), timeout_s=PATIENCE_S)
        await rpc.call(RESUME, ResumeRequest(), timeout_s=PATIENCE_S)

    async def get(self, path: str) -> Any:
        async with httpx.AsyncClient(base_url=self.http, timeout=PATIENCE_S) as http:
            return (await http.get(path)).json()


def run_worker(log: str, env: dict[str, str]) -> None:
    own_process(log)
    os.environ.update(env)
    from services.worker.__main__ import main

    main()


def job(prompt: list[int], tokens: int) -> JobView:
    return JobView(uuid.uuid4().hex, len(prompt), tokens)


def generation(tokens: int) -> Generation:
    sampling = msgspec.msgpack.encode(SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    return Generation(sampling, time.time(), cache_salt=uuid.uuid4().hex)


class Ranks:
    """The two ranks of an instance; those that are started again have the ports of the ones before."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.port = free_alone(DATA_PARALLEL_PORTS + 2 * WORKER_PORTS)

    def start(self, count: int = 2, **settings: Any) -> list[Worker]:
        shared = {
            "data_parallel": 2,
            "data_parallel_port": self.port,
            "engine_args": {"enable_expert_parallel": True},
            **settings,
        }
        first = self.port + DATA_PARALLEL_PORTS
        return [
            Worker(
                f"rank-{rank}", self.model, self.folder, first + rank * WORKER_PORTS, data_parallel_rank=rank, **shared
            )
            for rank in range(count)
        ]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("ranks")
    return Ranks(make_model(FAMILIES["Qwen3-MoE"], folder / "model"), folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(ranks: Ranks) -> AsyncIterator[tuple[Worker, Worker, Worker]]:
    """A plain one, and the two ranks."""
    port = free_alone(WORKER_PORTS)
    plain = Worker("plain", ranks.model, ranks.folder, port)
    async with AsyncExitStack() as stack:
        for worker in (made := [plain, *ranks.start()]):
            stack.callback(worker.close)
        await asyncio.gather(*(worker.ready() for worker in made))
        yield made[0], made[1], made[2]


def prompts(seed: int = 1) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]


async def answers(worker: Worker, texts: Iterable[list[int]]) -> list[list[int]]:
    return await asyncio.gather(*(worker.decode(text) for text in texts))


async def test_each_rank_answers_as_a_plain_engine_whatever_the_other_does(
    workers: tuple[Worker, Worker, Worker],
) -> None:
    plain, first, second = workers
    references = await answers(plain, prompts())
    assert len({token for answer in references for token in answer}) > 20  # few would prove nothing
    assert await answers(first, prompts()) == references  # the other has nothing to compute
    before = await second.get("/steps")
    assert before["steps"] == []  # it was there for each pass, and has learned nothing of them
    assert await answers(second, prompts()) == references
    together, reverse = await asyncio.gather(answers(first, prompts()), answers(second, prompts()[::-1]))
    assert (together, reverse[::-1]) == (references, references)
    one_by_one = [await (first, second)[at % 2].decode(text) for at, text in enumerate(prompts())]
    assert one_by_one == references
    steps = (await second.get("/steps"))["steps"]
    computed = sum(tokens for step in steps for tokens, _ in step["prefill"])
    assert 2 * sum(LENGTHS) <= computed <= 3 * sum(LENGTHS)
    for worker in (first, second):
        assert (await worker.get("/health"))["status"] == "ok"


async def test_kv_is_exported_and_imported_by_the_rank_that_has_it(workers: tuple[Worker, Worker, Worker]) -> None:
    plain, first, second = workers
    texts = prompts(2)[::2]
    references = await answers(plain, texts)

    async def handed_over(source: Worker, target: Worker, beside: Worker) -> list[list[int]]:
        """The other rank is busy during the first half, and has nothing to compute during the second."""

        async def tokens(text: list[int]) -> list[int]:
            return await target.decode(text, await source.export(text, InstanceRef(target.name, 1, target.rpc)))

        await source.flip(Role.PREFILL)
        half = len(texts) // 2
        work = asyncio.create_task(beside.decode(texts[0], tokens=60))
        found = [await tokens(text) for text in texts[:half]]
        await work
        found += [await tokens(text) for text in texts[half:]]
        await source.flip(Role.DECODE)
        return found

    assert await handed_over(second, plain, beside=first) == references
    assert await handed_over(plain, first, beside=second) == references
    assert await handed_over(first, second, beside=second) == references


async def test_a_rank_that_dies_ends_the_other_and_a_new_pair_ends_together(
    ranks: Ranks, workers: tuple[Worker, Worker, Worker]
) -> None:
    plain, first, second = workers
    stream = asyncio.create_task(
        first.decode(prompts()[5], tokens=900)
    )  # it does not end while a machine pauses this test
    had = first.tokens
    await until(lambda: first.tokens > had, PATIENCE_S, "tokens")
    second.signal(signal.SIGKILL)
    with pytest.raises(PolyphaseError):
        await stream
    await until(lambda: first.ended, PATIENCE_S, "the other rank to end")
    again = ranks.start(drain_s=40.0)
    try:
        await asyncio.gather(*(worker.ready() for worker in again))
        reference = await plain.decode(prompts()[8], tokens=LONG)
        answer = asyncio.create_task(again[1].decode(prompts()[8], tokens=LONG))
        await until(lambda: again[1].tokens, PATIENCE_S, "tokens")
        for worker in again:
            worker.signal(signal.SIGTERM)
        assert await answer == reference  # by rank 1, for which rank 0 goes on
        for worker in again:
            await until(lambda worker=worker: worker.ended, PATIENCE_S, "the end")  # type: ignore[misc]
            assert worker.process.exitcode in (0, -signal.SIGTERM)
            assert not [line for line in worker.log.read_text().splitlines() if "error" in line or "critical" in line]
    finally:
        for worker in again:
            worker.close()


async def test_a_rank_ends_when_another_dies_while_they_start(ranks: Ranks) -> None:
    (worker,) = ranks.start(1)
    try:
        peer = CoupledRanks(1, 2, ranks.port + 1, lambda: None, print)
        await asyncio.to_thread(peer.meet)
        peer.close()  # vLLM in the other process waits for it now, or is about to
        await until(lambda: worker.ended, PATIENCE_S, "the end")
        assert "data-parallel rank 1 of this instance has ended" in worker.log.read_text()
        assert worker.process.exitcode not in (0, -signal.SIGKILL)
    finally:
        worker.close()
