"""The connector's half at each rank: copies KV between the engine's blocks and the KV endpoint."""

import logging
import threading
from typing import TYPE_CHECKING

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from services.worker.kv.blocks import Blocks
from services.worker.kv.device import Copies, DeviceCopies
from services.worker.kv.host_memory import PinnedMemory
from services.worker.kv.layout import CpuLayout, KvLayout, LayoutError, StridedLayout, slots_of, strided_layout
from services.worker.kv.shards import Shards
from services.worker.kv.torch_device import TorchDevice
from services.worker.kv.vllm.layers import check_specs, in_order, shards_of, without_draft
from services.worker.kv.vllm.metadata import ConnectorSettings, ExportChunk, ImportStart, StepMetadata
from services.worker.kv.wire.endpoint import UNDER_WAY_BYTES, EndpointSettings, Faults, KvEndpoint, host_copies
from services.worker.kv.wire.importing import DTYPES, ImportShape, Load, PullLimits, PullResult
from services.worker.kv.wire.server import ExportIdentity
from services.worker.kv.wire.serving import ExportShape
from shared.domain.kv import default_staging

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from services.worker.kv.device_codec import DeviceCodec, Upload

_log = logging.getLogger(__name__)
_IDLE_WAIT_S = 0.001
_SCRATCH_BYTES = 256 << 20  # of a device's memory, for what is on its way to the host


def codec_on_device(
    caches: list[torch.Tensor], layout: KvLayout, export: ExportShape, upload: "Upload", *, lossy: bool
) -> "DeviceCodec | None":
    """Triton's kernels for caches on a device. None where they lie in host memory, and, with a warning that names the
    reason, where the kernels cannot be had: torch's kernels move KV then, and the CPU codes it.
    """
    if caches[0].device.type == "cpu" or not isinstance(layout, StridedLayout):
        return None
    try:
        from services.worker.kv.device_codec import KERNEL_FAULTS, DeviceCodec, warn_of_fallback
    except ImportError as error:
        _log.warning("KV is moved without Triton kernels, and coded on the CPU: %s", error)
        return None
    try:
        made = DeviceCodec(caches, layout, export, upload)
        made.prepare(lossy=lossy)
    except (ValueError, *KERNEL_FAULTS) as error:
        warn_of_fallback(error)
        return None
    return made


class WorkerHalf:
    """One rank: the layers of its pipeline stage, the heads of its tensor-parallel rank. All methods run on the
    engine's thread; imports end on the puller's.
    """

    def __init__(self, config: VllmConfig, settings: ConnectorSettings, cache: "KVCacheConfig") -> None:
        self.faults = Faults(corrupt=settings.fault == "corrupt")
        self.zero_imports = settings.fault == "zero"
        self.endpoint: KvEndpoint | None = None
        self._config = config
        self._cache_config = cache
        self._settings = settings
        self._caches: list[torch.Tensor] = []
        self._layout: KvLayout | None = None
        self._made_copies: Copies | None = None
        self._codec: DeviceCodec | None = None  # where the caches are a device's that Triton compiles for
        self._layer_start = self._head_start = 0
        self._waiting = 0
        self._lock = threading.Lock()
        self._progress = threading.Event()
        self._received: set[str] = set()
        self._failed: set[str] = set()

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """The engine's KV caches exist: find out their layout and open the endpoint. Raises LayoutError or
        OSError.
        """
        caches = without_draft(self._config, caches)
        check_specs(self._config, self._cache_config, caches)
        self._caches = in_order(caches)
        first = self._caches[0]
        if any(each.shape != first.shape or each.dtype != first.dtype for each in self._caches):
            raise LayoutError("layers have KV caches of different shapes")
        if first.dtype not in DTYPES.values():
            known = ", ".join(DTYPES)
            raise LayoutError(f"KV is stored in {first.dtype}; it can be transferred in {known}: see `dtype`")
        head_dim, block_size = self._config.model_config.get_head_size(), self._config.cache_config.block_size
        self._layout = self._find_layout(first, head_dim, block_size)
        rank = get_pp_group().rank_in_group * get_tp_group().world_size + get_tp_group().rank_in_group
        shards = shards_of(self._config, rank, caches)
        self._check_share(rank, shards, self._layout.kv_heads)
        export = ExportShape(shards, head_dim, first.dtype, rank)
        staging_bytes = self._staging_bytes(export)
        self._made_copies = self._make_copies(export, staging_bytes)
        lossy = self._settings.lossy
        self._codec = codec_on_device(self._caches, self._layout, export, self._copies.upload, lossy=lossy)
        self.endpoint = KvEndpoint(
            self._endpoint_settings(rank, staging_bytes),
            export,
            ImportShape(shards, head_dim, rank),
            self._ended,
            self.faults,
            self._copies,
        )

    def _check_share(self, rank: int, shards: Shards, kv_heads: int) -> None:
        self._layer_start = shards.layers_of(rank)[0]
        self._head_start, end = shards.heads_of(rank)
        if end - self._head_start != kv_heads:
            raise LayoutError(f"rank {rank} holds {kv_heads} KV heads, not {end - self._head_start}")

    def _find_layout(self, cache: torch.Tensor, head_dim: int, block_size: int) -> KvLayout:
        if cache.device.type != "cpu":
            return self._strided(cache, head_dim, block_size)
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        dtype = self._config.cache_config.cache_dtype
        isa = _get_attn_isa(cache.dtype, block_size, head_dim, dtype)
        if isa == "amx":
            # Linux grants AMX on request only, and vLLM 0.32 asks too late: its attention dies of SIGILL
            # (seen).
            torch.cpu._init_amx()

        def write(
            k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
        ) -> None:
            ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, isa, 1.0, 1.0, dtype)

        layout = CpuLayout(write, cache, head_dim, block_size)
        _log.info("KV layout (%s): %s", isa, layout.describe())
        return layout

    def _strided(self, cache: torch.Tensor, head_dim: int, block_size: int) -> StridedLayout:
        layout = strided_layout(cache, head_dim, block_size)
        keys, _ = layout.views(cache)
        blocks, held = self._cache_config.num_blocks, keys.shape[0] * keys.shape[1]
        if held != blocks * block_size:  # slots would be counted otherwise than vLLM's scheduler counts blocks
            raise LayoutError(f"the KV cache has {held} tokens, and vLLM counts {blocks} blocks of {block_size}")
        return layout

    def _make_copies(self, export: ExportShape, staging_bytes: int) -> Copies:
        cache, segment = self._caches[0], export.segment_tokens()
        if cache.device.type == "cpu":
            return host_copies(export, staging_bytes, fixed=self._settings.nixl)
        memory = PinnedMemory(export.chunk_shape, export.dtype, segment, staging_bytes + UNDER_WAY_BYTES)
        step = self._config.scheduler_config.max_num_batched_tokens
        scratch = max(2, min(-(-step // segment), _SCRATCH_BYTES // export.chunk_bytes(segment)))
        values = export.chunk_bytes(segment) // export.dtype.itemsize
        return DeviceCopies(TorchDevice(cache), memory, values, scratch)

    def _staging_bytes(self, export: ExportShape) -> int:
        cached = sum(cache.nbytes for cache in self._caches)
        longest = export.chunk_bytes(self._config.model_config.max_model_len)
        return self._settings.staging_bytes or default_staging(cached, longest)

    def _endpoint_settings(self, rank: int, staging_bytes: int) -> EndpointSettings:
        s = self._settings
        return EndpointSettings(
            address=s.endpoints[rank],
            events=s.events,
            identity=ExportIdentity(s.generation, s.fingerprint, s.control_key),
            staging_bytes=staging_bytes,
            lease_s=s.lease_s,
            lease_renewals=s.lease_renewals,
            limits=PullLimits(s.connect_timeout_s, s.pull_timeout_s, s.inbox_bytes, connections=s.connections),
            lossy=s.lossy,
            curve=(s.curve_public, s.curve_secret) if s.curve_public else None,
            encrypted=s.encrypted,
            control=s.controls[rank] if s.controls else "",
            nixl_trusted=s.nixl_trusted,
        )

    def begin(self, step: StepMetadata) -> None:
        """Start and end imports; while the engine has nothing but imports to wait for, wait a moment for one."""
        endpoint = self._endpoint
        for start in step.imports:
            self._waiting += 1
            endpoint.load(self._load(start))
        for transfer_id in step.cancels:
            endpoint.cancel(transfer_id)
        for skip in step.skips:
            endpoint.skip(skip.handle, skip.error)
        for transfer_id in step.drops:
            endpoint.release(transfer_id)
        if step.idle and self._waiting:
            # The engine steps as fast as it can while a request waits for KV; without this it takes a whole
            # core.
            self._progress.wait(_IDLE_WAIT_S)

    def _load(self, start: ImportStart) -> Load:
        layout, copies = self._layout, self._copies
        assert layout is not None
        slots = slots_of(torch.tensor(start.blocks), layout.block_size, start.start, start.end)
        destination = Blocks(
            self._caches,
            layout,
            slots,
            start.start,
            self._layer_start,
            self._head_start,
            copies,
            copies.freed(),
            self.zero_imports,
            self._codec,
            null_slots=layout.block_size,  # vLLM's null block is number 0
        )
        return Load(start.request_id, start.handle, start.start, start.end, destination, start.timeout_s)

    def save(self, step: StepMetadata) -> None:
        """Begin to copy what this step has computed into staging; the blocks may be freed at once: what the model is
        given next comes after their gather.
        """
        for chunk in step.exports:
            self._stage(chunk)

    def _stage(self, chunk: ExportChunk) -> None:
        layout, copies, codec = self._layout, self._copies, self._codec
        assert layout is not None
        blocks = torch.tensor(chunk.blocks)

        def slots(start: int, end: int) -> torch.Tensor:
            return slots_of(blocks, layout.block_size, start, end)

        def fill(start: int, end: int, kv: torch.Tensor) -> None:
            if codec is not None and codec.gather(slots(start, end), kv):
                return
            here = copies.upload(blocks)
            for layer, cache in enumerate(self._caches):
                layout.gather(cache, here, start, end, kv[layer])

        known = codec is not None and chunk.codec.lossy
        coding = codec.coding(chunk.codec, chunk.end - chunk.start, slots) if codec is not None and known else None
        self._endpoint.stage(chunk.transfer_id, chunk.start, chunk.end, chunk.total, fill, coding)

    def results(self) -> tuple[set[str], set[str]]:
        """Requests whose import has ended since the last call, and those of them for which it failed. Their blocks
        are the model's from the next step on.
        """
        with self._lock:
            received, failed = self._received, self._failed
            self._received, self._failed = set(), set()
            self._progress.clear()
        self._copies.join()
        self._waiting -= len(received)
        return received, failed

    def stop(self) -> None:
        """Close the endpoint."""
        if self.endpoint is not None:
            self.endpoint.stop()
            self.endpoint = None

    @property
    def _copies(self) -> Copies:
        assert self._made_copies is not None, "the engine registers its KV caches first"
        return self._made_copies

    @property
    def _endpoint(self) -> KvEndpoint:
        assert self.endpoint is not None, "the engine registers its KV caches first"
        return self.endpoint

    def _ended(self, result: PullResult) -> None:
        with self._lock:
            self._received.add(result.request_id)  # a failed one too, or the engine would wait for ever
            if not result.ok:
                self._failed.add(result.request_id)
            self._progress.set()
        if not result.ok:
            _log.warning("import of %s failed: %s", result.transfer_id, result.error)
