"""Engine processes as benches and tests drive them: start, ask, read KV events and rank statistics, stop, kill.

The process is `benchmarks.engine_process`.
"""

import asyncio
import base64
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from benchmarks.model_families import VOCABULARY
from services.launcher.ports import free_alone
from services.worker.kv import lossy_salt
from services.worker.kv.rank_control import SocketControl
from services.worker.kv.rank_events import KvEvents
from services.worker.kv.rank_messages import KvEvent, PullEnded, StagedChunk, Stats
from shared.domain.job import Generation
from shared.domain.kv import Codec, KvHandle

FINGERPRINT = "tiny"
EVENT_S = 120.0  # within which an engine answers, or an event comes, on a busy machine
# vLLM takes longer to import than an engine to start: one process does it, the engines are its forks.
PROCESSES = multiprocessing.get_context("forkserver")
SPAWNED = multiprocessing.get_context("spawn")  # CUDA does not outlive a fork
PROCESSES.set_forkserver_preload(["benchmarks.engine_process"])


class Engine:
    """One engine process. Start many, then enter each on the event loop."""

    def __init__(
        self,
        name: str,
        model: Path,
        *,
        tp: int = 1,
        pp: int = 1,
        layers: tuple[int, ...] = (),
        connector: bool = True,
        scheme: str = "kv",
        device: str = "cpu",
        answer_s: float = 180.0,
        **options: Any,
    ) -> None:
        """answer_s: within which an answer has to be complete."""
        self.name = name
        self._answer_s = answer_s
        self.folder = Path(tempfile.mkdtemp(prefix=f"pp-{name}-"))
        first = free_alone(tp * pp)
        self.endpoints = [f"{scheme}://127.0.0.1:{first + rank}" for rank in range(tp * pp)]
        self.controls = [f"ipc://{self.folder}/control-{rank}" for rank in range(tp * pp)]
        self.generation = time.time_ns()
        self.kv_dtype = options.setdefault("dtype", "bfloat16")  # with our connector, as its ranks say
        self.extra = {
            "endpoints": self.endpoints,
            "controls": self.controls,
            "events": f"ipc://{self.folder}/events",
            "control_key": "secret",
            "instance_id": name,
            "generation": self.generation,
            "fingerprint": FINGERPRINT,
            "pull_timeout_s": 30.0,
            "staging_bytes": 64 << 20,
            "inbox_bytes": 32 << 20,
        } | options.pop("extra", {})
        options = {
            "model": str(model),
            "max_model_len": 1280,
            "block_size": 32,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 32,
            "kv_cache_memory_bytes": 32 << 20,
            "tensor_parallel_size": tp,
            "pipeline_parallel_size": pp,
        } | options
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.bind(f"ipc://{self.folder}/api")
        self.log = self.folder / "log"
        arguments = (str(self.log), f"ipc://{self.folder}/api", options, self.extra if connector else None, layers)
        os.environ["POLYPHASE_TEST_DEVICE"] = device
        processes = PROCESSES if device == "cpu" else SPAWNED
        self.process = processes.Process(target=run_engine, args=arguments, name=name)
        self.process.start()
        self.events: list[KvEvent] = []
        self._done: dict[str, asyncio.Future[list[int]]] = {}
        self._answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._ready = asyncio.Event()
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self._entered = AsyncExitStack()
        self._count = 0

    async def __aenter__(self) -> "Engine":
        self._kv_events = await self._entered.enter_async_context(KvEvents(self.extra["events"]))
        control = SocketControl(self.controls, "secret", answer_s=self._answer_s)
        self.control = await self._entered.enter_async_context(control)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._listen())]
        while not self._ready.is_set():
            self._check_alive()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ready.wait(), 0.3)
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Also of an engine that did not start, or was not entered."""
        try:
            if self.process.exitcode is None and self._ready.is_set():
                await self._socket.send(b'{"op": "stop"}')
                await asyncio.to_thread(self.process.join, 10)
            self.kill()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._entered.aclose()
            self._context.destroy(0)  # one that is collected with a socket still open waits for ever
            shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        """The process and its ranks, at once, if they still live."""
        if self.process.exitcode is None:
            assert self.process.pid is not None
            with suppress(ProcessLookupError):  # a fork begins in its parent's group: it may have none of its own yet
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
        self.process.join()

    def _check_alive(self) -> None:
        if self.process.exitcode is not None:
            raise RuntimeError(f"{self.name} died: {self.log.read_text()[-4000:]}")

    async def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        kv: dict[str, Any] | None = None,
        salt: str | None = None,
        request_id: str | None = None,
        adapter: tuple[str, int, str] | None = None,
        media: Generation | None = None,
        known: Sequence[int] = (),
    ) -> list[int]:
        """adapter: name, number and folder of a LoRA adapter. media: has the prompt's media items. known: tokens of the
        answer that another engine has generated, which `max_tokens` counts, and after which this one goes on.
        """
        self._count += 1
        request_id = request_id or f"{self.name}-{self._count}"
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._done[request_id] = future
        items = base64.b64encode(msgspec.msgpack.encode(media)).decode() if media is not None else ""
        what = {"prompt": prompt, "max_tokens": max_tokens, "kv": kv, "salt": salt, "adapter": adapter, "media": items}
        await self._send(op="generate", id=request_id, known=list(known), **what)
        async with asyncio.timeout(self._answer_s):
            while not (await asyncio.wait({future}, timeout=0.5))[0]:
                self._check_alive()
        return future.result()

    async def abort(self, request_id: str) -> None:
        await self._send(op="abort", id=request_id)

    async def hold(self, request_id: str, at: int) -> None:
        """Have a request wait once it has given `at` tokens, for what is done to it then."""
        await self._send(op="hold", id=request_id, at=at)

    async def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        self._check_alive()
        await self._send(op=op, **arguments)
        return await asyncio.wait_for(self._answers.get(), EVENT_S)

    async def export(
        self, prompt: list[int], start: int = 0, salt: str | None = None, *, room: bool = True
    ) -> KvHandle:
        """Of what its prefix cache has of the prompt. room: whether its staging pool has any."""
        transfer_id = uuid.uuid4().hex
        found = await self.ask("export", transfer_id=transfer_id, start=start, prompt=prompt, salt=salt, room=room)
        return self.handle(transfer_id, found["tokens"], start=start)

    async def export_running(self, request_id: str, at: int, until: int, start: int = 0) -> KvHandle:
        """Of a request once it has given `at` tokens. It goes on, and waits at `until` tokens to leave."""
        transfer_id = uuid.uuid4().hex
        what = {"id": request_id, "transfer_id": transfer_id, "start": start, "at": at, "until": until}
        found = await self.ask("export_running", **what)
        return self.handle(transfer_id, found["tokens"], start=start)

    async def leave(self, request_id: str, at: int, start: int = 0) -> tuple[list[int], KvHandle]:
        """End a request once it has given `at` tokens: its tokens, and the KV of all but the last one."""
        transfer_id = uuid.uuid4().hex
        left = await self.ask("leave", id=request_id, transfer_id=transfer_id, start=start, at=at)
        return left["output"], self.handle(transfer_id, left["tokens"], start=start)

    def handle(
        self, transfer_id: str, tokens: int, codec: Codec = Codec.RAW, adapter: str = "", start: int = 0
    ) -> KvHandle:
        return KvHandle(
            transfer_id=transfer_id,
            instance_id=self.name,
            generation=self.generation,
            fingerprint=FINGERPRINT,
            endpoints=tuple(self.endpoints),
            tokens=tokens,
            dtype=self.kv_dtype,
            codec=codec,
            stages=self.stages,
            adapter=adapter,
            start=start,
        )

    async def wait_event(self, kind: type[KvEvent], transfer_id: str, rank: int = 0) -> Any:
        """The first event of that kind, rank and transfer, seen already or yet to come."""
        async with self._changed:
            async with asyncio.timeout(EVENT_S):
                while True:
                    for event in self.events:
                        found: Any = event
                        if isinstance(event, kind) and (found.transfer_id, found.rank) == (transfer_id, rank):
                            return event
                    await self._changed.wait()

    async def pulls(self, at_least: int = 1) -> Counter[str]:
        """How imports ended here so far: "ok", "cached", or an error's code. Waits until `at_least` have ended."""
        ended = await self._wait_for(lambda event: isinstance(event, PullEnded), at_least)
        return Counter(("ok" if e.tokens else "cached") if e.ok else e.error.partition(":")[0] for e in ended)

    async def exports(self, at_least: int) -> Counter[int]:
        """Per rank, the exports that it has staged to their last chunk. Waits until there are `at_least`."""
        staged = await self._wait_for(lambda event: isinstance(event, StagedChunk) and event.last, at_least)
        return Counter(event.rank for event in staged)

    async def _wait_for(self, wanted: Callable[[KvEvent], bool], at_least: int) -> list[Any]:
        """Events come on another socket than a request's tokens, and those of two engines in any order."""
        async with self._changed, asyncio.timeout(EVENT_S):
            while len(found := [event for event in self.events if wanted(event)]) < at_least:
                await self._changed.wait()
        return found

    async def _send(self, **message: Any) -> None:
        await self._socket.send(json.dumps(message).encode())

    async def _read(self) -> None:
        while True:
            message = json.loads(await self._socket.recv())
            match message.pop("op"):
                case "ready":
                    self.async_scheduling = message["async_scheduling"]
                    self.stages = tuple(message["stages"])
                    self.kv_dtype = message["kv_dtype"] or self.kv_dtype
                    self._ready.set()
                case "done":
                    future = self._done.pop(message["id"])
                    if not future.done():
                        future.set_result(message["tokens"])
                case _:
                    self._answers.put_nowait(message)

    async def _listen(self) -> None:
        async for event in self._kv_events:
            async with self._changed:
                self.events.append(event)
                self._changed.notify_all()


def run_engine(log: str, *arguments: Any) -> None:
    """What an engine's process does."""
    from benchmarks.engine_process import run

    run(log, *arguments)


def exporting(transfer_id: str, codec: Codec = Codec.RAW, adapter: str = "") -> dict[str, Any]:
    return {"export": {"transfer_id": transfer_id, "codec": codec.value, "adapter": adapter}}


def importing(handle: KvHandle, **more: Any) -> dict[str, Any]:
    return {"import": msgspec.to_builtins(handle), **more}


SHORT = (1, 2, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 300, 511, 513, 777)
LENGTHS = (*SHORT, 1000)
NEW_TOKENS = 16


def prompts(seed: int = 1, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


async def handed_over(
    source: Engine,
    target: Engine,
    prompt: list[int],
    *,
    split: int = 0,
    codec: Codec = Codec.RAW,
    salt: bool = True,
    new_tokens: int = NEW_TOKENS,
    media: Generation | None = None,
) -> list[int]:
    """Tokens of `target` for the prompt whose first `split` tokens (all when 0) `source` computes, at the same time.
    media: as in `Engine.generate`.
    """
    transfer_id = uuid.uuid4().hex
    length = split or len(prompt)
    async with asyncio.TaskGroup() as group:
        group.create_task(source.generate(prompt[:length], 1, exporting(transfer_id, codec), media=media))
        handle = source.handle(transfer_id, length, codec)
        cache_salt = lossy_salt(transfer_id) if codec.lossy and salt else None
        output = group.create_task(target.generate(prompt, new_tokens, importing(handle), cache_salt, media=media))
    return output.result()


async def resumed(source: Engine, target: Engine, prompt: list[int], known: list[int]) -> list[int]:
    """The rest of an answer of `NEW_TOKENS` tokens that begins with the known ones, from `target`, which gets the KV of
    the prompt and of all of these but the last one from `source`.
    """
    transfer_id, begun = uuid.uuid4().hex, [*prompt, *known[:-1]]
    await source.generate(begun, 1, exporting(transfer_id))
    handle = source.handle(transfer_id, len(begun))
    return await target.generate(prompt, NEW_TOKENS, importing(handle), known=known)


async def emptied(engine: Engine) -> None:
    """Its staging and inbox become empty."""
    async with asyncio.timeout(EVENT_S):
        while any(s.staged_bytes or s.inbox_bytes or s.pulling for s in await engine.control.call(Stats())):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def identical(outputs: list[list[int]], references: list[list[int]]) -> int:
    return sum(output == reference for output, reference in zip(outputs, references, strict=True))
