"""Polyphase's KV connector for vLLM (interface v1).

It exports KV to host staging chunk by chunk, imports KV asynchronously, and holds no blocks for a transfer.

`PolyphaseConnectorScheduler` decides what each step exports and imports, `PolyphaseConnectorMetadata` carries those
decisions to the ranks, and `PolyphaseConnectorWorker` copies KV between the engine's blocks and the KV endpoint. vLLM
loads `PolyphaseConnector` by the name of this module, once with role SCHEDULER and once with role WORKER in each rank.
"""

import logging
import math
import threading
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec
from vllm.v1.request import Request, RequestStatus

from services.worker.kv import KvFault, may_import
from services.worker.kv.device import Blocks, Copies, DeviceCopies, TorchDevice
from services.worker.kv.disk_store import DiskError, DiskReport, DiskStore, rank_file
from services.worker.kv.layout import (
    CpuLayout,
    KvLayout,
    LayoutError,
    StateLayout,
    StridedLayout,
    row_layout,
    slots_of,
    strided_layout,
)
from services.worker.kv.rank_messages import PullEnded
from services.worker.kv.shards import RankShape, held_bytes
from services.worker.kv.staging import Piece, PinnedMemory
from services.worker.kv.vllm.host_store import HostCopies, HostStore
from services.worker.kv.vllm.layers import LayerPart, RankComponent, components_of
from services.worker.kv.wire.endpoint import UNDER_WAY_BYTES, Faults, KvEndpoint, KvSettings, host_copies, rows_of
from services.worker.kv.wire.importing import Load, dtype_name
from shared.domain.adapters import digest_of_key
from shared.domain.instance import KvComponent, KvKind
from shared.domain.kv import Codec, KvHandle, default_staging

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

    from services.worker.kv.device_codec import DeviceCodec, Upload
    from services.worker.kv.vllm.host_tier import HostTier

_log = logging.getLogger(__name__)
_STAGED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
_IDLE_WAIT_S = 0.001
_SCRATCH_BYTES = 256 << 20  # of a device's memory, for KV on its way to the host
_MIN_SCRATCH_SEGMENTS = 2  # one is filled while the other is copied to the host


class ExportParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stage the prompt's KV under that id; on a device, coded by `codec` already where it is lossy. `adapter`: of the
    handle. KV of another adapter is not staged.
    """

    transfer_id: str
    codec: Codec = Codec.RAW
    adapter: str = ""


class TransferParams(msgspec.Struct, frozen=True, rename={"import_": "import"}, forbid_unknown_fields=True):
    """`kv_transfer_params` of a request, which may export, import, or both.

    The request begins with the tokens of an imported handle: with its prompt, and the answer so far of one that
    resumes. The tokens before `handle.start` have to be in the prefix cache. A failed import is recomputed by the
    engine and is not an error of the request. Lossy KV, and KV of another precision, need a `cache_salt` that keeps
    them apart (`services.worker.kv.may_import`): without it the prefix cache would serve them to exact requests, so
    the import is refused and recomputed.
    """

    export: ExportParams | None = None
    import_: KvHandle | None = None
    deadline_s: float | None = None  # seconds that the import may take from its blocks on; None: only progress counts


@dataclass(frozen=True, slots=True)
class ExportChunk:
    """After this step's forward pass, tokens [start, end) of a transfer of tokens [first, total) lie in `blocks`, which
    cover the sequence from token 0, for each of vLLM's KV cache groups.
    """

    transfer_id: str
    start: int
    end: int
    total: int
    blocks: list[list[int]]
    codec: Codec = Codec.RAW
    first: int = 0


@dataclass(frozen=True, slots=True)
class ImportStart:
    """Tokens [start, end) of the sequence, of the handle's, go into `blocks`, which cover it from token 0, for each
    group.
    """

    request_id: str
    handle: KvHandle
    start: int
    end: int
    blocks: list[list[int]]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ImportSkip:
    """Nothing is pulled: all is cached (`error` empty), or the handle cannot be used."""

    handle: KvHandle
    error: str


@dataclass
class PolyphaseConnectorMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """One step. `idle`: the engine computes nothing in it."""

    exports: list[ExportChunk] = field(default_factory=list)
    imports: list[ImportStart] = field(default_factory=list)
    skips: list[ImportSkip] = field(default_factory=list)
    cancelled_imports: list[str] = field(default_factory=list)  # transfer ids
    dropped_exports: list[str] = field(default_factory=list)  # transfer ids
    host: HostCopies = field(default_factory=HostCopies)
    idle: bool = False


class PolyphaseConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is untyped here
    """Delegates to the scheduler or the worker, of which it has the one of its role; vLLM prescribes the methods."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        """Raises msgspec.ValidationError for bad settings, ValueError for an engine that cannot be served."""
        super().__init__(vllm_config, role, kv_cache_config)
        settings = msgspec.convert(self._kv_transfer_config.kv_connector_extra_config, KvSettings)
        parallel = vllm_config.parallel_config
        ranks = parallel.pipeline_parallel_size * parallel.tensor_parallel_size
        if len(settings.endpoints) != ranks:
            raise ValueError(f"endpoints must be one for each of the {ranks} ranks, got {len(settings.endpoints)}")
        if settings.controls and len(settings.controls) != ranks:
            raise ValueError(f"controls must be one for each of the {ranks} ranks, got {len(settings.controls)}")
        if parallel.decode_context_parallel_size != 1 or parallel.prefill_context_parallel_size != 1:
            raise ValueError("KV transfer does not support context parallelism: a rank has to hold all tokens")
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            raise ValueError('kv_load_failure_policy must be "recompute"')
        if role is KVConnectorRole.SCHEDULER:
            tail = Tail.of(kv_cache_config)
            self.scheduler = PolyphaseConnectorScheduler(settings, vllm_config.max_concurrent_batches, tail)
        else:
            self.worker = PolyphaseConnectorWorker(vllm_config, settings, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: KV is copied before its blocks can be freed, so that a preemption does not lose it."""
        return False

    def on_new_request(self, request: Request) -> None:
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """The groups whose blocks vLLM need not zero: none. An import does not fill the last block, and a kernel may
        multiply what an earlier state has left there by zero, which is not zero for all bytes.
        """
        return ()

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self.scheduler.imports_ended(set(connector_output.finished_recving or ()))
        if isinstance(report := connector_output.kv_connector_worker_meta, DiskReport):
            self.scheduler.disk_ended(report)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The blocks may be freed at once: they are not held for a transfer."""
        self.scheduler.request_finished(request)
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """vLLM calls it before anything is written to blocks that the step has given away."""
        assert isinstance(kv_connector_metadata, PolyphaseConnectorMetadata)
        self.worker.save_to_host(kv_connector_metadata.host)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Before the forward pass of a step that has requests with blocks of the host tier; otherwise after it."""
        self.worker.start_load_kv(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous, and a request runs only when its own has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """All layers are saved after the forward pass."""

    def wait_for_save(self) -> None:
        self.worker.save_kv(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, failed = self.worker.get_finished()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def build_connector_worker_meta(self) -> DiskReport | None:
        return self.worker.disk_report()

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self.worker.shutdown()

    @property
    def _step(self) -> PolyphaseConnectorMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PolyphaseConnectorMetadata)
        return metadata


class Tail(Enum):
    """How vLLM treats the last token of a request of which all are imported: it has that token computed again."""

    ANY = auto()  # from the KV of all tokens before it
    WINDOW = auto()  # from a window, which has to be that of this token: one token less is imported
    STATE = auto()  # from a state, which would then have that token twice: such a prompt is not imported

    @classmethod
    def of(cls, cache: "KVCacheConfig") -> "Tail":
        specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
        if cache.has_mamba_layers or any(isinstance(spec, MambaSpec) for spec in specs):
            return cls.STATE
        inner = [each for spec in specs for each in getattr(spec, "kv_cache_specs", {"": spec}).values()]
        return cls.WINDOW if any(isinstance(spec, SlidingWindowSpec) for spec in inner) else cls.ANY


@dataclass(slots=True)
class _Export:
    params: ExportParams
    prompt_tokens: int
    staged_tokens: int = 0


class _ImportState(Enum):
    """An import is tried once. After a failure or a preemption the engine computes the missing KV itself.

    The engine's allocation of blocks for the request turns WAITING into PULLING, or into ENDED where nothing is to be
    pulled, and REFUSED into ENDED. The end of the pull on all ranks turns PULLING into ENDED. The record of a request
    that is cancelled is dropped in any state.
    """

    WAITING = auto()  # usable; the engine has no blocks for it yet
    REFUSED = auto()  # `_Import.error` says why; to be reported when the engine allocates blocks
    PULLING = auto()
    ENDED = auto()  # pulled, failed, or skipped


@dataclass(slots=True)
class _Import:
    handle: KvHandle
    timeout_s: float
    state: _ImportState
    error: str  # a KvFault of a refused import, otherwise empty
    wanted_tokens: int = 0  # as of the last get_num_new_matched_tokens
    gap: bool = False  # as of then: the engine has not the tokens before the handle's

    @property
    def undecided(self) -> bool:
        """The engine has not allocated blocks for the request."""
        return self.state in (_ImportState.WAITING, _ImportState.REFUSED)


class PolyphaseConnectorScheduler:
    """The part in vLLM's scheduler: requests that export or import, by the engine's request id."""

    def __init__(self, settings: KvSettings, batches: int, tail: Tail) -> None:
        """`batches`: how many the engine has under way at once."""
        self._settings = settings
        self._tail = tail
        self._batches = batches
        self._empty_steps = 0  # in a row
        self._exports: dict[str, _Export] = {}
        self._imports: dict[str, _Import] = {}
        self._next = PolyphaseConnectorMetadata()
        self.tier: HostTier | None = None  # once the engine has started, where it has one

    def on_new_request(self, request: Request) -> None:
        """Parameters that cannot be understood are logged and ignored: the engine then computes the whole prompt."""
        if not request.kv_transfer_params:
            return
        try:
            params = msgspec.convert(request.kv_transfer_params, TransferParams)
        except msgspec.ValidationError as error:
            _log.error("request %s has bad kv_transfer_params: %s", request.request_id, error)
            return
        if params.export is not None and params.export.adapter != self._adapter(request):
            _log.error("request %s is to export KV of another adapter than its own: not exported", request.request_id)
        elif params.export is not None:
            self._exports[request.request_id] = _Export(params.export, request.num_prompt_tokens)
        if params.import_ is not None:
            timeout_s = params.deadline_s if params.deadline_s is not None else math.inf
            objection = self._objection(request, params.import_)
            state = _ImportState.REFUSED if objection else _ImportState.WAITING
            self._imports[request.request_id] = _Import(params.import_, timeout_s, state, objection)

    def _objection(self, request: Request, handle: KvHandle) -> str:
        """Why the handle cannot be used, as a KvFault; empty where it can."""
        if handle.fingerprint != self._settings.fingerprint:
            return KvFault.FINGERPRINT.value
        if handle.adapter != self._adapter(request):
            return KvFault.ADAPTER.value
        if not may_import(handle, self._settings.precision, request.cache_salt or ""):
            return KvFault.UNSALTED.value
        if not handle.endpoints or not 0 <= handle.start < handle.tokens:
            return KvFault.INVALID.value
        if self._tail is Tail.STATE and handle.tokens >= request.num_tokens:
            return KvFault.INVALID.value
        return ""

    def _adapter(self, request: Request) -> str:
        """The digest of the request's adapter; empty: the base model."""
        adapter = request.lora_request
        return digest_of_key(adapter.lora_name, self._settings.adapters) if adapter is not None else ""

    def _end_of(self, request: Request, wanted: "_Import") -> int:
        last = int(request.num_tokens) - (self._tail is Tail.WINDOW)
        return min(wanted.handle.tokens, last)

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that the host tier, and then an import, can add to the computed ones; whether vLLM waits for them.
        None: vLLM is to ask again in its next step.
        """
        wanted = self._imports.get(request.request_id)
        # What an import brings from the first token on is not read from a disk before: it is under way.
        whole = wanted is not None and wanted.state is _ImportState.WAITING and not wanted.handle.start
        held = self.tier.find(request, num_computed_tokens, read=not whole) if self.tier is not None else 0
        if held is None:
            return None, False
        imported = self.get_num_new_matched_tokens(request, num_computed_tokens + held)
        return held + imported, imported > 0

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens that an import can add to the computed ones. vLLM may call it several times for a request; the last
        answer counts.
        """
        wanted = self._imports.get(request.request_id)
        if wanted is None or wanted.state is not _ImportState.WAITING:
            return 0
        missing = max(0, self._end_of(request, wanted) - num_computed_tokens)
        wanted.gap = missing > 0 and num_computed_tokens < wanted.handle.start
        wanted.wanted_tokens = 0 if wanted.gap else missing
        return wanted.wanted_tokens

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        wanted = self._imports.get(request.request_id)
        if self.tier is not None:
            num_external_tokens -= self.tier.load(request, blocks.get_block_ids(), num_external_tokens)
        if wanted is None or not wanted.undecided:
            return
        if num_external_tokens == 0:
            wanted.state = _ImportState.ENDED
            error = wanted.error
            if not error and wanted.gap:
                error = KvFault.GAP.value
            elif not error and wanted.wanted_tokens:
                error = KvFault.SKIPPED.value
            self._next.skips.append(ImportSkip(wanted.handle, error))
            return
        wanted.state = _ImportState.PULLING
        end, block_ids = self._end_of(request, wanted), [list(group) for group in blocks.get_block_ids()]
        start = end - num_external_tokens
        self._next.imports.append(
            ImportStart(request.request_id, wanted.handle, start, end, block_ids, wanted.timeout_s)
        )

    def build_connector_meta(self, output: SchedulerOutput) -> PolyphaseConnectorMetadata:
        step, self._next = self._next, PolyphaseConnectorMetadata()
        if self.tier is not None:
            step.host = self.tier.take()
        self._empty_steps = 0 if output.total_num_scheduled_tokens else self._empty_steps + 1
        # In an idle step a rank waits for its imports. `_batches` steps are under way at once: until so many in a row
        # are empty, other ranks may still be in the forward pass of an earlier step, whose collective operations would
        # then wait for the waiting rank.
        step.idle = self._empty_steps >= self._batches
        if self._exports:
            computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            cached = output.scheduled_cached_reqs
            computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            for request_id, tokens in output.num_scheduled_tokens.items():
                chunk = self._next_chunk(request_id, computed[request_id] + tokens, output)
                if chunk is not None:
                    step.exports.append(chunk)
        return step

    def _next_chunk(self, request_id: str, computed_tokens: int, output: SchedulerOutput) -> ExportChunk | None:
        """The tokens that this step adds to the transfer by computing up to `computed_tokens`.

        A preempted request starts again below what is staged already. The same tokens have the same KV, so what is
        staged stays, and only tokens beyond it are staged, from the blocks that the request has by then.
        """
        export = self._exports.get(request_id)
        end = min(computed_tokens, export.prompt_tokens) if export else 0
        if export is None or end <= export.staged_tokens:
            return None
        state = output.kv_connector_block_state
        assert state is not None, "vLLM resolves the blocks of every scheduled request"
        blocks = [list(group) for group in state.resolve_block_ids(request_id)]
        start, export.staged_tokens = export.staged_tokens, end
        params = export.params
        return ExportChunk(params.transfer_id, start, end, export.prompt_tokens, blocks, params.codec)

    def imports_ended(self, request_ids: set[str]) -> None:
        """The imports of these requests have ended on all ranks."""
        for request_id in request_ids:
            wanted = self._imports.get(request_id)
            if wanted is not None and wanted.state is _ImportState.PULLING:
                wanted.state = _ImportState.ENDED

    def disk_ended(self, report: DiskReport) -> None:
        assert self.tier is not None
        self.tier.disk_ended(report)

    def request_finished(self, request: Request) -> None:
        """The request's import is cancelled; what it exported stays staged only if it ended well."""
        if self.tier is not None:
            self.tier.request_ended(request.request_id)
        wanted = self._imports.pop(request.request_id, None)
        if wanted is not None and wanted.state is _ImportState.PULLING:
            self._next.cancelled_imports.append(wanted.handle.transfer_id)
        elif wanted is not None and wanted.undecided:
            self._next.skips.append(ImportSkip(wanted.handle, KvFault.CANCELLED.value))
        export = self._exports.pop(request.request_id, None)
        if export is not None and request.status not in _STAGED:
            self._next.dropped_exports.append(export.params.transfer_id)


@dataclass(frozen=True, slots=True)
class _Component:
    """A component in the caches of a rank. `groups`: the KV cache group of each layer, which has its blocks."""

    shape: RankShape
    layout: KvLayout
    caches: list[torch.Tensor]
    groups: list[int]
    codec: "DeviceCodec | None"  # where the caches are on a device for which Triton compiles


@dataclass(frozen=True, slots=True)
class _Rank:
    """What one rank has once vLLM has allocated its KV caches."""

    components: list[_Component]
    copies: Copies
    endpoint: KvEndpoint


class PolyphaseConnectorWorker:
    """The part in each rank: the layers of its pipeline stage, the heads of its tensor-parallel rank. The engine's
    thread calls its methods; imports end on the puller's thread.
    """

    def __init__(self, config: VllmConfig, settings: KvSettings, cache: "KVCacheConfig") -> None:
        self.faults = Faults(corrupt=settings.fault == "corrupt")
        self.zero_imports = set(KvKind) if settings.fault == "zero" else set[str]()  # kinds of components
        self._config = config
        self._cache_config = cache
        self._settings = settings
        self._registered: _Rank | None = None
        self._caches: list[torch.Tensor] = []
        self.host: HostStore | None = None
        self.disk: DiskStore | None = None
        self.components: tuple[KvComponent, ...] = ()  # of the model, once its caches are registered
        self.kv_dtype = ""  # in which K, V and latents are stored; empty where the model has none
        self._importing = 0  # requests whose import has not been reported as ended
        self._lock = threading.Lock()
        self._progress = threading.Event()
        self._received: set[str] = set()
        self._failed: set[str] = set()

    @property
    def endpoint(self) -> KvEndpoint | None:
        return self._registered.endpoint if self._registered is not None else None

    @property
    def _rank(self) -> _Rank:
        assert self._registered is not None, "the engine registers its KV caches first"
        return self._registered

    def register_kv_caches(self, caches: dict[str, torch.Tensor]) -> None:
        """Find out what the engine's KV caches hold and where, and open the endpoint. Raises LayoutError or OSError."""
        found = components_of(self._config, self._cache_config, caches)
        self._caches = list(caches.values())
        shapes = tuple(each.shape for each in found)
        self.components = tuple(each.model for each in found)
        self.kv_dtype = next((dtype_name(each.dtype) for each in shapes if each.kind is not KvKind.STATE), "")
        longest = held_bytes(shapes, self._config.model_config.max_model_len)
        held = [part.cache for each in found for part in each.parts]
        # Layers of different groups may share memory: a block is in use by one group at a time.
        kv_bytes = sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}.values())
        staging_bytes = self._settings.staging_bytes or default_staging(kv_bytes, longest)
        copies = self._copies_of(held[0], shapes, staging_bytes)
        components = [self._component(each, copies) for each in found]
        endpoint = KvEndpoint(self._settings, shapes, self._import_ended, staging_bytes, self.faults, copies)
        self._registered = _Rank(components, copies, endpoint)

    def _component(self, found: RankComponent, copies: Copies) -> _Component:
        """With its layout, and the kernels where there are some."""
        caches, groups = [part.cache for part in found.parts], [part.group for part in found.parts]
        layouts = {(tuple(part.cache.shape), part.block_size): part for part in found.parts}
        if len(layouts) > 1:
            raise LayoutError(f"layers have KV caches of different shapes: {', '.join(map(str, layouts))}")
        layout: KvLayout = _NoLayers()
        codec = None
        if found.parts:
            layout = self._layout_of(found.parts[0], found.shape)
            head_start, head_end = found.shape.heads
            if head_end - head_start != layout.kv_heads:
                raise LayoutError(
                    f"rank {found.shape.rank} holds {layout.kv_heads} KV heads, not {head_end - head_start}"
                )
            if len(set(groups)) == 1:
                codec = codec_on_device(caches, layout, found.shape, copies.upload, lossy=self._settings.lossy)
        return _Component(found.shape, layout, caches, groups, codec)

    def _layout_of(self, part: LayerPart, shape: RankShape) -> KvLayout:
        cache, block_size, head_dim = part.cache, part.block_size, shape.head_dim
        if part.view is not None:
            return StateLayout(part.view, cache, block_size)
        if shape.kind is KvKind.HEADS and shape.sides == 1 and cache.device.type == "cpu":
            raise LayoutError("K and V differ in channels, which the CPU backend orders in its own way")
        if shape.sides == 1:
            return checked(row_layout(cache, head_dim, block_size), cache, self._cache_config.num_blocks)
        if cache.device.type == "cpu":
            return self._cpu_layout(cache, head_dim, block_size, eight_bit_in(cache, shape))
        return checked(strided_layout(cache, head_dim, block_size), cache, self._cache_config.num_blocks)

    def _cpu_layout(
        self, cache: torch.Tensor, head_dim: int, block_size: int, eight_bit: torch.dtype | None
    ) -> CpuLayout:
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        dtype = self._config.cache_config.cache_dtype
        isa = _get_attn_isa(self._config.model_config.dtype, block_size, head_dim, dtype)
        if isa == "amx":
            # Linux grants AMX on request only, and vLLM 0.32 asks too late: its attention dies of SIGILL (seen).
            torch.cpu._init_amx()

        def write(
            k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
        ) -> None:
            ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, isa, 1.0, 1.0, dtype)

        layout = CpuLayout(write, cache, head_dim, block_size, eight_bit)
        _log.info("KV layout (%s): %s", isa, layout.describe())
        return layout

    def _copies_of(self, cache: torch.Tensor, shapes: tuple[RankShape, ...], staging_bytes: int) -> Copies:
        if cache.device.type == "cpu":
            return host_copies(shapes, staging_bytes, fixed=self._settings.nixl)
        memory = PinnedMemory(rows_of(shapes), staging_bytes + UNDER_WAY_BYTES)
        scratch = scratch_segments(shapes, self._config.scheduler_config.max_num_batched_tokens)
        return DeviceCopies(TorchDevice(cache), memory, segment_bytes(shapes), scratch)

    def host_store(self) -> HostStore:
        """A store for blocks of this rank, yet without memory. Raises LayoutError."""
        self.host = HostStore(self._caches, self._cache_config.num_blocks)
        self._rank.endpoint.host_block_s = lambda: self.host.timer.block_s if self.host is not None else 0.0
        return self.host

    def disk_store(self, folder: Path, slots: int) -> None:
        """Have a file in a folder for so many blocks that leave the store in host memory. Raises DiskError."""
        assert self.host is not None
        path, fingerprint = rank_file(folder, self._rank.components[0].shape.rank), self._settings.fingerprint
        self.disk = DiskStore(path, slots, self.host.slot_bytes, fingerprint, ended=self._progress.set)

    def save_to_host(self, copies: HostCopies) -> None:
        """Before a step changes anything: blocks leave the store for the disk, and others get their slots."""
        if not (copies.saves or copies.disk.writes or copies.disk.reads):
            return
        assert self.host is not None, "the tier has slots once every rank has a store"
        if self.disk is not None:
            for host_slot, slot, key in copies.disk.writes:
                self.disk.write(slot, key, self.host.content(host_slot))
        if copies.saves:
            self.host.save(copies.saves)
        if self.disk is not None:
            for slot, host_slot, key in copies.disk.reads:
                self.disk.read(slot, key, host_slot, self.host.content(host_slot))

    def disk_report(self) -> DiskReport | None:
        return self.disk.report() if self.disk is not None else None

    def start_load_kv(self, step: PolyphaseConnectorMetadata) -> None:
        """Load blocks from host memory; start and end imports; while the engine has nothing but imports to wait for,
        wait a moment for one.
        """
        if step.host.loads:
            assert self.host is not None
            self.host.load(step.host.loads)
        endpoint = self._rank.endpoint
        for each in step.imports:
            self._importing += 1
            destinations = self._destinations(each)
            endpoint.load(Load(each.request_id, each.handle, each.start, each.end, destinations, each.timeout_s))
        for transfer_id in step.cancelled_imports:
            endpoint.cancel(transfer_id)
        for skip in step.skips:
            endpoint.skip(skip.handle, skip.error)
        for transfer_id in step.dropped_exports:
            endpoint.release(transfer_id)
        if step.idle and (self._importing or (self.disk is not None and self.disk.reading)):
            # The engine steps as fast as it can while a request waits for KV; without this it takes a whole core.
            self._progress.wait(_IDLE_WAIT_S)

    def _destinations(self, start: ImportStart) -> tuple[Blocks, ...]:
        copies = self._rank.copies
        blocks, freed = [torch.tensor(group) for group in start.blocks], copies.freed()
        return tuple(self._destination(each, start, blocks, freed) for each in self._rank.components)

    def _destination(self, to: _Component, start: ImportStart, blocks: list[torch.Tensor], freed: Any) -> Blocks:
        first, last = to.shape.read(start.start, start.end)
        slots = {group: slots_of(blocks[group], to.layout.block_size, first, last) for group in set(to.groups)}
        return Blocks(
            caches=to.caches,
            layout=to.layout,
            slots=[slots[group] for group in to.groups],
            token_start=first,
            layer_start=to.shape.layers[0],
            head_start=to.shape.heads[0],
            copies=self._rank.copies,
            freed=freed,
            zero=to.shape.kind.value in self.zero_imports,
            codec=to.codec,
            eight_bit=eight_bit_in(to.caches[0], to.shape) if to.caches else None,
            kv_scales=to.shape.scales,
            null_slots=to.layout.block_size,  # vLLM's null block is number 0
        )

    def save_kv(self, step: PolyphaseConnectorMetadata) -> None:
        """Begin to copy the KV that this step has computed into staging. Its blocks may be freed at once: the model's
        next work comes after their gather.
        """
        for chunk in step.exports:
            self.stage(chunk)

    def stage(self, chunk: ExportChunk) -> None:
        """Begin to copy KV into staging that lies in blocks by now, or will after the work that the model was given."""
        blocks = [torch.tensor(group) for group in chunk.blocks]
        pieces = []
        for index, component in enumerate(self._rank.components):
            start, end = component.shape.kept(chunk.start, chunk.end, chunk.total)
            if start < end and component.caches:
                pieces.append(self._piece(index, component, blocks, (start, end), chunk.codec))
        tokens = chunk.start, chunk.end
        self._rank.endpoint.stage(chunk.transfer_id, tokens, chunk.total, pieces, chunk.first)

    def _piece(
        self, index: int, component: _Component, blocks: list[torch.Tensor], tokens: tuple[int, int], codec: Codec
    ) -> Piece:
        layout, device_codec, groups = component.layout, component.codec, component.groups

        def slots(start: int, end: int) -> torch.Tensor:
            return slots_of(blocks[groups[0]], layout.block_size, start, end)

        stored = self.host is not None and any(bool((each < 0).any()) for each in blocks)

        def fill(start: int, end: int, kv: torch.Tensor) -> None:
            if stored:
                for layer, (cache, group) in enumerate(zip(component.caches, groups, strict=True)):
                    self._gather_stored(layout, cache, blocks[group], (start, end), kv[layer].view(cache.dtype))
                return
            if device_codec is not None and device_codec.gather(slots(start, end), kv):
                return
            uploaded = {group: self._rank.copies.upload(blocks[group]) for group in set(groups)}
            for layer, (cache, group) in enumerate(zip(component.caches, groups, strict=True)):
                layout.gather(cache, uploaded[group], start, end, kv[layer].view(cache.dtype))

        coding = None
        if device_codec is not None and component.shape.codec(codec).lossy and not stored:
            coding = device_codec.coding(codec, tokens[1] - tokens[0], slots)
        return Piece(*tokens, fill, coding, index)

    def _gather_stored(
        self, layout: KvLayout, cache: torch.Tensor, blocks: torch.Tensor, tokens: tuple[int, int], out: torch.Tensor
    ) -> None:
        """Gather tokens of a layer of which some blocks, with numbers below 0, are slots of the host tier."""
        assert self.host is not None
        size, (start, end) = layout.block_size, tokens
        first, last = start // size, -(-end // size)
        wanted = blocks[first:last]
        slots = [-1 - each for each in wanted.tolist() if each < 0]
        # The blocks that the cache has, and then those of the store, as a cache of their own.
        there = self.host.as_cache(cache, wanted[wanted >= 0].tolist(), slots)
        order = torch.empty(len(wanted), dtype=torch.int64)
        order[wanted >= 0] = torch.arange(len(wanted) - len(slots))
        order[wanted < 0] = torch.arange(len(wanted) - len(slots), len(wanted))
        layout.gather(there, self._rank.copies.upload(order), start - first * size, end - first * size, out)

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Requests whose import has ended since the last call, and those of them for which it failed. The model may
        use their blocks from the next step on.
        """
        with self._lock:
            received, failed = self._received, self._failed
            self._received, self._failed = set(), set()
            self._progress.clear()
        self._rank.copies.join()
        self._importing -= len(received)
        return received, failed

    def _import_ended(self, request_id: str, ended: PullEnded) -> None:
        with self._lock:
            self._received.add(request_id)  # a failed one too, or the engine would wait for it forever
            if not ended.ok:
                self._failed.add(request_id)
            self._progress.set()
        if not ended.ok:
            _log.warning("import of %s failed: %s", ended.transfer_id, ended.error)

    def shutdown(self) -> None:
        if self.disk is not None:
            self.disk.close()
        if self.host is not None:
            self.host.close()
        if self._registered is not None:
            self._registered.endpoint.stop()
            self._registered = None


def stage_on_rank(_: Any, chunk: ExportChunk) -> None:
    """`PolyphaseConnectorWorker.stage`, as a function that vLLM's executor runs in each rank."""
    get_kv_transfer_group().worker.stage(chunk)


def host_store_on_rank(_: Any) -> int:
    """Bytes of a slot of the host tier on this rank. Raises LayoutError."""
    return int(get_kv_transfer_group().worker.host_store().slot_bytes)


def host_slots_on_rank(_: Any, slots: int) -> None:
    """Allocate the rank's store after `host_store_on_rank`."""
    get_kv_transfer_group().worker.host.allocate(slots)


def disk_store_on_rank(_: Any, folder: Path, slots: int) -> str:
    """`PolyphaseConnectorWorker.disk_store`, once the rank has a store in host memory. Returns why it failed, if it
    did: ranks in other processes pass no errors on.
    """
    try:
        get_kv_transfer_group().worker.disk_store(folder, slots)
    except DiskError as error:
        return str(error)
    return ""


def copy_on_rank(_: Any, copies: HostCopies) -> DiskReport | None:
    """`PolyphaseConnectorWorker.save_to_host` between two steps, and what the rank has to report."""
    worker = get_kv_transfer_group().worker
    worker.save_to_host(copies)
    report: DiskReport | None = worker.disk_report()
    return report


def drop_on_rank(_: Any, transfer_id: str) -> None:
    """Drop what is staged for a transfer, in each rank."""
    endpoint = get_kv_transfer_group().worker.endpoint
    if endpoint is not None:
        endpoint.release(transfer_id)


class _NoLayers:
    """The layout of a component of which a pipeline stage has no layers."""

    block_size, kv_heads, head_dim, sides = 1, 0, 0, 0

    def gather(self, cache: torch.Tensor, blocks: torch.Tensor, start: int, end: int, out: torch.Tensor) -> None:
        raise NotImplementedError

    def scatter(self, cache: torch.Tensor, slots: torch.Tensor, head: int, kv: torch.Tensor) -> None:
        raise NotImplementedError


def eight_bit_in(cache: torch.Tensor, shape: RankShape) -> torch.dtype | None:
    """The type of KV that vLLM stores in bytes; None for other caches."""
    return shape.dtype if cache.dtype is torch.uint8 else None


def segment_bytes(shapes: tuple[RankShape, ...]) -> int:
    """Of the largest segment."""
    return max(shape.chunk_bytes(1 if shape.kind is KvKind.STATE else shape.segment_tokens()) for shape in shapes)


def scratch_segments(shapes: tuple[RankShape, ...], step_tokens: int) -> int:
    """How many segments of scratch memory a device gets: room for a whole step's KV, within `_SCRATCH_BYTES`."""
    for_a_step = sum(
        1 if shape.kind is KvKind.STATE else math.ceil(step_tokens / shape.segment_tokens()) for shape in shapes
    )
    affordable = _SCRATCH_BYTES // segment_bytes(shapes)
    return max(_MIN_SCRATCH_SEGMENTS, min(for_a_step, affordable))


def checked(layout: StridedLayout, cache: torch.Tensor, blocks: int) -> StridedLayout:
    """The layout, whose blocks have to be the scheduler's, or these divided evenly: slots would be counted otherwise
    than vLLM's scheduler counts blocks. Raises LayoutError.
    """
    view = layout.views(cache)[0]
    held = view.shape[0] * view.shape[1]
    if held != blocks * layout.block_size:
        raise LayoutError(f"the KV cache has {held} tokens, and vLLM counts {blocks} blocks of {layout.block_size}")
    return layout


def codec_on_device(
    caches: list[torch.Tensor], layout: KvLayout, shape: RankShape, upload: "Upload", *, lossy: bool
) -> "DeviceCodec | None":
    """Triton's kernels for caches on a device; None for caches in host memory. Also None, with a warning that names the
    reason, where the kernels do not work: torch then moves KV, and the CPU codes it.
    """
    if caches[0].device.type == "cpu" or not isinstance(layout, StridedLayout) or layout.sides != 2:
        return None
    if caches[0].dtype.itemsize == 1:
        return None
    try:
        from services.worker.kv.device_codec import KERNEL_FAULTS, DeviceCodec, warn_of_fallback
    except ImportError as error:
        _log.warning("KV is moved without Triton kernels, and coded on the CPU: %s", error)
        return None
    try:
        codec = DeviceCodec(caches, layout, shape, upload)
        codec.prepare(lossy=lossy)
    except (ValueError, *KERNEL_FAULTS) as error:
        warn_of_fallback(error)
        return None
    return codec
