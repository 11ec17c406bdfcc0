"""What vLLM is started with, and what it turned out to be."""

from importlib import import_module
from typing import Any

from vllm import __version__ as vllm_version
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from services.worker.engines.base import EngineInfo
from services.worker.engines.vllm_forced import force_known_tokens
from services.worker.fingerprint import fingerprint
from services.worker.kv.codec_speed import codec_speeds
from services.worker.kv.vllm.layers import stages_of
from services.worker.kv.wire.importing import DTYPES
from services.worker.settings import WorkerSettings
from shared.domain.instance import Compatibility, KvGeometry
from shared.domain.rates import Rates
from shared.runtime.wire_version import OURS

CPU_WORKER = "services.worker.engines.vllm_cpu_worker.SeededCpuWorker"


def engine_config(settings: WorkerSettings, kv_config: dict[str, Any], kv_events: KVEventsConfig | None) -> VllmConfig:
    """vLLM's configuration; `kv_config` is for our KV connector in every rank. `engine_args` of the settings count."""
    if current_platform.is_cpu():
        import_module(CPU_WORKER.rpartition(".")[0])  # in the ranks' processes vLLM does, and here something waits too
    s = settings
    arguments: dict[str, Any] = {
        "model": s.model,
        "dtype": s.dtype,
        "max_model_len": s.max_model_len,
        "block_size": s.block_size,
        "tensor_parallel_size": s.tensor_parallel,
        "pipeline_parallel_size": s.pipeline_parallel,
        "max_num_batched_tokens": s.step_tokens,
        "max_num_seqs": s.max_seqs,
        "kv_cache_memory_bytes": s.kv_cache_bytes,
        "enforce_eager": s.accelerator == "cpu",
        "async_scheduling": s.async_scheduling,  # None: as vLLM has it, which is on unless something speaks against it
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
    arguments |= s.engine_args
    config = EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
    if arguments["async_scheduling"] and current_platform.is_cpu():
        overlap_on_cpu(config)
    force_known_tokens(config)
    return config


def overlap_on_cpu(config: VllmConfig) -> None:
    """Have the next step scheduled while the last one's tokens are still to be fetched, which vLLM turns off on CPUs:
    see `vllm_cpu_async`. Raises ValueError where its CPU backend cannot.
    """
    if config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError("async_scheduling: vLLM's CPU backend cannot with pipeline stages")
    config.scheduler_config.async_scheduling = True


def engine_info(settings: WorkerSettings, config: VllmConfig, blocks: int) -> EngineInfo:
    """Of an engine that has started with so many KV blocks."""
    model = config.model_config
    geometry = KvGeometry(
        layers=model.get_total_num_hidden_layers(),
        kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
    )
    compatibility = Compatibility(
        fingerprint=fingerprint(model.model),
        engine="vllm",
        engine_version=vllm_version,
        wire_version=OURS.version,
        min_wire_version=OURS.minimum,
        geometry=geometry,
    )
    codecs = codec_speeds(geometry, DTYPES[settings.dtype]) if settings.lossy_kv else {}
    return EngineInfo(
        compatibility, blocks, model.max_model_len, settings.block_size, Rates(codecs=codecs), stages_of(config)
    )


def make_stage_buffers(core: Any) -> None:
    """Complete the pipeline stages of a started engine core; on a CPU nothing else does.

    vLLM 0.32 makes what a later stage receives into in its warm-up, and its CPU backend has none where the engine is
    eager and `kv_cache_memory_bytes` is given: the first forward of such a stage fails.
    """
    if core.vllm_config.parallel_config.pipeline_parallel_size > 1:
        core.model_executor.collective_rpc(_make_stage_buffers)


def _make_stage_buffers(worker: Any) -> None:
    runner = worker.model_runner
    if worker.device.type != "cpu" or get_pp_group().is_first_rank or runner.intermediate_tensors is not None:
        return
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )
