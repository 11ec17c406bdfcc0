"""`polyphase bench kv`: speed of staged KV between two processes, beside plain sockets that move the same bytes.

A child process exports and serves KV over our TCP transport; the parent imports it into one tensor per layer. One plain
socket sends the same cached bytes each time; another one, as the export does, memory that was filled just before. All
kinds of copy are measured in turns. Where NIXL is installed, the bench also measures NIXL without our transport, over
TCP.
"""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from multiprocessing.connection import Connection
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.results import Aim, Result, at_least, at_most, merged, result
from benchmarks.suite import spawned
from services.worker.kv.rank_messages import PullEnded
from services.worker.kv.shards import RankShape, Shards
from services.worker.kv.staging import Bytes, Part, Piece
from services.worker.kv.wire.endpoint import KvEndpoint, KvSettings
from services.worker.kv.wire.importing import Load
from services.worker.kv.wire.nixl_agent import NixlAgent, installed
from shared.domain.kv import KvHandle

LAYERS, HEADS, DIM, DTYPE = 16, 8, 64, torch.bfloat16
TOKEN_BYTES = LAYERS * 2 * HEADS * DIM * DTYPE.itemsize  # 32 KiB
SHAPE = RankShape(Shards((LAYERS,), HEADS), DIM, DTYPE)
TCP, SOCKET, STAGED_SOCKET, NIXL_OVER_TCP = "tcp", "socket", "staged_socket", "nixl_over_tcp"
WANT = {1: 0.8, 8: 0.8, 64: 0.8}  # of each plain socket's rate, by MiB
WANT_OF_NIXL = {8: 1.0, 64: 1.0}  # of the rate of NIXL over TCP
WANT_CPU = 1.5  # of what a plain socket's reader uses, at most
PULL_S = 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """cpu_s: of the importing process."""

    seconds: float
    cpu_s: float


Copy = Callable[[int], Sample]  # of so many bytes
Samples = Mapping[str, Sequence[Sample]]


def stopwatch() -> Callable[[], Sample]:
    cpu_s, began_mono = time.process_time(), time.perf_counter()
    return lambda: Sample(time.perf_counter() - began_mono, time.process_time() - cpu_s)


def run_kv_bench(sizes_mb: tuple[int, ...] = (1, 8, 64), rounds: int = 60) -> Result:
    """Medians over `rounds` of each size (MiB of bfloat16 KV): plain sockets and each transport in turns.

    Ratios are medians of each round's own: other processes slow all of a round.
    """
    torch.set_num_threads(1)  # as an instance's KV threads have it; two would wait for each other on two cores
    nixl = f"NIXL {version('nixl')} over UCX's TCP" if installed() else "NIXL is not installed: it is not measured"
    parts = [result({}, notes=[nixl])]
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        pipe = stack.enter_context(spawned(export, folder))
        address, port = pipe.recv()
        plain = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PULL_S))
        puller = Puller(address, folder, pipe)
        stack.callback(puller.stop)
        copies: dict[str, Copy] = {
            SOCKET: lambda size: read_socket(plain, size),
            STAGED_SOCKET: lambda size: _read_staged(plain, size, pipe),
            TCP: puller.copy,
        }
        if installed():
            max_bytes = max(sizes_mb) << 20
            copies[NIXL_OVER_TCP] = PlainNixl(stack.enter_context(spawned(_export_nixl, max_bytes)), max_bytes).copy
        for size_mb in sizes_mb:
            samples: dict[str, list[Sample]] = {name: [] for name in copies}
            for turn in range(rounds + 1):
                for name, copy in copies.items():
                    sample = copy(size_mb << 20)
                    if turn:  # the first only warms up
                        samples[name].append(sample)
            parts.append(_compared(size_mb, samples))
    return merged(*parts)


def _compared(size_mb: int, samples: Samples) -> Result:
    def over(name: str, other: str, figure: Callable[[Sample], float]) -> float:
        pairs = zip(samples[name], samples[other], strict=True)
        return round(median(figure(one) / figure(base) for one, base in pairs), 3)

    figures, aims, key = {}, dict[str, Aim](), f"tcp_{size_mb}mb"
    for name, each in samples.items():
        figures[f"{name}_{size_mb}mb_gb_per_s"] = round((size_mb << 20) / median(one.seconds for one in each) / 1e9, 3)
        figures[f"{name}_{size_mb}mb_import_cpu_ms"] = round(median(one.cpu_s for one in each) * 1e3, 2)
    wanted = {f"to_{name}_ratio": WANT for name in (SOCKET, STAGED_SOCKET)}
    for name in (SOCKET, STAGED_SOCKET):
        figures[f"{key}_to_{name}_ratio"] = over(name, TCP, lambda one: one.seconds)
    figures[f"{key}_import_cpu_ratio"] = over(TCP, SOCKET, lambda one: one.cpu_s)
    if NIXL_OVER_TCP in samples:
        figures[f"{key}_to_nixl_over_tcp_ratio"] = over(NIXL_OVER_TCP, TCP, lambda one: one.seconds)
        wanted["to_nixl_over_tcp_ratio"] = WANT_OF_NIXL
    for name, want in wanted.items():
        if size_mb in want:
            aims[f"{key}_{name}"] = at_least(want[size_mb], figures[f"{key}_{name}"])
    if size_mb in WANT:
        aims[f"{key}_import_cpu_ratio"] = at_most(WANT_CPU, figures[f"{key}_import_cpu_ratio"])
    return result(figures, aims)


# The importing process.


def _read_staged(plain: socket.socket, size: int, pipe: Connection) -> Sample:
    pipe.send(("", size // TOKEN_BYTES))
    pipe.recv()
    return read_socket(plain, size)


def read_socket(plain: socket.socket, size: int) -> Sample:
    """So many bytes of the plain socket of `export`."""
    buffer, watch, got = _buffer(size), stopwatch(), 0
    plain.sendall(size.to_bytes(8, "big"))
    while got < size:
        got += plain.recv_into(buffer[got:])
    return watch()


@cache
def _buffer(size: int) -> memoryview:
    return memoryview(bytearray(size))


class Puller:
    """Pulls KV over TCP into paged tensors."""

    def __init__(self, address: str, folder: str, pipe: Connection) -> None:
        self._address, self._pipe = address, pipe
        self._running = threading.Lock()  # held from the begin of a pull to its end
        self._result: PullEnded | None = None
        self._count = 0
        self._endpoint = _endpoint(f"ipc://{folder}/importer", self._on_end)
        self.stop = self._endpoint.stop

    def copy(self, size: int) -> Sample:
        """Raises RuntimeError when the pull fails."""
        self._count += 1
        tokens, name = size // TOKEN_BYTES, f"tcp-{self._count}"
        destination = _destination(tokens)
        self._pipe.send((name, tokens))
        self._pipe.recv()  # staged: the time counts from the pull on
        handle = KvHandle(name, "exporter", 1, "bench", (self._address,), tokens, "bfloat16")
        self._running.acquire()
        watch = stopwatch()
        self._endpoint.load(Load(name, handle, 0, tokens, (destination,), PULL_S))
        ended = self._running.acquire(timeout=PULL_S)
        sample = watch()
        self._running.release()
        if not ended or self._result is None or not self._result.ok or self._result.transport != TCP:
            raise RuntimeError(f"the pull over TCP failed: {self._result}")
        return sample

    def _on_end(self, _: str, ended: PullEnded) -> None:
        self._result = ended
        self._running.release()


class Destination:
    """Canonical KV, a tensor a layer. What an engine's own paging costs on top depends on the engine."""

    dtype = DTYPE

    def __init__(self, tokens: int) -> None:
        self._layers = [torch.zeros(2, tokens, HEADS, DIM, dtype=DTYPE) for _ in range(LAYERS)]
        self._tokens = tokens
        self._bytes = [each.view(torch.uint8).reshape(-1).numpy().data for each in self._layers]

    def scales(self, layer: int) -> tuple[float, ...]:
        return ()

    def write(self, layer: int, token_start: int, head_start: int, kv: torch.Tensor) -> None:
        self._layers[layer][:, token_start : token_start + kv.shape[1]] = kv

    def take(self, *_: object) -> bool:
        return False

    def room(self, layers: tuple[int, int], tokens: tuple[int, int], heads: tuple[int, int]) -> list[memoryview]:
        """Each layer's tensor where all tokens are wanted, otherwise K's and V's part of it."""
        if heads != (0, HEADS):
            return []
        if tokens == (0, self._tokens):
            return self._bytes[slice(*layers)]
        row = HEADS * DIM * DTYPE.itemsize
        start, end, half = tokens[0] * row, tokens[1] * row, self._tokens * row
        return [each[at + start : at + end] for each in self._bytes[slice(*layers)] for at in (0, half)]

    def finish(self) -> None:
        """Nothing to wait for: the destination is no device's."""


@cache
def _destination(tokens: int) -> Destination:
    return Destination(tokens)


def _endpoint(events: str, on_end: Callable[[str, PullEnded], None], staging_bytes: int = 256 << 20) -> KvEndpoint:
    settings = KvSettings(("kv://127.0.0.1:*",), events, generation=1, fingerprint="bench", control_key="")
    return KvEndpoint(settings, (SHAPE,), on_end, staging_bytes)


# The exporting process.


def export(pipe: Connection, folder: str) -> None:
    """Stage the transfers that the pipe requests, until it ends, those without a name for the plain socket; and serve
    that. The pipe's first message is the address of the KV and the port of the socket.
    """
    torch.set_num_threads(1)
    server, fresh = socket.create_server(("127.0.0.1", 0)), deque[Sequence[Part]]()
    threading.Thread(target=_serve_plain, args=(server, fresh), daemon=True).start()
    endpoint = _endpoint(f"ipc://{folder}/exporter", lambda *_: None, staging_bytes=512 << 20)
    pipe.send((endpoint.address, server.getsockname()[1]))
    source = torch.randn(LAYERS, 2, 64, HEADS, DIM).to(DTYPE)

    def fill(start: int, end: int, kv: torch.Tensor) -> None:
        for first in range(0, end - start, 64):
            part = kv[:, :, first : first + 64]
            part.copy_(source[:, :, : part.shape[2]])

    while (order := pipe.recv()) is not None:
        transfer_id, tokens = order
        piece = Piece(0, tokens, fill)
        if transfer_id:
            endpoint.stage(transfer_id, (0, tokens), tokens, [piece])
        else:
            parts = endpoint.copies.memory.take(piece)
            for part in parts:
                piece.issue(part, part.host)
            fresh.append(parts)
        pipe.send(True)
    endpoint.stop()


def _serve_plain(server: socket.socket, fresh: deque[Sequence[Part]]) -> None:
    """Send what was staged for it, otherwise the bytes of the last time."""
    connection, _ = server.accept()
    payload = b""
    while wanted := connection.recv(8):
        if fresh:
            for part in fresh.popleft():
                connection.sendall(part.host.view(torch.uint8).reshape(-1).numpy().data)
            continue
        size = int.from_bytes(wanted, "big")
        if len(payload) != size:
            payload = bytes(bytearray(range(256)) * (size // 256))
        connection.sendall(payload)


# NIXL over TCP without our transport. Each side registers one block, and one read moves all bytes; nothing is cut
# into frames and nothing is checked. Both sides poll ten thousand times a second: polling without a pause takes cores
# from the kernel, which copies; on two busy cores a third of the rate was left.

POLL_S = 0.0001


class PlainNixl:
    def __init__(self, pipe: Connection, size: int) -> None:
        self._pipe = pipe
        self._agent, self._block = _agent(size)
        metadata, self._address = pipe.recv()
        self._peer = self._agent.connect(metadata)

    def copy(self, size: int) -> Sample:
        """Raises NixlError."""
        self._pipe.send(True)
        self._pipe.recv()
        watch = stopwatch()
        read = self._agent.read(self._peer, self._address, self._block, size)
        while not read.done():
            time.sleep(POLL_S)
        sample = watch()
        self._pipe.send(False)
        self._pipe.recv()
        return sample


def _export_nixl(pipe: Connection, size: int) -> None:
    agent, block = _agent(size)
    block[:] = 1
    pipe.send((agent.metadata, block.ctypes.data))
    while pipe.recv() is not None:
        pipe.send(True)
        while not pipe.poll(0):
            agent.progress()
            time.sleep(POLL_S)
        pipe.recv()
        pipe.send(True)


def _agent(size: int) -> tuple[NixlAgent, Bytes]:
    before = os.environ.get("UCX_TLS")
    os.environ["UCX_TLS"] = "tcp"
    try:
        agent = NixlAgent(trusted=False)
    finally:
        if before is None:
            del os.environ["UCX_TLS"]
        else:
            os.environ["UCX_TLS"] = before
    block: Bytes = np.zeros(size, np.uint8)
    agent.register(block)
    return agent, block
