"""`polyphase bench kv`: speed of staged KV between two processes, beside a plain socket that moves the same bytes.

A child process exports and serves KV; the parent imports it into one tensor per layer. All kinds of copy are measured
in turns. Where NIXL is installed, the bench also measures NIXL without our transport, over TCP.
"""

import os
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.results import at_least, at_most
from benchmarks.suite import spawned
from services.worker.kv.codec import codec_speeds
from services.worker.kv.rank_links import PullEnded
from services.worker.kv.shards import RankShape, Shards
from services.worker.kv.staging import Bytes
from services.worker.kv.wire.endpoint import KvEndpoint, KvSettings
from services.worker.kv.wire.importing import Load
from services.worker.kv.wire.nixl_agent import NixlAgent, installed
from shared.domain.instance import KvGeometry
from shared.domain.kv import Codec, KvHandle

# NIXL over TCP without our transport. Each side registers one block, and one read moves all bytes; nothing is cut
# into frames and nothing is checked. Both sides poll ten thousand times a second: polling without a pause takes cores
# from the kernel, which copies; on two busy cores a third of the rate was left.

_PAUSE_S = 0.0001
NOT_INSTALLED = "NIXL is not installed (pip install 'polyphase[nixl]'): nothing is measured against it"


def note() -> str:
    """What is measured, or why it is not."""
    return f"NIXL {version('nixl')} over UCX's TCP" if installed() else NOT_INSTALLED


class PlainNixl:
    def __init__(self, pipe: Connection, size: int) -> None:
        self._pipe = pipe
        self._agent, self._block = _agent(size)
        metadata, self._address = pipe.recv()
        self._peer = self._agent.connect(metadata)

    def copy(self, size: int) -> tuple[float, float]:
        """Read so many bytes; seconds, and seconds of this process's CPU. Raises NixlError."""
        self._pipe.send(True)
        self._pipe.recv()
        cpu_s, started = time.process_time(), time.perf_counter()
        read = self._agent.read(self._peer, self._address, self._block, size)
        while not read.done():
            time.sleep(_PAUSE_S)
        took = time.perf_counter() - started, time.process_time() - cpu_s
        self._pipe.send(False)
        self._pipe.recv()
        return took


def _export_nixl(pipe: Connection, size: int) -> None:
    agent, block = _agent(size)
    block[:] = 1
    pipe.send((agent.metadata, block.ctypes.data))
    while pipe.recv() is not None:
        pipe.send(True)
        while not pipe.poll(0):
            agent.progress()
            time.sleep(_PAUSE_S)
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


LAYERS, HEADS, DIM = 16, 8, 64  # 32 KiB of bfloat16 a token
_TOKEN_BYTES = LAYERS * 2 * HEADS * DIM * 2
_SHARDS = Shards((LAYERS,), HEADS)
_STAGING_BYTES = 512 << 20
_SHAPE = RankShape(_SHARDS, DIM, torch.bfloat16)
SCHEMES = {"tcp": "kv"} | ({"nixl": "nixl"} if installed() else {})  # of addresses, by transport
NIXL_OVER_TCP = "nixl_over_tcp"
_WANT = {1: 0.6, 8: 0.8, 64: 0.8}  # of a plain socket's rate, by MiB
_WANT_OF_NIXL = {8: 1.0, 64: 1.0}  # of the rate of NIXL over TCP
_WANT_CPU = 1.5  # of what a plain socket's reader uses, at most
_WANT_CODED = 1.5e9  # bytes of KV a second and core
_CODED = KvGeometry(LAYERS, HEADS, 128)


@dataclass(frozen=True, slots=True)
class _Sample:
    seconds: float
    cpu_s: float  # of the importing process


def run_kv_bench(sizes_mb: tuple[int, ...] = (1, 8, 64), rounds: int = 15) -> dict[str, Any]:
    """Medians over `rounds` of each size (MiB of bfloat16 KV): a plain socket and each transport in turns, and what
    codecs do beside them.

    Returns {"figures": {name_unit: number}, "aims": {name: {"want", "got", "met"}}, "notes": [str]}. Ratios are medians
    of each round's own: neighbours on the machine slow all of a round. Codecs' rates count KV bytes, not coded ones.
    """
    torch.set_num_threads(1)  # as an instance's KV threads have it; two would wait for each other on two cores
    figures: dict[str, float] = {}
    aims: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        size = max(sizes_mb) << 20
        plain = PlainNixl(stack.enter_context(spawned(_export_nixl, size)), size) if installed() else None
        importer = stack.enter_context(_Importer(folder, stack.enter_context(spawned(_export, folder)), plain))
        for size_mb in sizes_mb:
            _compare(size_mb, importer.measure(size_mb << 20, rounds), figures, aims)
    for name, rate in codec_speeds(_CODED, torch.bfloat16).items():
        figures[f"{name}_encode_gb_per_s"] = round(rate.encode_bytes_s / 1e9, 2)
        figures[f"{name}_decode_gb_per_s"] = round(rate.decode_bytes_s / 1e9, 2)
        if name != Codec.FP8:
            slower = min(rate.encode_bytes_s, rate.decode_bytes_s)
            aims[f"{name}_gb_per_s"] = at_least(_WANT_CODED / 1e9, round(slower / 1e9, 2))
    return {"figures": figures, "aims": aims, "notes": [note()]}


def _compare(
    size_mb: int, samples: dict[str, list[_Sample]], figures: dict[str, float], aims: dict[str, dict[str, Any]]
) -> None:
    plain = samples["socket"]
    for name, each in samples.items():
        figures[f"{name}_{size_mb}mb_gb_per_s"] = round((size_mb << 20) / median(one.seconds for one in each) / 1e9, 3)
        figures[f"{name}_{size_mb}mb_import_cpu_ms"] = round(median(one.cpu_s for one in each) * 1e3, 2)
        if each is plain:
            continue
        pairs = list(zip(each, plain, strict=True))
        rate = round(median(beside.seconds / one.seconds for one, beside in pairs), 3)
        cpu = round(median(one.cpu_s / beside.cpu_s for one, beside in pairs), 3)
        figures[f"{name}_{size_mb}mb_to_socket_ratio"] = rate
        figures[f"{name}_{size_mb}mb_import_cpu_ratio"] = cpu
        if name == "tcp" and size_mb in _WANT:
            aims[f"tcp_{size_mb}mb_to_socket_ratio"] = at_least(_WANT[size_mb], rate)
            aims[f"tcp_{size_mb}mb_import_cpu_ratio"] = at_most(_WANT_CPU, cpu)
    if NIXL_OVER_TCP in samples:
        beside = zip(samples["tcp"], samples[NIXL_OVER_TCP], strict=True)
        ratio = round(median(nixl.seconds / ours.seconds for ours, nixl in beside), 3)
        figures[f"tcp_{size_mb}mb_to_nixl_over_tcp_ratio"] = ratio
        if size_mb in _WANT_OF_NIXL:
            aims[f"tcp_{size_mb}mb_to_nixl_over_tcp_ratio"] = at_least(_WANT_OF_NIXL[size_mb], ratio)


def _settings(scheme: str, events: str) -> KvSettings:
    return KvSettings((f"{scheme}://127.0.0.1:*",), events, generation=1, fingerprint="bench", control_key="")


class _Importer:
    """The parent's side: pulls into paged tensors, or reads the plain socket into a buffer."""

    def __init__(self, folder: str, pipe: Connection, nixl: PlainNixl | None) -> None:
        self._pipe = pipe
        self._kv_addresses, plain_port = pipe.recv()
        self._plain = socket.create_connection(("127.0.0.1", plain_port), timeout=60)
        self._ended = threading.Event()
        self._result: PullEnded | None = None
        self._nixl = nixl
        self._endpoints = {}
        for name, scheme in SCHEMES.items():
            settings = _settings(scheme, f"ipc://{folder}/importer-{name}")
            self._endpoints[name] = KvEndpoint(settings, _SHAPE, self._on_end, _STAGING_BYTES)
        self._count = 0

    def __enter__(self) -> "_Importer":
        return self

    def __exit__(self, *_: object) -> None:
        self._plain.close()
        for each in self._endpoints.values():
            each.stop()

    def measure(self, size: int, rounds: int) -> dict[str, list[_Sample]]:
        """Samples by name: the plain socket and each transport, in turns; the first turn only warms up."""
        buffer = memoryview(bytearray(size))
        destination = _Destination(size // _TOKEN_BYTES)
        samples: dict[str, list[_Sample]] = {name: [] for name in ("socket", *SCHEMES)}
        if self._nixl is not None:
            samples[NIXL_OVER_TCP] = []
        for turn in range(rounds + 1):
            for name, kept in samples.items():
                sample = self._measured(name, buffer, destination)
                if turn:
                    kept.append(sample)
        return samples

    def _measured(self, name: str, buffer: memoryview, destination: "_Destination") -> _Sample:
        if name == "socket":
            return self._copy(buffer)
        if name == NIXL_OVER_TCP and self._nixl is not None:
            return _Sample(*self._nixl.copy(len(buffer)))
        return self._pull(name, len(buffer), destination)

    def _copy(self, buffer: memoryview) -> _Sample:
        cpu_s, started = time.process_time(), time.perf_counter()
        self._plain.sendall(len(buffer).to_bytes(8, "big"))
        got = 0
        while got < len(buffer):
            got += self._plain.recv_into(buffer[got:])
        return _Sample(time.perf_counter() - started, time.process_time() - cpu_s)

    def _pull(self, transport: str, size: int, destination: "_Destination") -> _Sample:
        self._count += 1
        tokens = size // _TOKEN_BYTES
        transfer_id = f"bench-{self._count}"
        self._pipe.send((transport, transfer_id, tokens))
        self._pipe.recv()  # staged: what is measured begins with the pull
        addresses = (self._kv_addresses[transport],)
        handle = KvHandle(transfer_id, "exporter", 1, "bench", addresses, tokens, "bfloat16")
        self._ended.clear()
        cpu_s, started = time.process_time(), time.perf_counter()
        self._endpoints[transport].load(Load(transfer_id, handle, 0, tokens, destination, 60.0))
        self._ended.wait(60)
        sample = _Sample(time.perf_counter() - started, time.process_time() - cpu_s)
        if self._result is None or not self._result.ok:
            raise RuntimeError(f"the pull failed: {self._result}")
        if self._result.transport != transport:
            raise RuntimeError(f"{transport} was to carry it, and {self._result.transport} did")
        return sample

    def _on_end(self, _: str, ended: PullEnded) -> None:
        self._result = ended
        self._ended.set()


class _Destination:
    """Canonical KV, a tensor a layer. What an engine's own paging costs on top depends on the engine."""

    dtype = torch.bfloat16

    def __init__(self, tokens: int) -> None:
        self._layers = [torch.zeros(2, tokens, HEADS, DIM, dtype=self.dtype) for _ in range(LAYERS)]
        self._bytes = [[half.view(torch.uint8).reshape(-1).numpy().data for half in each] for each in self._layers]

    def write(self, layer: int, token_start: int, head_start: int, kv: torch.Tensor) -> None:
        self._layers[layer][:, token_start : token_start + kv.shape[1]] = kv

    def take(self, *_: object) -> bool:
        return False

    def room(self, layer: int, tokens: tuple[int, int], heads: tuple[int, int]) -> list[memoryview]:
        """K's and V's part of the layer's tensor."""
        start, end = (each * HEADS * DIM * self.dtype.itemsize for each in tokens)
        return [half[start:end] for half in self._bytes[layer]] if heads == (0, HEADS) else []

    def finish(self) -> None:
        """All of it is there: no device is at it."""


def _export(pipe: Connection, folder: str) -> None:
    """The child: stage the transfers that the pipe requests, until the pipe ends."""
    torch.set_num_threads(1)
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve_plain, args=(server,), daemon=True).start()
    endpoints = {}
    for transport, scheme in SCHEMES.items():
        events = f"ipc://{Path(folder)}/exporter-{transport}"
        endpoints[transport] = KvEndpoint(_settings(scheme, events), _SHAPE, lambda *_: None, _STAGING_BYTES)
    pipe.send(({name: each.address for name, each in endpoints.items()}, server.getsockname()[1]))
    source = torch.randn(LAYERS, 2, 64, HEADS, DIM).to(torch.bfloat16)

    def fill(start: int, end: int, kv: torch.Tensor) -> None:
        for first in range(0, end - start, 64):
            part = kv[:, :, first : first + 64]
            part.copy_(source[:, :, : part.shape[2]])

    while (order := pipe.recv()) is not None:
        transport, transfer_id, tokens = order
        endpoints[transport].stage(transfer_id, 0, tokens, tokens, fill)
        pipe.send(True)
    for each in endpoints.values():
        each.stop()


def _serve_plain(server: socket.socket) -> None:
    connection, _ = server.accept()
    payload = b""
    while wanted := connection.recv(8):
        size = int.from_bytes(wanted, "big")
        if len(payload) != size:
            payload = bytes(bytearray(range(256)) * (size // 256))
        connection.sendall(payload)
