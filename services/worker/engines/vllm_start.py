"""The configuration with which vLLM is started, and the properties of the engine that has started."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import __version__ as vllm_version
from vllm.config import KVEventsConfig, KVTransferConfig, ReasoningConfig, StructuredOutputsConfig, VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from services.worker.engines.base import EngineInfo
from services.worker.engines.vllm_patches import force_known_tokens, longest_hit, observe_blocks, overlap_on_cpu
from services.worker.identity import fingerprint, folder_of, precision_of
from services.worker.kv.codec import codec_speeds
from services.worker.kv.disk_store import DiskError, check_folder, remove_others, step_bytes
from services.worker.kv.disk_tier import DiskTier
from services.worker.kv.layout import LayoutError
from services.worker.kv.vllm.connector import disk_store_on_rank, host_slots_on_rank, host_store_on_rank
from services.worker.kv.vllm.layers import EIGHT_BIT_NAMES, stages_of
from services.worker.kv.wire.importing import DTYPES, WIDER
from services.worker.settings import DATA_PARALLEL_PORTS, DISK_QUEUE_BYTES, WorkerSettings
from shared.domain.instance import Compatibility, KvComponent, KvGeometry, KvKind
from shared.domain.prompt import MODALITIES
from shared.domain.rates import Rates
from shared.errors import InvalidRequest
from shared.model.adapters import LoraSection
from shared.model.folder import fault_of_quantised
from shared.model.source import (
    DOWNLOAD_FILE,
    FILE_FORMATS,
    IGNORED,
    Download,
    check_weights,
    fetch_weights,
    read_config,
)
from shared.model.support import fault_of_stored_kv, faults_of_model, note_on_torchvision
from shared.model.weights import fault_of_weights, weights_of
from shared.policy.decode_admission import Blocks
from shared.policy.host_index import SlotIndex
from shared.runtime.logs import get_log
from shared.runtime.wire_version import OURS

if TYPE_CHECKING:
    from services.worker.kv.vllm.host_tier import HostTier

log = get_log(__name__)
KV_DTYPES = ("auto", "bfloat16", "float16", "float32", *EIGHT_BIT_NAMES)  # vLLM's `cache_dtype`s that are known here
DOWNLOAD_LOG_S = 10.0
# Engine arguments of which vLLM's EngineArgs does not take a mapping, as its command line does.
_SECTIONS = {"structured_outputs_config": StructuredOutputsConfig, "reasoning_config": ReasoningConfig}
_EXPERTS = {"num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts"}  # as vLLM's `get_num_experts`
CPU_WORKER = "services.worker.engines.vllm_cpu_worker.SeededCpuWorker"


def engine_config(settings: WorkerSettings, kv_config: dict[str, Any], kv_events: KVEventsConfig | None) -> VllmConfig:
    """vLLM's configuration; `kv_config` is for Polyphase's KV connector in every rank. `engine_args` of the
    settings take precedence.

    Raises InvalidRequest for a model or an adapter that cannot be served, and where the device has too little memory.
    """
    check_model_file(settings)
    if current_platform.is_cpu():
        import_module(CPU_WORKER.rpartition(".")[0])  # in the ranks' processes vLLM does, and here something waits too
    s = settings
    arguments: dict[str, Any] = {
        "model": s.weights or s.model,
        "trust_remote_code": s.trust_remote_code,
        "dtype": s.dtype,
        "max_model_len": s.max_model_len,
        "block_size": s.block_size,
        "tensor_parallel_size": s.tensor_parallel,
        "pipeline_parallel_size": s.pipeline_parallel,
        "max_num_batched_tokens": s.step_tokens,
        "max_num_seqs": s.max_seqs,
        "kv_cache_memory_bytes": s.kv_cache_bytes,
        "enforce_eager": s.accelerator == "cpu",
        "mm_processor_cache_gb": 0.0,  # gateways send the data of images with each job
        "async_scheduling": s.async_scheduling,  # None: vLLM's default, which is on where it can be
        "worker_cls": CPU_WORKER if current_platform.is_cpu() else "auto",
        "kv_events_config": kv_events,
        "kv_transfer_config": KVTransferConfig(
            kv_connector="PolyphaseConnector",
            kv_connector_module_path="services.worker.kv.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=kv_config,
        ),
    }
    if s.weights:
        arguments["tokenizer"] = s.model  # the gateway's
    arguments |= _lora_arguments(s.lora) | _memory_arguments(s) | s.engine_args
    for name, kind in _SECTIONS.items():
        if isinstance(arguments.get(name), dict):
            arguments[name] = kind(**arguments[name])
    config = _vllm_config(s, arguments)
    if s.data_parallel > 1 and config.model_config.is_moe:
        config = _coupled_config(s, arguments)
    check_model(config)
    check_experts(config)
    if arguments["async_scheduling"] and current_platform.is_cpu():
        overlap_on_cpu(config)
    force_known_tokens(config)
    return config


def _coupled_config(settings: WorkerSettings, arguments: dict[str, Any]) -> VllmConfig:
    """For a mixture of experts that is divided among the instance's data-parallel ranks, of which this engine is one:
    they compute every forward pass together. Ranks of other models have nothing in common; to vLLM each is an engine.

    vLLM chooses ports of its own for them, in each process others.
    """
    s = settings
    if not s.data_parallel_port:
        raise InvalidRequest("data_parallel_port: the ranks of a mixture of experts need ports at which they meet")
    if s.lora.enabled:
        raise InvalidRequest(
            f"lora: model {s.source.model} is divided among {s.data_parallel} data-parallel ranks, and vLLM forgets "
            "all adapters whenever one of them has nothing to compute: use `tensor_parallel`, or leave `lora` out"
        )
    own: dict[str, Any] = {"data_parallel_size": s.data_parallel, "data_parallel_rank": s.data_parallel_rank}
    if s.ranks == 1 and arguments.get("distributed_executor_backend") is None:
        own["distributed_executor_backend"] = "uni"  # in this process, as without other ranks
    config = _vllm_config(s, arguments | own)
    parallel = config.parallel_config
    parallel.data_parallel_rank_local = 0  # the process sees its own devices only
    ports = list(range(s.data_parallel_port, s.data_parallel_port + DATA_PARALLEL_PORTS))
    ports.remove(ranks_port(s))
    parallel._data_parallel_master_port_list = ports[::-1]  # vLLM takes the last one first
    return config


def ranks_port(settings: WorkerSettings) -> int:
    """The port at which rank 0 listens to the others; vLLM uses those before and after it."""
    return settings.data_parallel_port + 1


def _vllm_config(settings: WorkerSettings, arguments: dict[str, Any]) -> VllmConfig:
    """vLLM's configuration; of the model's text alone where its processor of images and the like does not load.

    Raises InvalidRequest where vLLM's code for the model lacks torchvision.
    """
    try:
        config = EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
    except ValueError as error:
        source = read_config(settings.source, trust_remote_code=settings.trust_remote_code)
        if note := note_on_torchvision(source):
            raise InvalidRequest(f"model {settings.model}: {error}; {note}") from error
        raise
    if config.model_config.supports_multimodal_inputs:
        try:
            MultiModalBudget(config, MULTIMODAL_REGISTRY, enable_cache=False)
        except Exception as error:  # whatever a model's processor and the libraries below it raise
            cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
            log.warning("the model's processor does not load: its text alone is served", error=cause)
            return _vllm_config(settings, {**arguments, "language_model_only": True})
    return config


def media_of(config: VllmConfig) -> tuple[str, ...]:
    """The modalities of which the engine processes items."""
    if not config.model_config.supports_multimodal_inputs:
        return ()
    limits = MULTIMODAL_REGISTRY.get_processing_info(config.model_config).allowed_mm_limits
    return tuple(name for name in MODALITIES if limits.get(name, 0) > 0)


def _lora_arguments(lora: LoraSection) -> dict[str, Any]:
    """Raises InvalidRequest for an adapter without a configuration."""
    if not lora.enabled:
        return {}
    return {
        "enable_lora": True,
        "max_loras": lora.together,
        "max_cpu_loras": lora.room,  # all stay in host memory: vLLM would read one that does not again in a step
        "max_lora_rank": lora.rank(),
    }


def lora_requests(lora: LoraSection) -> dict[str, LoRARequest]:
    """vLLM's requests for the adapters, by name. Their numbers are the engine's own."""
    return {
        name: LoRARequest(name, number, folder) for number, (name, folder) in enumerate(lora.adapters.items(), start=1)
    }


def obtain_model(settings: WorkerSettings) -> None:
    """Check `engine_args` and the model, and download the weights of one on the hub. Raises InvalidRequest,
    Unavailable.
    """
    check_arguments(settings)
    check_model_file(settings)
    ignore = settings.engine_args.get("ignore_patterns", IGNORED)
    fetch_weights(settings.source, settings.load_format, ignore, DownloadReport())


def check_arguments(settings: WorkerSettings) -> None:
    """Check that this instance's vLLM, which may be of another release than the one that settings are checked against,
    has all of `engine_args`. Raises InvalidRequest.
    """
    if missing := settings.engine_args.keys() - {each.name for each in fields(EngineArgs)}:
        raise InvalidRequest(
            f"engine_args: {', '.join(sorted(missing))}: vLLM {vllm_version}, which this instance runs, has no such "
            "engine argument: leave it out, or upgrade this instance's vLLM first"
        )


class DownloadReport:
    """Writes the progress of a download to the file that the process's starter names, and at a low rate to the log."""

    def __init__(self, period_s: float = DOWNLOAD_LOG_S) -> None:
        self._file = os.environ.get(DOWNLOAD_FILE, "")
        self._period_s = period_s
        self._logged_mono = -math.inf

    def __call__(self, download: Download) -> None:
        if self._file:
            download.write(Path(self._file))
        now_mono, done, total = time.monotonic(), download.done_bytes, download.total_bytes
        if now_mono - self._logged_mono >= self._period_s or done == total:
            self._logged_mono = now_mono
            log.info("downloading weights", downloaded_bytes=done, total_bytes=total)


def check_model_file(settings: WorkerSettings) -> None:
    """Check the model before weights are loaded: its config.json, from the hub where the model is a name of it, and
    the completeness of a folder. Raises InvalidRequest, Unavailable.
    """
    config = read_config(settings.source, trust_remote_code=settings.trust_remote_code)
    stored = fault_of_stored_kv(config, str(settings.engine_args.get("kv_cache_dtype", "auto")), settings.dtype)
    if faults := faults_of_model(config) + ([stored] if stored else []):
        raise InvalidRequest(f"model {settings.source.model}: " + "; ".join(faults))
    if (folder := settings.source.folder) is not None and settings.load_format in FILE_FORMATS:
        check_weights(folder)
    if settings.weights:
        check_base(settings)


def check_base(settings: WorkerSettings) -> None:
    """Check the quantised checkpoint against the cluster's model. Raises InvalidRequest.

    The model's weights have to be on this host too: by their fingerprint the instance shows which model it serves.
    """
    base, checkpoint = folder_of(settings.model), folder_of(settings.weights)
    if base is None or fault_of_weights(base):
        raise InvalidRequest(
            f"weights: {settings.model} is not on this host: an instance with a quantised checkpoint of a model needs "
            "the model's files too, to show that it serves this model"
        )
    if checkpoint is not None and (fault := fault_of_quantised(checkpoint, base)):
        raise InvalidRequest(f"weights: {fault}")


def check_model(config: VllmConfig) -> None:
    """Check vLLM's view of the model, which may have no config.json. Raises InvalidRequest."""
    model, stored = config.model_config, config.cache_config.cache_dtype
    if model.use_mla and current_platform.is_cpu() and not config.scheduler_config.enable_chunked_prefill:
        raise InvalidRequest(
            f"model {model.model}: the model has multi-head latent attention (MLA), and without AMX vLLM's CPU backend "
            "cannot continue a prompt of which another instance has computed the beginning: use a CPU with AMX"
        )
    if current_platform.is_cpu() and WIDER.get(stored, model.dtype) is not model.dtype:
        raise InvalidRequest(
            f"engine_args: kv_cache_dtype: on a CPU, vLLM stores KV in fp8 or in the model's dtype, not in {stored} "
            f"beside {str(model.dtype).removeprefix('torch.')}: set `dtype: {stored}`, or leave kv_cache_dtype out"
        )
    if stored not in KV_DTYPES:
        dtype = "float16" if str(model.dtype) == "torch.float16" else "bfloat16"
        raise InvalidRequest(
            f"model {model.model}: the checkpoint has its KV stored in {stored}, and KV in that form cannot be "
            f"transferred: set `engine_args: {{kv_cache_dtype: {dtype}}}`, or serve a checkpoint without it"
        )


def check_experts(config: VllmConfig) -> None:
    """Raises InvalidRequest for experts that this device cannot divide among ranks; vLLM would compute others."""
    quantization = config.model_config.quantization
    if current_platform.is_cpu() and config.parallel_config.enable_expert_parallel and quantization:
        raise InvalidRequest(
            f"engine_args: enable_expert_parallel: vLLM's CPU kernels for {quantization} experts cannot divide them "
            "among ranks: leave it out, and each rank has a part of every expert"
        )


def _memory_arguments(settings: WorkerSettings) -> dict[str, Any]:
    """How much of its device the engine takes; empty on CPUs and where the device's memory is not known.

    vLLM starts where `gpu_memory_utilization` of the device is free, 0.92 by default. How much KV it keeps does not
    depend on that, since `kv_cache_memory_bytes` is given, so two instances may share a device.
    """
    if current_platform.is_cpu() or "gpu_memory_utilization" in settings.engine_args:
        return {}
    try:
        total = min(current_platform.get_device_total_memory(rank) for rank in range(settings.ranks))
    except Exception as error:  # whatever a vendor's library raises: vLLM's own default then applies
        log.warning("the device's memory is unknown", error=f"{type(error).__name__}: {error}")
        return {}
    return {"gpu_memory_utilization": utilization(settings, _weights(settings), total)}


def _weights(settings: WorkerSettings) -> int:
    """Bytes of the weights of the model and its draft, as far as they are in local folders."""
    speculative = settings.engine_args.get("speculative_config")
    draft = speculative.get("model") if isinstance(speculative, dict) else None
    found = (weights_of(name, settings.dtype) for name in (settings.source.model, draft) if name)
    weights = sum(each.loaded for each in found if each is not None)
    if settings.data_parallel > 1 and has_experts(settings):
        return weights // settings.data_parallel  # at least: most of the weights are experts
    return weights


def has_experts(settings: WorkerSettings) -> bool:
    """Whether the model is a mixture of experts, by its config.json."""
    config = read_config(settings.source, trust_remote_code=settings.trust_remote_code)
    text = config.get("text_config")
    return any(_EXPERTS & {name for name, value in each.items() if value} for each in (config, text or {}))


def utilization(settings: WorkerSettings, weights: int, total: int) -> float:
    """The part of a device of `total` bytes that an instance needs. Raises InvalidRequest where that is more than
    all.
    """
    needed = settings.device_bytes(weights)
    if needed > total:
        raise InvalidRequest(
            f"{settings.accelerator}: weights, KV (`kv_cache_bytes`: {settings.kv_cache_bytes / 2**30:.1f} GiB) and "
            f"1 GiB for the rest are {needed / 2**30:.1f} GiB of each device, which has {total / 2**30:.1f}: lower "
            "kv_cache_bytes, or raise tensor_parallel"
        )
    return needed / total


def kept_kv(_: Any) -> tuple[tuple[KvComponent, ...], str]:
    """What the model keeps for a request, and in which dtype; to be called on a rank of the engine, since vLLM learns
    of KV that some checkpoints request in fp8 when its ranks make the model's layers.
    """
    worker = get_kv_transfer_group().worker
    return tuple(worker.components), worker.kv_dtype


def start_host_tier(
    core: Any, host_kv_bytes: int, disk_kv_bytes: int = 0, disk_folder: Path | None = None
) -> "HostTier":
    """Give a started engine core a tier of so many bytes of host memory on each rank, and behind it so many bytes in a
    folder that only this engine uses. Raises InvalidRequest.
    """
    from services.worker.kv.vllm.host_tier import HostTier  # uses more of vLLM than an older release may have

    manager, config, run = core.scheduler.kv_cache_manager, core.vllm_config, core.model_executor.collective_rpc
    if fault := fault_of_host_tier(manager):
        raise InvalidRequest(f"host_kv_bytes: {fault}: leave it out")
    try:
        slot_bytes: list[int] = run(host_store_on_rank)
    except LayoutError as error:
        raise InvalidRequest(f"host_kv_bytes: {error}: leave it out") from error
    slots = host_kv_bytes // max(slot_bytes)
    if not slots:
        raise InvalidRequest(f"host_kv_bytes: {host_kv_bytes} bytes do not hold a block, which has {max(slot_bytes)}")
    run(host_slots_on_rank, args=(slots,))
    # A token's attention, of 2 FLOPs for each layer, channel, position, and of K and V, costs as much as the rest of
    # its forward pass, of some 24 for each layer and pair of channels, where as many positions are before it.
    double_tokens = 6 * config.model_config.get_hidden_size()
    index, disk = SlotIndex(slots, double_tokens), None
    if disk_kv_bytes and disk_folder is not None:
        files = SlotIndex(start_disk_store(run, disk_kv_bytes, disk_folder, slot_bytes), double_tokens)
        queued_blocks = max(1, DISK_QUEUE_BYTES // max(slot_bytes))
        disk = DiskTier(files, index, len(slot_bytes), sum(slot_bytes), queued_blocks)
    tier = HostTier(manager, index, sum(slot_bytes), partial(longest_hit, manager), disk)
    observe_blocks(manager.block_pool, tier)
    core.scheduler.connector.scheduler.tier = tier
    return tier


def start_disk_store(run: Callable[..., list[str]], disk_kv_bytes: int, folder: Path, slot_bytes: list[int]) -> int:
    """Give each rank a file of so many bytes for blocks of so many. Returns how many fit. Raises InvalidRequest."""
    step, ranks = step_bytes(max(slot_bytes)), len(slot_bytes)
    slots = disk_kv_bytes // step
    if not slots:
        raise InvalidRequest(f"disk_kv_bytes: {disk_kv_bytes} bytes do not hold a block, which takes {step}")
    try:
        check_folder(folder, disk_kv_bytes, ranks)
        remove_others(folder, ranks)
    except DiskError as error:
        raise InvalidRequest(str(error)) from error
    if faults := [fault for fault in run(disk_store_on_rank, args=(folder, slots)) if fault]:
        raise InvalidRequest(faults[0])
    return slots


def fault_of_host_tier(manager: Any) -> str:
    """Why an engine with this KVCacheManager cannot have a host tier; empty where it can."""
    if not manager.enable_caching:
        return "the engine has no prefix cache"
    if manager.kv_cache_config.has_mamba_layers:
        return "the model keeps recurrent states, of which a prompt's blocks have no copies"
    specs = [group.kv_cache_spec for group in manager.kv_cache_config.kv_cache_groups]
    if any(getattr(spec, "extra_retained_tokens", 0) or getattr(spec, "prefix_replay_tokens", 0) for spec in specs):
        return "the model's windows, or its drafts, need more than the blocks of a window"
    if any(each.block_pool is not manager.block_pool for each in manager.coordinator.single_type_managers):
        return "vLLM keeps the model's KV in several pools of blocks"
    return ""


def engine_info(
    settings: WorkerSettings,
    config: VllmConfig,
    blocks: Blocks,
    kept: tuple[tuple[KvComponent, ...], str],
    adapters: dict[str, str],
) -> EngineInfo:
    """Properties of an engine that has started with that KV memory, for a model that keeps what `kept_kv` says.

    adapters: digests of those that it has loaded, by name.
    """
    model, (components, kv_dtype) = config.model_config, kept
    geometry = KvGeometry(
        layers=model.get_total_num_hidden_layers(),
        kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        components=components,
    )
    compatibility = Compatibility(
        fingerprint=fingerprint(settings.model),
        engine="vllm",
        engine_version=vllm_version,
        wire_version=OURS.version,
        min_wire_version=OURS.minimum,
        geometry=geometry,
    )
    has_states = any(each.kind is KvKind.STATE for each in components)
    caches = bool(config.cache_config.enable_prefix_caching) and not has_states
    codecs = codec_speeds(geometry, DTYPES[settings.dtype]) if settings.lossy_kv else {}
    return EngineInfo(
        compatibility,
        blocks.total,
        model.max_model_len,
        blocks.size_tokens,
        Rates(codecs=codecs),
        stages_of(config),
        kv_dtype=kv_dtype if kv_dtype != settings.dtype else "",
        adapters=dict(adapters),
        precision=precision_of(settings),
        media=media_of(config),
        cached_tokens=blocks.size_tokens if caches else 0,
    )
