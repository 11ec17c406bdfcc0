"""The harness of KV tests: real endpoints on loopback, and KV that is moved between them and compared."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import zmq

from services.worker.kv.device import Copies
from services.worker.kv.rank_events import KvEvents
from services.worker.kv.rank_messages import Prefetch, PullEnded
from services.worker.kv.shards import RankShape, Shards
from services.worker.kv.staging import Piece
from services.worker.kv.wire.endpoint import Faults, KvEndpoint, KvSettings
from services.worker.kv.wire.importing import Load, PullLimits
from shared.domain.kv import Codec, KvHandle

LAYERS, KV_HEADS, DIM = 3, 4, 8
TOKEN_BYTES = 2 * LAYERS * KV_HEADS * DIM * 4  # in float32
KEY = "key"
WAIT_S = 20.0
PATIENCE_S = 60.0  # of a machine that pauses us: endpoints do not count that time, and take longer


def model_kv(tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """KV of the whole model: [layers, 2, tokens, heads, dim]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYERS, 2, tokens, KV_HEADS, DIM, generator=generator).to(dtype)


def wait_until(condition: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Poll for what another thread brings about."""
    end, pause = time.monotonic() + within_s, threading.Event()
    while not condition():
        assert time.monotonic() < end, f"did not come about in {within_s} s"
        pause.wait(0.005)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Capture:
    """A destination that keeps what is written, and can hold the puller up."""

    def __init__(self, start: int, end: int, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.start = start
        self.kv = torch.full((LAYERS, 2, end - start, KV_HEADS, DIM), float("nan"), dtype=dtype)
        self.writes: list[tuple[int, int]] = []  # layer, first token
        self.before: Callable[[], object] = lambda: None
        self.finished = False

    def scales(self, layer: int) -> tuple[float, ...]:
        return ()

    def write(self, layer: int, token_start: int, head_start: int, kv: torch.Tensor) -> None:
        self.before()
        self.writes.append((layer, token_start))
        first = token_start - self.start
        self.kv[layer, :, first : first + kv.shape[1], head_start : head_start + kv.shape[2]] = kv

    def take(self, *_: object) -> bool:
        return False

    def room(self, layers: tuple[int, int], tokens: tuple[int, int], heads: tuple[int, int]) -> list[memoryview]:
        return []

    def finish(self) -> None:
        self.finished = True


@dataclass
class Rig:
    """Endpoints of one test; `close` ends them all."""

    folder: Path
    scheme: str = "kv"  # transport of what endpoints export
    clock: Callable[[], float] = time.monotonic  # of leases
    generation: int = 7
    fingerprint: str = "model"
    endpoints: list[KvEndpoint] = field(default_factory=list)
    results: "queue.Queue[PullEnded]" = field(default_factory=queue.Queue)
    _unread: "zmq.Socket[bytes] | None" = None

    @property
    def events_address(self) -> str:
        return f"ipc://{self.folder}/events"

    def events(self) -> KvEvents:
        """The events of endpoints; to be entered before there is one."""
        assert self._unread is None, "another endpoint exists, and its events are not read"
        return KvEvents(self.events_address)

    def endpoint(
        self,
        rank: int = 0,
        ranks: int = 1,
        *,
        generation: int = 0,
        dtype: torch.dtype = torch.float32,
        faults: Faults | None = None,
        stages: tuple[int, ...] = (LAYERS,),
        copies: Copies | None = None,
        scheme: str = "",
        address: str = "",
        limits: PullLimits | None = None,
        clock: Callable[[], float] | None = None,
        staging_bytes: int = 64 << 20,
        curve: tuple[str, str] | None = None,
        **settings: Any,
    ) -> KvEndpoint:
        """Rank `rank` of an instance with `ranks` tensor-parallel ranks in each of the stages."""
        if self._unread is None and not (self.folder / "events").exists():
            self._unread = zmq.Context().socket(zmq.PULL)  # an endpoint that stops waits for its events to be read
            self._unread.setsockopt(zmq.RCVHWM, 0)
            self._unread.bind(self.events_address)
        made = KvEndpoint(
            KvSettings(
                (address or f"{scheme or self.scheme}://127.0.0.1:*",) * (rank + 1),
                self.events_address,
                generation or self.generation,
                self.fingerprint,
                KEY,
                controls=(f"ipc://{self.folder}/control-{len(self.endpoints)}",) * (rank + 1),
                curve_public=curve[0] if curve else "",
                curve_secret=curve[1] if curve else "",
                **settings,
            ),
            (RankShape(Shards(stages, KV_HEADS, ranks), DIM, dtype, rank),),
            lambda _, ended: self.results.put(ended),
            staging_bytes,
            faults,
            copies,
            limits or PullLimits(),
            clock or self.clock,
        )
        self.endpoints.append(made)
        return made

    def handle(self, exporters: list[KvEndpoint], tokens: int, name: str = "t", **more: Any) -> KvHandle:
        fields = {
            "transfer_id": name,
            "instance_id": "exporter",
            "generation": self.generation,
            "fingerprint": self.fingerprint,
            "endpoints": tuple(e.address for e in exporters),
            "tokens": tokens,
            "dtype": "float32",
            "codec": Codec.RAW,
        }
        return KvHandle(**(fields | more))

    def load(
        self,
        importer: KvEndpoint,
        handle: KvHandle,
        start: int = 0,
        end: int = 0,
        timeout_s: float = WAIT_S,
        capture: Capture | None = None,
    ) -> Capture:
        end = end or handle.tokens
        capture = capture or Capture(start, end)
        importer.load(Load(f"request-{handle.transfer_id}", handle, start, end, (capture,), timeout_s))
        return capture

    def result(self) -> PullEnded:
        return self.results.get(timeout=PATIENCE_S)

    def refused(self, importer: KvEndpoint, handle: KvHandle, **more: Any) -> str:
        """The error of an import that fails and writes nothing."""
        got = self.load(importer, handle, **more)
        result = self.result()
        assert not result.ok
        assert not got.writes
        return result.error

    def transfer(
        self,
        exporter: KvEndpoint,
        importer: KvEndpoint | None = None,
        name: str = "t",
        tokens: int = 64,
        address: str = "",
    ) -> PullEnded:
        """Stage KV and import it, over that address if it is given: it arrives exactly."""
        kv = model_kv(tokens)
        stage(exporter, kv, name)
        more = {"endpoints": (address,)} if address else {}
        got = self.load(importer or self.endpoint(curve=exporter.settings.curve, encrypted=exporter.settings.encrypted),
                        self.handle([exporter], tokens, name, **more))  # fmt: skip
        result = self.result()
        assert result.ok, result.error
        assert torch.equal(got.kv, kv)
        return result

    def stop(self, endpoint: KvEndpoint) -> None:
        endpoint.stop()
        self.endpoints.remove(endpoint)

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.stop()
        if self._unread is not None:
            self._unread.context.destroy(linger=0)


def prefetch(handle: KvHandle, keep_s: float = 60.0) -> Prefetch:
    """Of all tokens of the handle."""
    return Prefetch(handle, handle.tokens, keep_s)


def stage(
    exporter: KvEndpoint,
    kv: torch.Tensor,
    name: str = "t",
    start: int = 0,
    end: int = 0,
    *,
    each: int = 0,
    layers: slice = slice(None),
    heads: slice = slice(None),
) -> None:
    """Stage tokens [start, end) of a transfer of all of the model's KV, of the exporter's layers and heads: at once, or
    `each` a chunk.
    """
    tokens = kv.shape[2]
    end = end or tokens

    def fill(first: int, until: int, out: torch.Tensor) -> None:
        out.copy_(kv[layers, :, first:until, heads])

    step = each or max(1, end - start)
    for first in range(start, max(end, start + 1), step):
        until = min(end, first + step)
        exporter.stage(name, (first, until), tokens, [Piece(first, until, fill)])
