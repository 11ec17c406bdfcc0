"""Pairs of real engines in processes of their own, and the KV transfer between them that serves; and with them
`polyphase bench kv_engines`: the rate of each transport, and what share that is of a plain socket's.

The pairs of that bench are all up at once and measured in turns with the socket, so that a disturbance by other
processes meets all of them. A prompt is one chunk, so that its pull begins when all of it is staged: the transfer alone
is measured.
"""

import asyncio
import os
import socket
import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from statistics import median
from types import MappingProxyType
from typing import Any

import msgspec

from benchmarks.cluster_files import LlamaShape, make_llama
from benchmarks.kv import export, read_socket
from benchmarks.results import Result, result
from benchmarks.suite import spawned
from services.worker.kv import lossy_salt, mixed_salt
from shared.domain.kv import Codec, KvHandle, TransferOutcome, TransferReport
from shared.errors import Unavailable

START_S = 600.0


@dataclass(frozen=True, slots=True)
class Order:
    """A greedy request for `max_tokens` tokens, or for those that are `forced`; `stops` end it early.

    salt: keeps it apart from prefix caches. transfer_id: of its export with this codec. handle: of its import.
    """

    prompt: Sequence[int]
    max_tokens: int
    forced: Sequence[int] = ()
    stops: Sequence[int] = ()
    salt: str = ""
    transfer_id: str = ""
    codec: Codec = Codec.RAW
    handle: KvHandle | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens and their log probabilities, without temperature; of an export its handle, of an import its report."""

    tokens: list[int]
    logprobs: list[float]
    handle: KvHandle | None = None
    transfer: TransferReport | None = None


class EnginePair:
    """An engine that exports and one that imports."""

    def __init__(self, exporter: Connection, importer: Connection) -> None:
        self._exporter, self._importer = exporter, importer
        self._count = 0

    def answer(self, order: Order, codec: Codec | None) -> Answer:
        """The importer's answer after a transfer by this codec, or without any.

        Raises Unavailable where KV was not pulled whole: a recomputation would look like a perfect, fast transfer.
        """
        self._count += 1
        name = f"bench-{self._count}"
        if codec is None:
            return _request(self._importer, replace(order, salt=name))
        export = _request(self._exporter, Order(order.prompt, 1, salt=name, transfer_id=name, codec=codec))
        salt, precision = name, export.handle.precision if export.handle is not None else ""
        if codec.lossy:  # without such a salt this KV is not imported
            salt = lossy_salt(name)
        elif precision:
            salt = mixed_salt(precision, name)
        return _request(self._importer, replace(order, salt=salt, handle=export.handle))


def _request(pipe: Connection, order: Order) -> Answer:
    try:
        pipe.send(order)
        answer = pipe.recv()
    except (EOFError, OSError) as error:
        raise Unavailable("an engine's process has ended") from error
    if isinstance(answer, str):
        raise Unavailable(answer)
    assert isinstance(answer, Answer)
    return answer


@contextmanager
def engine_pair(exporter: Mapping[str, Any] = MappingProxyType({}), /, **settings: Any) -> Iterator[EnginePair]:
    """Engines with these worker settings, and the exporter with its own; they end with the context."""
    with ExitStack() as stack:
        pipes = []
        for name, own in (("exporter", exporter), ("importer", {})):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            values = {"instance_id": name, "kv_port": port, **settings, **own}
            pipe = stack.enter_context(spawned(_serve, values, end_s=20.0))
            if not pipe.poll(START_S):
                raise Unavailable(f"{name}: no engine after {START_S:.0f} s")
            if failure := pipe.recv():
                raise Unavailable(f"{name}: {failure}")
            pipes.append(pipe)
        yield EnginePair(*pipes)


def _serve(pipe: Connection, settings: dict[str, Any]) -> None:
    os.environ |= {  # as in a worker
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from services.worker.settings import WorkerSettings

    unused = "tcp://127.0.0.1:1"  # no service is contacted
    addresses = {"monitor_url": "http://127.0.0.1:1", "heartbeat_address": unused, "broadcast_address": unused}
    settings = {"rpc_port": 1, "http_port": 1, "cluster_token": "bench", **addresses, **settings}
    asyncio.run(_answer(pipe, WorkerSettings(**settings)))


async def _answer(pipe: Connection, settings: Any) -> None:
    from services.worker.engine_start import start_engine
    from shared.runtime.tasks import background

    async with AsyncExitStack() as stack:
        try:
            engine, _, port = await start_engine(settings, os.getpid(), lambda: None, lambda _: None, stack)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
            return
        tasks = await stack.enter_async_context(background())
        port.start(tasks)
        pipe.send("")
        while (order := await asyncio.to_thread(pipe.recv)) is not None:
            pipe.send(await _answered(engine, port, order))


async def _answered(engine: Any, port: Any, order: Order) -> Answer | str:
    """An answer, or the error."""
    from services.worker.engines.base import FAILED, EngineRequest
    from shared.domain.job import Generation, JobView
    from shared.wire.messages import decode_rows

    # vLLM's SamplingParams
    sampling = {"temperature": 0.0, "ignore_eos": True, "stop_token_ids": list(order.stops), "logprobs": 0}
    request = EngineRequest(
        request_id=order.salt,
        job=JobView(order.salt, len(order.prompt), order.max_tokens),
        prompt_token_ids=list(order.prompt),
        generation=Generation(msgspec.msgpack.encode(sampling), 0.0, cache_salt=order.salt),
        max_tokens=order.max_tokens,
        first_token_only=bool(order.transfer_id),
        export_to=order.transfer_id,
        export_codec=order.codec,
        import_from=order.handle,
        forced_tokens=list(order.forced),
    )
    expected = port.expect(order.handle) if order.handle is not None else None
    ended, tokens, logprobs, failed = asyncio.Event(), list[int](), list[float](), list[str]()

    def sink(step: Any) -> None:
        tokens.extend(step.tokens)
        if step.logprobs:
            rows = decode_rows(step.logprobs)
            logprobs.extend(array("f", rows.values)[:: rows.candidates])  # the produced token is each row's first
        if step.finish_reason:
            if step.finish_reason in FAILED:
                failed.append(f"{step.finish_reason}: {step.stop_reason}")
            ended.set()

    engine.submit(request, sink)
    await ended.wait()
    transfer = None
    if expected is not None:
        transfer = await port.import_report(expected)
        port.end(expected)
        if transfer.outcome is not TransferOutcome.PULLED:
            failed.append(f"KV was not pulled: {transfer.outcome} {transfer.error}")
    if failed:
        return "; ".join(failed)
    handle = port.handle(order.transfer_id, len(order.prompt), order.codec) if order.transfer_id else None
    return Answer(tokens, logprobs, handle, transfer)


# The rate of each transport.

TRANSPORTS = ("tcp", "nixl") if find_spec("nixl") else ("tcp",)
# Much KV and little to compute: 32 KiB a token in float32.
SHAPE = LlamaShape(4096, 256, 512, 16, 8, 8, 4096)
MAX_MODEL_LEN = 2304
SIZES_MB = (1, 8, 64)
ROUNDS = 7


def run_kv_engines_bench(transports: Sequence[str] = TRANSPORTS, rounds: int = ROUNDS) -> Result:
    """Medians over `rounds` of each transport and size; ratios are medians of each round's own."""
    transfers: dict[str, list[TransferReport]] = {}
    sockets: dict[str, list[float]] = {}  # bytes per second
    memory = {"kv_cache_bytes": 256 << 20, "staging_bytes": 256 << 20}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polyphase-kv-engines-")))
        settings = {
            "model": str(make_llama(folder / "model", SHAPE)),
            "dtype": "float32",
            "max_model_len": MAX_MODEL_LEN,
            "chunk_size": MAX_MODEL_LEN,
            **memory,
        }
        pipe = stack.enter_context(spawned(export, str(folder)))
        _, port = pipe.recv()
        plain = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60.0))
        pairs = {name: stack.enter_context(engine_pair(kv_transport=name, **settings)) for name in transports}
        for turn in range(rounds + 1):
            for size_mb in SIZES_MB:
                socket_rate = (size_mb << 20) / read_socket(plain, size_mb << 20).seconds
                for name, pair in pairs.items():
                    transfer = _transfer(pair, name, size_mb, Random(f"{name}-{size_mb}-{turn}"))
                    if turn:  # the first only warms up
                        transfers.setdefault(f"{name}_{size_mb}mb", []).append(transfer)
                        sockets.setdefault(f"{name}_{size_mb}mb", []).append(socket_rate)
    figures = {}
    for key, each in transfers.items():
        rates = [one.wire_bytes / (one.ended_s - one.started_s) for one in each]
        ratio = median(one / base for one, base in zip(rates, sockets[key], strict=True))
        figures[f"{key}_gb_per_s"] = round(median(rates) / 1e9, 3)
        figures[f"{key}_to_socket_ratio"] = round(ratio, 3)
        figures[f"{key}_ms"] = round(median(one.ended_s - one.started_s for one in each) * 1e3, 2)
    return result(figures)


def _transfer(pair: EnginePair, transport: str, size_mb: int, rng: Random) -> TransferReport:
    """Raises Unavailable when another transport was used."""
    tokens = (size_mb << 20) // SHAPE.kv_bytes_per_token
    prompt = [rng.randrange(10, SHAPE.vocab_size) for _ in range(tokens)]
    transfer = pair.answer(Order(prompt, 2), Codec.RAW).transfer
    assert transfer is not None
    if transfer.transport != transport:
        raise Unavailable(f"{size_mb} MB were transferred by {transfer.transport}, not by {transport}")
    return transfer
