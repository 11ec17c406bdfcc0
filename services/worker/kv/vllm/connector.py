"""vLLM's KV connector interface (v1) over our scheduler and worker halves.

vLLM prescribes the methods, hence their number. `services.worker.kv` documents configuration and request
parameters.
"""

import logging
import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from services.worker.kv.device import Blocks, Copies, DeviceCopies, TorchDevice
from services.worker.kv.errors import KvFault, lossy_salt
from services.worker.kv.host_memory import PinnedMemory
from services.worker.kv.layout import CpuLayout, KvLayout, LayoutError, StridedLayout, slots_of, strided_layout
from services.worker.kv.shards import Shards
from services.worker.kv.staging import LEASE_RENEWALS
from services.worker.kv.vllm.layers import check_specs, in_order, shards_of, without_draft
from services.worker.kv.wire.endpoint import UNDER_WAY_BYTES, EndpointSettings, Faults, KvEndpoint, host_copies
from services.worker.kv.wire.importing import DTYPES, ImportShape, Load, PullLimits, PullResult
from services.worker.kv.wire.nixl_agent import NIXL_SCHEME
from services.worker.kv.wire.server import ExportIdentity, ExportShape
from shared.domain.kv import Codec, KvHandle, default_staging

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from services.worker.kv.device_codec import DeviceCodec, Upload

# MERGED metadata.py
# What the connector's scheduler half tells its worker halves each step, and the settings both read.
#
# vLLM carries the metadata to its own worker processes in its own way; it is never on a socket of ours.


class ExportParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stage the prompt's KV under that id, on a device coded by `codec` already, where that is known to be lossy."""

    transfer_id: str
    codec: Codec = Codec.RAW


class TransferParams(msgspec.Struct, frozen=True, rename={"import_": "import"}, forbid_unknown_fields=True):
    """`kv_transfer_params` of a request. `deadline_s` is relative: seconds that the import may take."""

    export: ExportParams | None = None
    import_: KvHandle | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class ExportChunk:
    """After this step's forward, tokens [start, end) of a transfer of `total` lie in `blocks`, which cover the
    sequence from 0.
    """

    transfer_id: str
    start: int
    end: int
    total: int
    blocks: list[int]
    codec: Codec = Codec.RAW


@dataclass(frozen=True, slots=True)
class ImportStart:
    """Tokens [start, end) of the handle go into `blocks`, which cover the sequence from token 0."""

    request_id: str
    handle: KvHandle
    start: int
    end: int
    blocks: list[int]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ImportSkip:
    """Nothing is pulled: all is cached (`error` empty), or the handle cannot be used."""

    handle: KvHandle
    error: str


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """One step. `idle` when the engine computes nothing in it."""

    exports: list[ExportChunk] = field(default_factory=list)
    imports: list[ImportStart] = field(default_factory=list)
    skips: list[ImportSkip] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)  # transfer ids of imports
    drops: list[str] = field(default_factory=list)  # transfer ids of exports
    idle: bool = False


class ConnectorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config`; `services.worker.kv` documents each key."""

    endpoints: tuple[str, ...]
    events: str
    control_key: str
    instance_id: str
    generation: int
    fingerprint: str
    staging_bytes: int | None = None
    lease_s: float = 60.0
    lease_renewals: int = LEASE_RENEWALS
    pull_timeout_s: float = 10.0
    connect_timeout_s: float = 2.0
    inbox_bytes: int = 64 << 20
    controls: tuple[str, ...] = ()
    connections: int = 1
    lossy: bool = False
    curve_public: str = ""
    curve_secret: str = ""
    encrypted: bool = True
    nixl_trusted: bool = False
    fault: str = ""

    @property
    def nixl(self) -> bool:
        """Whether this instance uses NIXL, with those that do, too."""
        return any(each.startswith(f"{NIXL_SCHEME}://") for each in self.endpoints)


def read_settings(extra: dict[str, Any]) -> ConnectorSettings:
    """The settings in an extra config. Raises msgspec.ValidationError naming what is wrong or unknown."""
    return msgspec.convert(extra, ConnectorSettings)


# MERGED scheduler_half.py
# The connector's half in the scheduler: decides, with blocks in hand, what each step exports and imports.


_log = logging.getLogger(__name__)
_STAGED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass(slots=True)
class _Export:
    params: ExportParams
    prompt_tokens: int
    staged_tokens: int = 0


@dataclass(slots=True)
class _Import:
    handle: KvHandle
    timeout_s: float
    error: str  # why it is not even tried, or empty
    decided: bool = False  # at most one remote try: what follows a failure or a preemption is computed here
    pulling: bool = False
    wanted_tokens: int = 0


class SchedulerHalf:
    """State of the requests that export or import, by the engine's request id."""

    def __init__(self, settings: ConnectorSettings, batches: int) -> None:
        """`batches`: how many the engine has under way at once."""
        self._settings = settings
        self._batches = batches
        self._empty_steps = 0  # in a row
        self._exports: dict[str, _Export] = {}
        self._imports: dict[str, _Import] = {}
        self._next = StepMetadata()

    def add(self, request: Request) -> None:
        """A request arrives. Parameters that cannot be understood are as good as none: the engine computes
        all.
        """
        if not request.kv_transfer_params:
            return
        try:
            params = msgspec.convert(request.kv_transfer_params, TransferParams)
        except msgspec.ValidationError as error:
            _log.error("request %s has bad kv_transfer_params: %s", request.request_id, error)
            return
        if params.export is not None:
            self._exports[request.request_id] = _Export(params.export, request.num_prompt_tokens)
        if params.import_ is not None:
            timeout_s = params.deadline_s if params.deadline_s is not None else math.inf
            objection = self._objection(request, params.import_)
            self._imports[request.request_id] = _Import(params.import_, timeout_s, objection)

    def _objection(self, request: Request, handle: KvHandle) -> str:
        if handle.fingerprint != self._settings.fingerprint:
            return KvFault.FINGERPRINT.value
        if handle.codec.lossy and request.cache_salt != lossy_salt(handle.transfer_id):
            return KvFault.UNSALTED.value
        return "" if handle.endpoints and handle.tokens > 0 else KvFault.INVALID.value

    def external_tokens(self, request: Request, computed_tokens: int) -> int:
        """Tokens that an import can add to `computed_tokens`. Free of side effects that matter: may be called
        often.
        """
        wanted = self._imports.get(request.request_id)
        if wanted is None or wanted.decided or wanted.error:
            return 0
        wanted.wanted_tokens = max(0, self._end(request, wanted) - computed_tokens)
        return wanted.wanted_tokens

    def _end(self, request: Request, wanted: _Import) -> int:
        return min(wanted.handle.tokens, int(request.num_prompt_tokens))

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Blocks are there; `external_tokens` of them wait for an import."""
        wanted = self._imports.get(request.request_id)
        if wanted is None or wanted.decided:
            return
        wanted.decided = True
        if external_tokens == 0:
            error = wanted.error or (KvFault.SKIPPED.value if wanted.wanted_tokens else "")
            self._next.skips.append(ImportSkip(wanted.handle, error))
            return
        wanted.pulling = True
        end = self._end(request, wanted)
        self._next.imports.append(
            ImportStart(
                request.request_id,
                wanted.handle,
                end - external_tokens,
                end,
                list(blocks.get_block_ids()[0]),
                wanted.timeout_s,
            )
        )

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """What the workers do in this step."""
        step, self._next = self._next, StepMetadata()
        self._empty_steps = 0 if output.total_num_scheduled_tokens else self._empty_steps + 1
        step.idle = self._empty_steps >= self._batches  # before, ranks may wait for each other in an earlier step
        if self._exports:
            starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            cached = output.scheduled_cached_reqs
            starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            for request_id, tokens in output.num_scheduled_tokens.items():
                chunk = self._chunk(request_id, starts[request_id] + tokens, output)
                if chunk is not None:
                    step.exports.append(chunk)
        return step

    def _chunk(self, request_id: str, computed_tokens: int, output: SchedulerOutput) -> ExportChunk | None:
        """What is new to the transfer once this step has computed up to `computed_tokens`.

        A preempted request starts again below what is staged already. That stays right, since the same tokens
        have the same KV, so only the rest is staged, from the blocks that the request has by then.
        """
        export = self._exports.get(request_id)
        end = min(computed_tokens, export.prompt_tokens) if export else 0
        if export is None or end <= export.staged_tokens:
            return None
        state = output.kv_connector_block_state
        assert state is not None, "vLLM resolves the blocks of every scheduled request"
        blocks = list(state.resolve_block_ids(request_id)[0])
        start, export.staged_tokens = export.staged_tokens, end
        params = export.params
        return ExportChunk(params.transfer_id, start, end, export.prompt_tokens, blocks, params.codec)

    def received(self, request_ids: set[str]) -> None:
        """Imports of these have ended on all ranks."""
        for request_id in request_ids:
            if request_id in self._imports:
                self._imports[request_id].pulling = False

    def finished(self, request: Request) -> None:
        """A request ends. Its import stops; what it exported stays only if it ended well."""
        wanted = self._imports.pop(request.request_id, None)
        if wanted is not None and wanted.pulling:
            self._next.cancels.append(wanted.handle.transfer_id)
        elif wanted is not None and not wanted.decided:
            self._next.skips.append(ImportSkip(wanted.handle, KvFault.CANCELLED.value))
        export = self._exports.pop(request.request_id, None)
        if export is not None and request.status not in _STAGED:
            self._next.drops.append(export.params.transfer_id)


# MERGED worker_half.py
# The connector's half at each rank: copies KV between the engine's blocks and the KV endpoint.

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


class PolyphaseConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is untyped here
    """Exports KV to host staging chunk by chunk, and imports it asynchronously; holds no blocks for a
    transfer.

    vLLM makes one with role SCHEDULER and one with role WORKER a rank.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        """Raises msgspec.ValidationError for bad settings, ValueError for an engine that cannot be served."""
        super().__init__(vllm_config, role, kv_cache_config)
        settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        parallel = vllm_config.parallel_config
        ranks = parallel.pipeline_parallel_size * parallel.tensor_parallel_size
        if len(settings.endpoints) != ranks:
            raise ValueError(f"endpoints: one a rank, which are {ranks}")
        if settings.controls and len(settings.controls) != ranks:
            raise ValueError(f"controls: one a rank, which are {ranks}, or none")
        if parallel.decode_context_parallel_size != 1 or parallel.prefill_context_parallel_size != 1:
            raise ValueError("KV transfer does not support context parallelism: a rank has to hold all tokens")
        if len(kv_cache_config.kv_cache_groups) > 1:
            raise ValueError("KV transfer supports models with one KV cache group only")
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            raise ValueError('kv_load_failure_policy must be "recompute"')
        self.scheduler = (
            SchedulerHalf(settings, vllm_config.max_concurrent_batches) if role is KVConnectorRole.SCHEDULER else None
        )
        self.worker = WorkerHalf(vllm_config, settings, kv_cache_config) if role is KVConnectorRole.WORKER else None

    @property
    def requires_kv_delivery(self) -> bool:
        """False: KV is copied before its blocks can be freed, so a preemption loses none."""
        return False

    # The scheduler's side.

    def on_new_request(self, request: "Request") -> None:
        """See KVConnectorBase_V1."""
        self._scheduler.add(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        """See KVConnectorBase_V1."""
        tokens = self._scheduler.external_tokens(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """See KVConnectorBase_V1."""
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """See KVConnectorBase_V1."""
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """See KVConnectorBase_V1."""
        self._scheduler.received(set(connector_output.finished_recving or ()))

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See KVConnectorBase_V1. Never holds the blocks."""
        self._scheduler.finished(request)
        return False, None

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See KVConnectorBase_V1."""
        self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """See KVConnectorBase_V1."""
        self._worker.begin(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are asynchronous, and a request runs only when its own has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Nothing: all layers are saved after the forward."""

    def wait_for_save(self) -> None:
        """See KVConnectorBase_V1."""
        self._worker.save(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See KVConnectorBase_V1."""
        received, failed = self._worker.results()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def shutdown(self) -> None:
        """See KVConnectorBase_V1."""
        if self.worker is not None:
            self.worker.stop()

    @property
    def _scheduler(self) -> SchedulerHalf:
        assert self.scheduler is not None, "a call for the scheduler's half"
        return self.scheduler

    @property
    def _worker(self) -> WorkerHalf:
        assert self.worker is not None, "a call for the worker's half"
        return self.worker

    @property
    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata
