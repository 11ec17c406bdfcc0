"""Real endpoints on loopback, with KV that tells where it came from: exporters, importers, and what arrived."""

import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import zmq

from services.worker.kv.device import Copies
from services.worker.kv.rank_links import KvEvents, Prefetch
from services.worker.kv.shards import Shards
from services.worker.kv.wire.endpoint import EndpointSettings, Faults, KvEndpoint
from services.worker.kv.wire.importing import ImportShape, Load, PullLimits, PullResult
from services.worker.kv.wire.server import ExportIdentity, ExportShape
from shared.domain.kv import Codec, KvHandle

LAYERS, KV_HEADS, DIM = 3, 4, 8
KEY = "key"
WAIT_S = 20.0


def model_kv(tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """KV of the whole model: [layers, 2, tokens, heads, dim]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYERS, 2, tokens, KV_HEADS, DIM, generator=generator).to(dtype)


class Capture:
    """A destination that keeps what is written, and can hold the puller up."""

    def __init__(self, start: int, end: int, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.start = start
        self.kv = torch.full((LAYERS, 2, end - start, KV_HEADS, DIM), float("nan"), dtype=dtype)
        self.writes: list[tuple[int, int]] = []  # layer, first token
        self.before: Callable[[], object] = lambda: None
        self.finished = False

    def write(self, layer: int, token_start: int, head_start: int, kv: torch.Tensor) -> None:
        self.before()
        self.writes.append((layer, token_start))
        first = token_start - self.start
        self.kv[layer, :, first : first + kv.shape[1], head_start : head_start + kv.shape[2]] = kv

    def take(self, *_: object) -> bool:
        return False

    def room(self, layer: int, tokens: tuple[int, int], heads: tuple[int, int]) -> list[memoryview]:
        return []

    def finish(self) -> None:
        self.finished = True


@dataclass
class Rig:
    """Endpoints of one test; `close` ends them all."""

    folder: Path
    scheme: str = "kv"  # transport of what endpoints export
    generation: int = 7
    fingerprint: str = "model"
    endpoints: list[KvEndpoint] = field(default_factory=list)
    results: "queue.Queue[PullResult]" = field(default_factory=queue.Queue)
    _unread: "zmq.Socket[bytes] | None" = None

    @property
    def events_address(self) -> str:
        """Where endpoints tell of what happens."""
        return f"ipc://{self.folder}/events"

    def events(self) -> KvEvents:
        """What endpoints tell; to be entered before there is one."""
        assert self._unread is None, "they tell already, and nobody reads it"
        return KvEvents(self.events_address)

    def endpoint(
        self,
        rank: int = 0,
        ranks: int = 1,
        *,
        address: str = "",
        generation: int = 0,
        dtype: torch.dtype = torch.float32,
        limits: PullLimits | None = None,
        faults: Faults | None = None,
        staging_bytes: int = 64 << 20,
        lease_s: float = 60.0,
        lease_renewals: int = 120,
        curve: tuple[str, str] | None = None,
        encrypted: bool = True,
        stages: tuple[int, ...] = (LAYERS,),
        copies: Copies | None = None,
        lossy: bool = False,
        scheme: str = "",
        nixl_trusted: bool = False,
    ) -> KvEndpoint:
        """Rank `rank` of an instance with `ranks` tensor-parallel ranks in each of the stages."""
        shards = Shards(stages, KV_HEADS, ranks)
        self._take_events()
        made = KvEndpoint(
            EndpointSettings(
                address or f"{scheme or self.scheme}://127.0.0.1:*",
                self.events_address,
                ExportIdentity(generation or self.generation, self.fingerprint),
                staging_bytes=staging_bytes,
                lease_s=lease_s,
                lease_renewals=lease_renewals,
                limits=limits or PullLimits(),
                curve=curve,
                encrypted=encrypted,
                control=f"ipc://{self.folder}/control-{len(self.endpoints)}",
                control_key=KEY,
                lossy=lossy,
                nixl_trusted=nixl_trusted,
            ),
            ExportShape(shards, DIM, dtype, rank),
            ImportShape(shards, DIM, rank),
            self.results.put,
            faults,
            copies,
        )
        self.endpoints.append(made)
        return made

    def handle(self, exporters: list[KvEndpoint], tokens: int, name: str = "t", **more: object) -> KvHandle:
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
        return KvHandle(**(fields | more))  # type: ignore[arg-type]

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
        importer.load(Load(f"request-{handle.transfer_id}", handle, start, end, capture, timeout_s))
        return capture

    def result(self) -> PullResult:
        return self.results.get(timeout=WAIT_S)

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.stop()
        if self._unread is not None:
            self._unread.context.destroy(linger=0)

    def _take_events(self) -> None:
        """An endpoint that stops waits for its events to be taken; nobody may be there to do so."""
        if self._unread is None and not (self.folder / "events").exists():
            self._unread = zmq.Context().socket(zmq.PULL)
            self._unread.setsockopt(zmq.RCVHWM, 0)
            self._unread.bind(self.events_address)


def control_of(endpoint: KvEndpoint) -> str:
    """Where the worker's control reaches it over a socket."""
    return endpoint._settings.control


def prefetch(handle: KvHandle, keep_s: float) -> Prefetch:
    """Of all tokens of the handle."""
    return Prefetch(handle, handle.tokens, keep_s)


def stage(
    exporter: KvEndpoint,
    kv: torch.Tensor,
    name: str = "t",
    start: int = 0,
    end: int = 0,
    *,
    layers: slice = slice(None),
    heads: slice = slice(None),
) -> None:
    """Stage tokens [start, end) of a transfer of all of the model's KV, of the exporter's layers and heads."""

    def fill(first: int, until: int, out: torch.Tensor) -> None:
        out.copy_(kv[layers, :, first:until, heads])

    exporter.stage(name, start, end or kv.shape[2], kv.shape[2], fill)
